"""The names of a checkpoint's files, and manifest.json: every file with its size and checksums.

A folder with a manifest of mmldlm is a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm.checkpoints.files.file_io import open_regular_descriptor
from mmldlm.data import CODEC_FILES
from mmldlm.utils.formatting import describe_os_error
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.paths import path_inside
from mmldlm.utils.run_files import CONFIG, LAST_BEST, LATEST

# -- Names ----------------------------------------------------------------------------------------

# A run
LINKS = (LATEST, LAST_BEST)
"""Links to checkpoints in a run's folder."""
ENGINE_FOLDER = "engine"
STATE_FILE = "training_state.json"
MODEL_CONFIG = "model_config.json"
RUN_CONFIG = CONFIG
MANIFEST = "manifest.json"

# Files of an engine's folder: the tag folder of DeepSpeed files, as mmldlm's engine names it.
ZERO_TAG = "zero"
UNIVERSAL_TAG = "universal"
# Names of trained weights and buffers, next to DCP files.
TRAINABLE_FILE = "trainable.json"
DCP_METADATA = ".metadata"
MODEL_FILE = "model.pt"
OPTIMIZER_FILE = "optimizer.pt"
# Records of DeepSpeed from a converted run, next to DCP files or optimizer.pt.
DEEPSPEED_STATE = "deepspeed.pt"

# Files of an exported model.
SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

# zero_optimization.sub_group_size where a DeepSpeed config does not set it.
SUB_GROUP_SIZE = 10**9

CHECKPOINT_FILES = {
    f"{ENGINE_FOLDER}/": (
        "weights and moments: `model.pt` + `optimizer.pt` (single, ddp), `__*.distcp` +"
        " `.metadata` + `trainable.json` (fsdp), `zero/*_states.pt` (DeepSpeed); written by rank 0"
        " under single, ddp and ZeRO-0, else by every rank"
    ),
    f"{ENGINE_FOLDER}/ema_rankN.pt": "the moving average, sharded like the masters",
    STATE_FILE: "steps, applied and skipped steps, samples, seed, versions",
    "rng_state_rankN.pt": "generators of each rank (order and noise do not depend on them)",
    RUN_CONFIG: "the config of the run",
    MODEL_CONFIG: "the sizes of the model",
    "tokenizer/": "the tokenizer of the store",
    **dict.fromkeys(CODEC_FILES, "of a model of images: what turns its latents into pixels"),
    MANIFEST: "size and checksum of every file; a folder without it is not a checkpoint",
}
"""Names in a folder checkpoints/step_N, and what they hold, in Markdown."""

# Values of `mmldlm convert --to`.
TARGETS = ("safetensors", "model.pt", "dcp", "universal", "zero1", "zero2", "zero3", "fsdp", "ddp")
# Those that hold weights alone; dcp does too if the source has no optimizer.
EXPORTS = ("safetensors", "model.pt")


# -- The manifest ---------------------------------------------------------------------------------

FORMAT = "mmldlm-checkpoint"
VERSION = 1
_CHUNK = 4 << 20
# Enough for the central directory of a torch.save zip, which lists the CRC of every record: a
# matching tail and the CRCs of the records verify what was read without reading the rest.
TAIL_BYTES = 1 << 20
# What the manifest says of a file (`describe_file`).
_ENTRY = ("bytes", "crc32", "tail_crc32")
# Files without training state: a run continues without them.
_DESCRIPTIONS = re.compile(
    "|".join((r"config\.yaml|model_config\.json|tokenizer/.*", *map(re.escape, CODEC_FILES)))
)


# Entry of a manifest: {name: "768x256"} of every parameter (a tied one under each of its names)
# and persistent buffer, against which a conversion compares the weights that it finds.
TENSOR_TABLE = "tensors"
# Entry of a manifest: the figures of the evaluation at the checkpoint's step, if there was one.
EVALUATION = "evaluation"
# Entry of a manifest: the skipped steps before it, if any, with which no rollback may use it.
SKIPS = "consecutive_skips"


def tensor_table(shapes: Mapping[str, Iterable[int]]) -> dict[str, str]:
    """Return the entry TENSOR_TABLE of a manifest."""
    return {name: "x".join(map(str, shape)) for name, shape in shapes.items()}


class CannotRead(ValueError):
    """A manifest whose content is unknown: it cannot be read, or another program wrote it."""


class Examination(NamedTuple):
    """Problems of a checkpoint folder, one line each.

    Attributes:
        damaged: Problems of training state that is missing, truncated or changed.
        unreadable: Problems of training state that cannot be read now; it may be complete.
        descriptions: Problems of either kind of files without training state.
    """

    damaged: list[str]
    unreadable: list[str]
    descriptions: list[str]

    @property
    def problems(self) -> list[str]:
        """Reasons why a run cannot continue from it; empty if it can."""
        return [*self.unreadable, *self.damaged]


def describe_file(path: Path) -> dict[str, int]:
    """Read a file and return its {"bytes", "crc32", "tail_crc32"}.

    CRC-32 is in the standard library and runs at memory speed. It detects damaged disks, truncated
    copies and mixed-up folders; no checksum stored next to the data protects against manipulation.
    """
    size, crc = 0, 0
    with open(open_regular_descriptor(path), "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return {"bytes": size, "crc32": crc, "tail_crc32": tail_crc(path)}


def tail_crc(path: Path) -> int:
    """Return the CRC-32 of the last TAIL_BYTES of a file."""
    with open(open_regular_descriptor(path), "rb", buffering=0) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        crc = 0
        while chunk := file.read(TAIL_BYTES):
            crc = zlib.crc32(chunk, crc)
        return crc


def list_files(folder: Path) -> list[str]:
    """Return all files below `folder` but the manifest, relative with forward slashes, sorted."""
    file_names = []
    for base, _, names in os.walk(folder):
        file_names += [(Path(base) / name).relative_to(folder).as_posix() for name in names]
    return sorted(name for name in file_names if name != MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint folder.

    Raises:
        ValueError: it does not exist or is damaged; the message says which.
        CannotRead: it cannot be read, or is of another format or version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_bytes(path))
    except FileNotFoundError:
        # It may be a symlink to a disk that is not mounted.
        if not os.path.isdir(folder):
            raise CannotRead(f"{folder} is not a folder that can be opened") from None
        raise ValueError(
            f"{path} is missing: the checkpoint was never finished or is being deleted"
        ) from None
    except OSError as error:
        raise CannotRead(f"{path} cannot be read: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CannotRead(f"{path} is not a manifest of {FORMAT}")
    if manifest.get("version") != VERSION:
        raise CannotRead(
            f"{path} has version {manifest.get('version')!r}, this mmldlm reads version {VERSION}"
        )
    if not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{path} is damaged: it does not list files")
    for name, entry in manifest["files"].items():
        try:
            path_inside(folder, name)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: it lists {error}") from None
        if not isinstance(entry, dict) or not all(_is_count(entry.get(key)) for key in _ENTRY):
            raise ValueError(f"{path} is damaged: {name} without {', '.join(_ENTRY)}")
    for key, lowest in (("step", 0), ("world_size", 1)):
        if key in manifest and not (_is_count(manifest[key]) and manifest[key] >= lowest):
            raise ValueError(f"{path} is damaged: {key} {str(manifest[key])[:80]!r}")
    return manifest


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def examine(folder: Path | str, checksums: bool = True, tails: bool = False) -> Examination:
    """Compare a checkpoint folder with its manifest.

    Args:
        folder: Folder of the checkpoint.
        checksums: Whether to read every byte and compare CRC-32, not only presence and sizes.
        tails: Whether to compare the end of every file where `checksums` is off (cheap at any
            size).
    """
    folder, examination = Path(folder), Examination([], [], [])
    try:
        manifest = read_manifest(folder)
    except CannotRead as error:
        examination.unreadable.append(str(error))
        return examination
    except ValueError as error:
        examination.damaged.append(str(error))
        return examination
    for name, entry in manifest["files"].items():
        is_description = _DESCRIPTIONS.fullmatch(name) is not None
        try:
            problem = _difference(folder / name, entry, checksums, tails)
        except OSError as error:
            lines = examination.descriptions if is_description else examination.unreadable
            lines.append(f"{folder / name} cannot be read: {describe_os_error(error)}")
            continue
        if problem is not None:
            (examination.descriptions if is_description else examination.damaged).append(problem)
    return examination


def verify(folder: Path | str, checksums: bool = True) -> list[str]:
    """Return all findings of `examine` in one list; empty if every file is as it was saved."""
    examination = examine(folder, checksums)
    return [*examination.problems, *examination.descriptions]


def is_as_saved(folder: Path, name: str) -> bool:
    """Return whether one (small) file of a checkpoint matches the manifest, or is not listed in
    it.
    """
    try:
        entry = read_manifest(folder)["files"].get(name)
        return (
            entry is None or _difference(folder / name, entry, checksums=True, tails=False) is None
        )
    except (OSError, ValueError):
        return False


def _difference(path: Path, entry: dict[str, int], checksums: bool, tails: bool) -> str | None:
    """Describe how a file differs from its entry in the manifest; None if it does not.

    Raises:
        OSError: it exists and cannot be read.
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
    return None
