"""One pass over a source that fills the files of any layout: every byte is read once, in order, and goes where it must.

A plan says, for every weight and moment, which of its elements go to which tensor of which file; the files may be
filled in any order (torch_writer). Memory is a few chunks, whatever the size of the model; nothing is written twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from mmldlm.checkpoints.formats.adam_state import MOMENTS
from mmldlm.checkpoints.formats.dtypes import DTYPES, cast, nonfinite_count
from mmldlm.checkpoints.formats.torch_save.pickler import TensorSpec
from mmldlm.checkpoints.formats.torch_save.writer import TorchFileWriter
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.io.parallel import run_in_threads
from mmldlm.errors import UserError

WEIGHT = "weight"


@dataclass(frozen=True)
class WriteSegment:
    """Elements [start, start + count) of a source's tensor go to element `at` and following of `tensor` in `file`."""

    file: TorchFileWriter
    tensor: TensorSpec
    at: int
    start: int
    count: int


@dataclass
class WritePlan:
    """(name, "weight" | "exp_avg" | "exp_avg_sq") -> where its elements go; and all files that will be written."""

    files: list[TorchFileWriter] = field(default_factory=list)
    segments: dict[tuple[str, str], list[WriteSegment]] = field(default_factory=dict)

    def send(self, name: str, what: str, segments: Iterable[WriteSegment]) -> None:
        """Adds to where a tensor goes."""
        self.segments.setdefault((name, what), []).extend(segment for segment in segments if segment.count)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def execute(
    source: WeightSource,
    plan: WritePlan,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    is_flushed: bool = True,
) -> int:
    """Writes all files of a plan; returns the bytes of the tensors in them.

    Args:
        is_flushed: they will be flushed to the disk, which may begin with it now.

    Raises:
        UserError: a damaged source, weights or moments that are not finite. OSError: a failed write.
    """
    done, total = 0, sum(file.tensor_bytes for file in plan.files)
    counting = threading.Lock()
    for file in plan.files:
        file.is_flushed = is_flushed

    def copy(item: tuple[str, str, str, int, int]) -> None:
        """One range of one tensor, chunk by chunk, to where it goes."""
        nonlocal done
        name, what, dtype, low, _ = item
        for chunk, crc in _pieces(source, item):
            written = 0
            for segment in plan.segments[name, what]:
                first, last = max(segment.start, low), min(segment.start + segment.count, low + chunk.size)
                if first < last:
                    values = chunk if last - first == chunk.size else chunk[first - low : last - low]
                    values = _fitting(source, name, values, dtype, segment.tensor.dtype)
                    at = (segment.at + first - segment.start) * DTYPES[segment.tensor.dtype].itemsize
                    written += segment.file.write(segment.tensor, at, values, crc if values is chunk else None)
            low += chunk.size
            with counting:
                done += written
                on_bytes(done, total)

    try:
        run_in_threads(copy, _ranges(source, plan))
        source.finish()
        for file in plan.files:
            file.finish()
    finally:
        for file in plan.files:
            file.close()
    return total


def verify(source: WeightSource, plan: WritePlan) -> None:
    """Reads and checks what a plan would write, and writes nothing.

    Raises:
        UserError: as execute.
    """

    def read(item: tuple[str, str, str, int, int]) -> None:
        for _ in _pieces(source, item):
            pass

    run_in_threads(read, _ranges(source, plan))
    source.finish()


def _pieces(source: WeightSource, item: tuple[str, str, str, int, int]) -> Iterator[tuple[np.ndarray, int | None]]:
    name, what, _, low, high = item
    return source.pieces(name, low, high) if what == WEIGHT else source.moment_pieces(what, name, low, high)


def _ranges(source: WeightSource, plan: WritePlan) -> Iterator[tuple[str, str, str, int, int]]:
    """(name, what, dtype, first element, end) of all that the plan wants, in the order of the source's files."""
    for name in source.reading_order():
        if (name, WEIGHT) in plan.segments:
            yield from ((name, WEIGHT, source.tensors[name].dtype, *span) for span in source.spans(name))
    for what in MOMENTS:
        wanted = {name: parts for name, parts in source.moments.get(what, {}).items() if (name, what) in plan.segments}
        for name in source.in_file_order(wanted):
            yield from ((name, what, "float32", *span) for span in source.spans(name))


def _fitting(source: WeightSource, name: str, values: np.ndarray, dtype: str, target: str) -> np.ndarray:
    if dtype == target:
        return values
    if not DTYPES[dtype].is_float:
        return values.astype(DTYPES[target].raw)  # a buffer, as ds_to_universal widens it
    values = cast(values, dtype, target)
    if target == "float16" and not source.allow_nonfinite and nonfinite_count(values, target):
        raise UserError(f"weights that fit {target}", f"larger ones in {name}", "use --dtype bf16 or fp32")
    return values
