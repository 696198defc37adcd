"""Copy a source into any target layout in one sequential pass.

A plan maps ranges of every weight and moment to tensors of new files, which may be filled in any
order. Memory is a few chunks, whatever the size of the model; every byte is read and written once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from mmldlm.checkpoints.formats.dtypes import DTYPES, cast, count_nonfinite
from mmldlm.checkpoints.formats.torch_save.pickler import TensorSpec
from mmldlm.checkpoints.formats.torch_save.writer import TorchFileWriter
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.io.parallel import run_in_threads
from mmldlm.errors import UserError
from mmldlm.utils.moments import MOMENTS

WEIGHT = "weight"


@dataclass(frozen=True)
class WriteSegment:
    """Elements [start, start + count) of a source's tensor, written to `tensor` in `file` from
    element `offset` on.
    """

    file: TorchFileWriter
    tensor: TensorSpec
    offset: int
    start: int
    count: int


@dataclass
class WritePlan:
    """What to write.

    Attributes:
        files: all files.
        segments: (name, "weight" | "exp_avg" | "exp_avg_sq") -> where its elements go.
    """

    files: list[TorchFileWriter] = field(default_factory=list)
    segments: dict[tuple[str, str], list[WriteSegment]] = field(default_factory=dict)

    def add(self, name: str, what: str, segments: Iterable[WriteSegment]) -> None:
        """Add targets of a tensor; empty segments are dropped."""
        self.segments.setdefault((name, what), []).extend(
            segment for segment in segments if segment.count
        )

    @property
    def nbytes(self) -> int:
        """Number of bytes of all files."""
        return sum(file.size for file in self.files)


def execute(
    source: WeightSource,
    plan: WritePlan,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write all files of a plan.

    The files are flushed to the disk by the caller.

    Args:
        source: opened with the moments that the plan has.
        plan: what to write.
        on_bytes: called with the bytes written so far and in total.

    Raises:
        UserError: a damaged source, weights or moments that are not finite. OSError: a failed
            write.
    """
    done, total = 0, sum(file.tensor_bytes for file in plan.files)
    lock = threading.Lock()

    def copy(item: tuple[str, str, str, int, int]) -> None:
        """Copy one range of one tensor, chunk by chunk."""
        nonlocal done
        name, what, dtype, low, _ = item
        for chunk, crc in _iter_item(source, item):
            written = 0
            for segment in plan.segments[name, what]:
                first, last = (
                    max(segment.start, low),
                    min(segment.start + segment.count, low + chunk.size),
                )
                if first < last:
                    values = (
                        chunk if last - first == chunk.size else chunk[first - low : last - low]
                    )
                    values = _cast_to(source, name, values, dtype, segment.tensor.dtype)
                    at = (segment.offset + first - segment.start) * DTYPES[
                        segment.tensor.dtype
                    ].itemsize
                    written += segment.file.write(
                        segment.tensor, at, values, crc if values is chunk else None
                    )
            low += chunk.size
            with lock:
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


def verify(source: WeightSource, plan: WritePlan) -> None:
    """Read and check what a plan would write, without writing.

    Raises:
        UserError: as execute.
    """

    def read(item: tuple[str, str, str, int, int]) -> None:
        for _ in _iter_item(source, item):
            pass

    run_in_threads(read, _ranges(source, plan))
    source.finish()


def _iter_item(
    source: WeightSource, item: tuple[str, str, str, int, int]
) -> Iterator[tuple[np.ndarray, int | None]]:
    name, what, _, low, high = item
    return (
        source.iter_range(name, low, high)
        if what == WEIGHT
        else source.iter_moment_range(what, name, low, high)
    )


def _ranges(source: WeightSource, plan: WritePlan) -> Iterator[tuple[str, str, str, int, int]]:
    """Yield (name, what, dtype, first element, end) of everything in the plan, in the order of the
    source's files.
    """
    for name in source.reading_order():
        if (name, WEIGHT) in plan.segments:
            yield from (
                (name, WEIGHT, source.tensors[name].dtype, *bounds)
                for bounds in source.ranges(name)
            )
    for what in MOMENTS:
        planned = {
            name: parts
            for name, parts in source.moments.get(what, {}).items()
            if (name, what) in plan.segments
        }
        for name in source.in_file_order(planned):
            yield from ((name, what, "float32", *bounds) for bounds in source.ranges(name))


def _cast_to(
    source: WeightSource, name: str, values: np.ndarray, dtype: str, target: str
) -> np.ndarray:
    if dtype == target:
        return values
    if dtype == "complex64":
        fix = "leave it out with --only, or write --to safetensors"
        raise UserError(f"numbers that can be written as {target}", f"complex ones in {name}", fix)
    if not DTYPES[dtype].is_float:
        return values.astype(DTYPES[target].raw)  # a buffer, as ds_to_universal widens it
    values = cast(values, dtype, target)
    if target == "float16" and not source.allow_nonfinite and count_nonfinite(values, target):
        raise UserError(
            f"weights in the range of {target}",
            f"larger ones in {name}",
            "use --dtype bf16 or fp32",
        )
    return values
