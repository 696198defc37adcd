"""Arithmetic of ZeRO's flat groups: how parameters are partitioned over the ranks."""

from __future__ import annotations

from mmldlm.checkpoints.formats.torch_save.reader import TorchFile
from mmldlm.checkpoints.formats.torch_save.unpickler import TensorRef
from mmldlm.checkpoints.formats.weight_source import FileRange


def slice_sizes(needed: int, world: int) -> list[list[int]]:
    """Return, per rank, the elements of its slice of a flat group with and without the tail
    padding (ZeRO-1 and 2).
    """
    size = -(-needed // (2 * world)) * 2
    return [[size, max(0, min(size, needed - rank * size))] for rank in range(world)]


def slice_parts(
    files: list[TorchFile], flats: list[TensorRef], offset: int, count: int
) -> list[FileRange]:
    """Return [offset, offset + count) of the concatenation of all ranks' flat tensors (ZeRO-1 and
    2).
    """
    parts = []
    base = 0
    for file, flat in zip(files, flats):
        low, high = max(offset, base), min(offset + count, base + flat.numel)
        if low < high:
            parts.append(FileRange(file, flat, low - base, high - low))
        base += flat.numel
    return parts


def gather_parts(
    files: list[TorchFile], flats: list[TensorRef], offset: int, count: int
) -> list[FileRange]:
    """Return a parameter of `count` elements, cut into equal shares that start at `offset` on
    every rank (ZeRO-3).
    """
    share = -(-count // len(files))
    counts = [max(0, min(share, count - rank * share)) for rank in range(len(files))]
    return [FileRange(file, flat, offset, held) for file, flat, held in zip(files, flats, counts)]
