"""Seeded damage to files: what disks, broken copies, editors and other programs do to them.

`damage` chooses a way that fits the content: bytes, something else in the file's place, a field of
JSON or YAML, a number in the header of .npy or safetensors, a member of a zip (its checksum fits).
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Chooser = random.Random


def flip_bit(data: bytes, chooser: Chooser) -> bytes:
    """Return the data with one bit changed."""
    place = chooser.randrange(len(data))
    changed = bytes([data[place] ^ (1 << chooser.randrange(8))])
    return data[:place] + changed + data[place + 1 :]


def cut(data: bytes, chooser: Chooser) -> bytes:
    """Return the beginning of the data."""
    return data[: chooser.randrange(len(data))]


def _doubled(data: bytes, chooser: Chooser) -> bytes:
    return data + data


def _repeated(data: bytes, chooser: Chooser) -> bytes:
    start = chooser.randrange(len(data))
    end = chooser.randrange(start, min(len(data), start + 4096) + 1)
    return data[:end] + data[start:]


def _zeroed(data: bytes, chooser: Chooser) -> bytes:
    """Return the data with a run of zeros, as a crashed file system leaves it."""
    start = chooser.randrange(len(data))
    count = min(len(data) - start, chooser.choice((1, 8, 512, 4096)))
    return data[:start] + bytes(count) + data[start + count :]


def _random_run(data: bytes, chooser: Chooser) -> bytes:
    start = chooser.randrange(len(data))
    count = min(len(data) - start, chooser.randrange(1, 64))
    return data[:start] + chooser.randbytes(count) + data[start + count :]


BYTES: dict[str, Callable[[bytes, Chooser], bytes]] = {
    "flip": flip_bit,
    "cut": cut,
    "doubled": _doubled,
    "repeated": _repeated,
    "zeroed": _zeroed,
    "random": _random_run,
}
"""Kind -> the damaged bytes of a file that is not empty."""

REPLACED: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.touch(),
    "link": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "folder": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
    "endless": lambda path: path.symlink_to("/dev/zero"),
}
"""Kind -> what makes something else in the place of a file that was removed."""


def _longer(value: Any) -> Any:
    return value * 2 if isinstance(value, (str, list)) else [value, value]


def _shorter(value: Any) -> Any:
    if isinstance(value, (str, list)):
        return value[: len(value) // 2]
    return dict(list(value.items())[: len(value) // 2]) if isinstance(value, dict) else None


def _negative(value: Any) -> Any:
    return -value if isinstance(value, (int, float)) and value else -1


_DEEP = "deep"
_NESTED = "[" * 100_000 + "]" * 100_000
NUMBERS = ("sign", "nan", "huge")
"""Kinds of FIELDS for fields that hold a number."""
FIELDS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "type": tuple(
        lambda _, other=other: other
        for other in ("word", True, None, [], {}, 1.5, [[1]], {"a": 1}, _DEEP)
    ),
    "length": (_longer, _shorter),
    "sign": (_negative,),
    "nan": (lambda _: float("nan"), lambda _: float("inf"), lambda _: float("-inf")),
    "huge": (lambda _: 10**30, lambda _: 1e300, lambda _: 2**63, lambda _: 10**400),
    "text": (lambda _: "x" * 100_000, lambda _: "\x00\x1b[31m", lambda _: "\ud800", lambda _: "/"),
}
"""Kind -> what a field of JSON or YAML is set to, given its value. Besides, a field may be absent
("missing field"), or one of another name present ("extra field")."""
_OTHER_FIELDS = ("missing field", "extra field")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every field below a value."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = list(range(len(value))) if isinstance(value, list) else []
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


def _damage_field(value: Any, chooser: Chooser) -> str:
    """Change one field of a value in place; return the kind and the field."""
    kind = chooser.choice([*FIELDS, *_OTHER_FIELDS])
    places = _places(value)
    if kind in NUMBERS:
        places = [(c, k) for c, k in places if type(c[k]) in (int, float)] or places
    container, key = chooser.choice(places)
    if kind == "missing field":
        del container[key]
    elif kind == "extra field" and isinstance(container, dict):
        container["another"] = container[key]
    else:
        kind = "type" if kind == "extra field" else kind
        container[key] = chooser.choice(FIELDS[kind])(container[key])
    return f"{kind} {key}"


def _load_document(path: Path) -> tuple[Any, Callable[[Any], str]] | None:
    """Return the value of a JSON or YAML file, and what formats it; None without a field."""
    text, dump = path.read_text(encoding="utf-8"), json.dumps
    if path.suffix in (".yaml", ".yml"):
        value, dump = yaml.safe_load(text), yaml.safe_dump
    elif path.suffix == ".json":
        value = json.loads(text)
    else:
        value = [json.loads(line) for line in text.splitlines()]
        dump = _dump_lines
    return (value, dump) if _places(value) else None


def _dump_lines(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _damage_header(data: bytes, chooser: Chooser) -> bytes | None:
    """Return .npy or safetensors data whose header claims another number; None for other data."""
    other = chooser.choice((b"-1", b"0", b"9999999999", b"1000000", b"9" * 30, b"1.5", b"1e9"))
    if data.startswith(b"\x93NUMPY"):
        start, end = 10, 10 + int.from_bytes(data[8:10], "little")
    elif data[8:9] == b"{":
        start, end = 8, 8 + int.from_bytes(data[:8], "little")
    else:
        return None
    header = data[start:end]
    number = chooser.choice(list(re.finditer(rb"\d+", header)))
    header = header[: number.start()] + other + header[number.end() :]
    if start == 10:
        return data[:8] + len(header).to_bytes(2, "little") + header + data[end:]
    return len(header).to_bytes(8, "little") + header + data[end:]


def _damage_member(data: bytes, chooser: Chooser) -> bytes:
    """Return a zip file of which one member is damaged, with checksums that fit."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    # Mostly the pickle of torch.save, which says what the others are.
    pickles = [name for name, _ in members if name.endswith(".pkl")]
    chosen = chooser.choice(pickles or [name for name, content in members if content])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members:
            if name == chosen:
                content = chooser.choice(list(BYTES.values()))(content, chooser)
            archive.writestr(name, content)
    return buffer.getvalue()


def damage(path: Path, chooser: Chooser) -> str:
    """Damage a file in one way; return its kind, with the field it concerns."""
    data = path.read_bytes()
    ways = ["bytes"] * 3 + ["replaced"]
    if not data:
        ways = ["replaced"]
    elif path.suffix in (".yaml", ".yml", ".json", ".jsonl"):
        ways += ["field"] * 5
    elif data.startswith(b"PK"):
        ways += ["member"] * 2
    elif data.startswith(b"\x93NUMPY") or path.suffix == ".safetensors":
        ways += ["header"] * 2
    way = chooser.choice(ways)
    if way == "replaced":
        kind = chooser.choice(list(REPLACED))
        path.unlink()
        REPLACED[kind](path)
        return kind
    if way == "field" and (document := _load_document(path)):
        value, dump = document
        kind = _damage_field(value, chooser)
        text = dump(value).replace(f'"{_DEEP}"', _NESTED)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        return kind
    if way == "header":
        path.write_bytes(_damage_header(data, chooser) or data)
        return "header"
    if way == "member":
        path.write_bytes(_damage_member(data, chooser))
        return "member"
    kind = chooser.choice(list(BYTES))
    path.write_bytes(BYTES[kind](data, chooser))
    return kind


def restore(path: Path, original: Path) -> None:
    """Put a file back as it was before `damage`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    shutil.copy2(original, path)
