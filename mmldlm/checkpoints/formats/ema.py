"""The moving average of the weights: `ema_rank{N}.pt` next to an engine's files, one per rank that
holds a part.

A file is a torch.save'd dict: trainable name -> {"start": first flat element, "shape": shape of
the unsharded tensor, "values": 1-d tensor}. Engines cut the weights differently; the fragments
must cover every weight.
"""

from __future__ import annotations

import re
from pathlib import Path

from mmldlm.checkpoints.files.torch_file import (
    SAME_SAVE_HINT,
    TorchFile,
    corrupt_file_error,
)
from mmldlm.checkpoints.files.unpickler import TensorRef
from mmldlm.checkpoints.formats.weight_source import FileRange, WeightSource
from mmldlm.errors import UserError

_EMA = re.compile(r"ema_rank\d+\.pt")


def list_ema_files(folder: Path) -> list[Path]:
    """Return the files of all ranks."""
    return sorted(path for path in folder.glob("ema_rank*.pt") if _EMA.fullmatch(path.name))


def add_ema(source: WeightSource, folder: Path) -> None:
    """Find the average of every trainable weight of `source` in `folder`, or else next to the
    engine's own files.

    Without any file, do nothing. If the source does not record which weights are trained, the
    files decide.

    Raises:
        UserError: a damaged file, a fragment that does not match its weight, or elements without a
            fragment.
    """
    fragments: dict[str, list[tuple[int, int, FileRange]]] = {}
    if not (paths := list_ema_files(folder)):
        folder = source.path
        paths = list_ema_files(folder)
    for path in paths:
        file = TorchFile(path, source.options.random_access)
        source.files.append(file)
        for name, entry in file.load_dict().items():
            owner, start, ref = _fragment(source, file, name, entry)
            fragments.setdefault(owner, []).append(
                (start, start + ref.numel, FileRange(file, ref, 0, ref.numel))
            )
    if not paths:
        return
    for name, info in source.tensors.items():
        if info.kind == "trainable" or (info.kind == "parameter" and name in fragments):
            source.ema[name] = _cover(folder, name, info.numel, fragments.get(name, []))


def _fragment(
    source: WeightSource, file: TorchFile, name: object, entry: object
) -> tuple[str, int, TensorRef]:
    info = source.tensors.get(name) if isinstance(name, str) else None
    entry = entry if isinstance(entry, dict) else {}
    start, shape, ref = entry.get("start"), entry.get("shape"), entry.get("values")
    if (
        info is None
        or not isinstance(ref, TensorRef)
        or type(start) is not int
        or not isinstance(shape, (list, tuple))
    ):
        raise corrupt_file_error(
            file.path,
            f"entry {str(name)[:80]!r}, which is not a fragment of a weight of this checkpoint",
        )
    file.check_ref(ref, str(name))
    is_inside = start >= 0 and start + ref.numel <= info.numel and tuple(shape) == info.shape
    if not is_inside or ref.dtype != "float32" or not ref.is_contiguous:
        found = (
            f"{ref.numel} {ref.dtype} elements from {start} of {name} {tuple(shape)}, whose shape"
            f" is {info.shape}"
        )
        raise corrupt_file_error(file.path, found)
    return info.alias_of or info.name, start, ref


def _cover(
    folder: Path, name: str, numel: int, fragments: list[tuple[int, int, FileRange]]
) -> list[FileRange]:
    """Return parts that hold each of the elements 0..numel once; the first of several overlapping
    fragments (replicas) counts.
    """
    parts, position = [], 0
    for start, end, part in sorted(fragments, key=lambda item: item[:2]):
        if start > position:
            break
        if end > position:
            parts.append(FileRange(part.file, part.ref, position - start, end - position))
            position = end
    if position < numel:
        raise UserError(
            f"the moving average of all {numel} elements of {name} in the ema_rank*.pt files of"
            f" {folder}",
            f"none of element {position}",
            f"{SAME_SAVE_HINT}, or delete them to restart the average",
        )
    return parts
