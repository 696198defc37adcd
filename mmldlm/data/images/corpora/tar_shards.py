"""Shards of images and captions as WebDataset lays them out: .tar files with key.jpg and key.txt or key.json.

Listing reads headers and captions; images are read later, each from its place in its shard, by the rank that needs it.
"""

from __future__ import annotations

import glob
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from mmldlm.data.images.corpora.corpus import ImageSample
from mmldlm.data.images.corpora.records import samples_of
from mmldlm.data.images.image_files import SUFFIXES
from mmldlm.data.sentences import MAX_TEXT_BYTES, TOO_LARGE
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error, first_line
from mmldlm.utils.input_files import open_regular

SUFFIX = ".tar"
_CAPTIONS = (".txt", ".json")  # in order of preference


def is_pattern(name: str) -> bool:
    """Whether a corpus is a pattern of shards, such as shards/0000*.tar."""
    return name.endswith(SUFFIX) and glob.has_magic(name)


def find_shards(name: str) -> list[Path]:
    """Return the shards of a pattern, of a folder, or one, in the order of their names."""
    path = Path(name)
    if path.is_dir():
        return sorted(found for found in path.rglob(f"*{SUFFIX}") if found.is_file())
    if path.is_file():
        return [path] if path.suffix == SUFFIX else []
    return sorted(map(Path, glob.glob(name, recursive=True))) if is_pattern(name) else []


def list_shards(shards: list[Path], counts: Counter, unreadable: dict[str, str]) -> list[ImageSample]:
    """Return the captioned images of shards, in their order.

    Args:
        counts: of what is not a sample: images without caption, captions without image.
        unreadable: receives the name and the reason of each damaged shard; what precedes the damage is kept.

    Raises:
        UserError: two shards of one name.
    """
    repeated = [name for name, number in Counter(shard.name for shard in shards).items() if number > 1]
    if repeated:
        raise UserError("shards with different names", f"several named {repeated[0]}", "rename one of them")
    samples: list[ImageSample] = []
    for shard in shards:
        found: dict[str, dict[str, tarfile.TarInfo]] = {}
        try:
            with open_regular(shard) as file:
                for member in _members(file):
                    _add(member, found, counts)
                for members in found.values():
                    samples += _samples(shard, file, members, counts)
        except _Damage as error:
            unreadable[shard.name] = str(error)
            counts["read"] += 1
            with open_regular(shard) as file:
                for members in found.values():
                    samples += _samples(shard, file, members, counts)
        except OSError as error:
            unreadable[shard.name] = describe_os_error(error)
            counts["read"] += 1
    return samples


class _Damage(ValueError):
    pass


def _members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the files of an archive.

    Raises:
        _Damage: it is not an archive, or it ends before its end.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if member.isreg() and not member.issparse():
                    yield member
            end = archive.offset
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise _Damage(f"damaged archive: {first_line(error)}") from None
    file.seek(end)
    if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a damaged header for the end
        raise _Damage(f"damaged archive: no header at byte {end:,}")


def _add(member: tarfile.TarInfo, found: dict[str, dict[str, tarfile.TarInfo]], counts: Counter) -> None:
    """Put a member under its key: its path up to the first dot of its name."""
    folder, _, name = member.name.rpartition("/")
    key, dot, kind = name.partition(".")
    suffix = f".{kind.lower()}"
    if not key or not dot or suffix not in (*SUFFIXES, *_CAPTIONS):
        return
    members = found.setdefault(f"{folder}/{key}", {})
    place = suffix if suffix in _CAPTIONS else "image"
    if place in members:
        counts["read"] += 1
        counts["drop_second_of_its_key"] += 1
    else:
        members[place] = member


def _samples(
    shard: Path, file: BinaryIO, members: dict[str, tarfile.TarInfo], counts: Counter
) -> Iterator[ImageSample]:
    image, kind = members.get("image"), next((kind for kind in _CAPTIONS if kind in members), None)
    if image is None or kind is None:
        counts["read"] += 1
        counts["drop_no_image" if image is None else "drop_no_caption"] += 1
        return
    record = {"image": f"{shard.name}/{image.name}", **_caption(file, members[kind], kind, counts)}
    if record.get("caption") is TOO_LARGE:
        counts["read"] += 1
        counts[TOO_LARGE] += 1
        return
    for sample in samples_of(record, shard.parent, counts):
        yield replace(sample, path=shard, part=(image.offset_data, image.size))


def _caption(file: BinaryIO, member: tarfile.TarInfo, kind: str, counts: Counter) -> dict[str, Any]:
    """Return the fields of a caption's file; none where it holds no text."""
    if member.size > MAX_TEXT_BYTES:
        return {"caption": TOO_LARGE}
    file.seek(member.offset_data)
    text = file.read(member.size).decode("utf-8-sig", errors="surrogateescape")  # counted as not Unicode later
    if kind == ".txt":
        return {"caption": text}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    known = ("caption", "text", "group", "image_id")
    return {key: fields[key] for key in known if key in fields} if isinstance(fields, dict) else {}
