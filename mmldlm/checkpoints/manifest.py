"""manifest.json: which files make up a checkpoint, with sizes and checksums. It is what makes a folder a checkpoint."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = "mmldlm-checkpoint"
VERSION = 1
_CHUNK = 4 << 20
# Enough for the central directory of a torch.save zip: it lists the CRC of every record, so a matching tail plus the
# records' own CRCs prove what was read of a file without a pass over the rest.
TAIL_BYTES = 1 << 20


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
        ValueError: there is none, or it is no manifest of this format; the message says which.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the checkpoint was never finished or is being deleted") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != FORMAT
        or not isinstance(manifest.get("files"), dict)
    ):
        raise ValueError(f"{path} is no manifest of {FORMAT}")
    if manifest.get("version") != VERSION:
        raise ValueError(f"{path} has version {manifest.get('version')!r}, this mmldlm reads version {VERSION}")
    return manifest


def verify(folder: Path | str, checksums: bool = True, tails: bool = False) -> list[str]:
    """What is wrong with a checkpoint folder, one line a problem; an empty list if it is whole.

    Args:
        checksums: read every byte and compare CRC-32; otherwise only presence and sizes.
        tails: without `checksums`, compare the end of every file (cheap at any size).
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    problems = []
    for name, entry in manifest["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                problems.append(f"{path} has {size} bytes, the manifest says {entry['bytes']}")
            elif checksums and describe_file(path)["crc32"] != entry["crc32"]:
                problems.append(f"{path} has changed since it was saved (CRC-32 differs)")
            elif tails and not checksums and tail_crc(path) != entry["tail_crc32"]:
                problems.append(f"{path} has changed since it was saved (CRC-32 of its end differs)")
        except FileNotFoundError:
            problems.append(f"{path} is missing")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error}")
        except (KeyError, TypeError) as error:
            problems.append(f"{folder / MANIFEST} has no usable entry for {name} ({error!r})")
    return problems
