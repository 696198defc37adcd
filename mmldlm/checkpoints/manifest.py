"""manifest.json: which files make up a checkpoint, with sizes and checksums. It is what makes a folder a checkpoint."""

from __future__ import annotations

import json
import os
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "manifest.json"
FORMAT = "mmldlm-checkpoint"
VERSION = 1
_CHUNK = 4 << 20
# Enough for the central directory of a torch.save zip: it lists the CRC of every record, so a matching tail plus the
# records' own CRCs prove what was read of a file without a pass over the rest.
TAIL_BYTES = 1 << 20
# Files that hold no state of training: a run continues without them.
_DESCRIPTIONS = re.compile(r"config\.yaml|model_config\.json|tokenizer/.*")


class CannotRead(ValueError):
    """A manifest of which nothing is known: the system does not let it be read, or another program wrote it."""


class Examination(NamedTuple):
    """What is wrong with a checkpoint folder, one line per problem.

    Attributes:
        damaged: state of training that is missing, cut or changed.
        unreadable: state of training that cannot be read now, for whatever reason: it may be whole.
        descriptions: either of files that hold no state of training.
    """

    damaged: list[str]
    unreadable: list[str]
    descriptions: list[str]

    @property
    def problems(self) -> list[str]:
        """Why a run cannot continue from it; empty where it can."""
        return [*self.unreadable, *self.damaged]


def describe_file(path: Path) -> dict[str, int]:
    """{"bytes", "crc32", "tail_crc32"} of a file, read whole.

    CRC-32 because it is in the standard library, runs at memory speed, and the enemy is a damaged disk, a cut copy or
    a mixed-up folder; nobody is kept out by a checksum that lies beside the data.
    """
    size, crc = 0, 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return {"bytes": size, "crc32": crc, "tail_crc32": tail_crc(path)}


def tail_crc(path: Path) -> int:
    """CRC-32 of the last TAIL_BYTES of a file."""
    with open(path, "rb", buffering=0) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        crc = 0
        while chunk := file.read(TAIL_BYTES):
            crc = zlib.crc32(chunk, crc)
        return crc


def list_files(folder: Path) -> list[str]:
    """All files below `folder`, relative with forward slashes, sorted; the manifest itself left out."""
    found = []
    for base, _, names in os.walk(folder):
        found += [(Path(base) / name).relative_to(folder).as_posix() for name in names]
    return sorted(name for name in found if name != MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder.

    Raises:
        ValueError: there is none, or it is damaged; the message says which. CannotRead, if it cannot be read or is of
            another format or version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not os.path.isdir(folder):  # a link to a disk that is not mounted
            raise CannotRead(f"{folder} is not a folder that can be opened") from None
        raise ValueError(f"{path} is missing: the checkpoint was never finished or is being deleted") from None
    except OSError as error:
        raise CannotRead(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CannotRead(f"{path} is not a manifest of {FORMAT}")
    if manifest.get("version") != VERSION:
        raise CannotRead(f"{path} has version {manifest.get('version')!r}, this mmldlm reads version {VERSION}")
    if not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{path} is damaged: it lists no files")
    return manifest


def examine(folder: Path | str, checksums: bool = True, tails: bool = False) -> Examination:
    """Compare a checkpoint folder with its manifest.

    Args:
        checksums: read every byte and compare CRC-32; otherwise only presence and sizes.
        tails: without `checksums`, compare the end of every file (cheap at any size).
    """
    folder, found = Path(folder), Examination([], [], [])
    try:
        manifest = read_manifest(folder)
    except CannotRead as error:
        found.unreadable.append(str(error))
        return found
    except ValueError as error:
        found.damaged.append(str(error))
        return found
    for name, entry in manifest["files"].items():
        is_description = _DESCRIPTIONS.fullmatch(name) is not None
        try:
            problem = _difference(folder / name, entry, checksums, tails)
        except OSError as error:
            lines = found.descriptions if is_description else found.unreadable
            lines.append(f"{folder / name} cannot be read: {error.strerror or error}")
            continue
        if problem is not None:
            (found.descriptions if is_description else found.damaged).append(problem)
    return found


def verify(folder: Path | str, checksums: bool = True, tails: bool = False) -> list[str]:
    """Everything that `examine` finds, in one list: empty if every file is as it was saved."""
    found = examine(folder, checksums, tails)
    return [*found.problems, *found.descriptions]


def is_as_saved(folder: Path, name: str) -> bool:
    """Whether one (small) file of a checkpoint is what the manifest says; True where it lists no such file."""
    try:
        entry = read_manifest(folder)["files"].get(name)
        return entry is None or _difference(folder / name, entry, checksums=True, tails=False) is None
    except (OSError, ValueError):
        return False


def _difference(path: Path, entry: Any, checksums: bool, tails: bool) -> str | None:
    """How a file differs from its entry in the manifest; None where it does not.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path} has {size} bytes, the manifest says {entry['bytes']}"
        if checksums and describe_file(path)["crc32"] != entry["crc32"]:
            return f"{path} has changed since it was saved (CRC-32 differs)"
        if tails and not checksums and tail_crc(path) != entry["tail_crc32"]:
            return f"{path} has changed since it was saved (CRC-32 of its end differs)"
    except FileNotFoundError:
        return f"{path} is missing"
    except (KeyError, TypeError) as error:
        return f"{path} has no usable entry in the manifest ({error!r})"
    return None
