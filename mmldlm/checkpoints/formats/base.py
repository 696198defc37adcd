"""The interface of a checkpoint format: detect, open, read optimizer metadata, plan a write.

A plan maps ranges of every weight and moment to tensors of new files, which may be filled in any
order. `execute` copies a source into them in one pass, in the order of the source's files. Memory
is a few chunks, whatever the size of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmldlm.checkpoints.files.dtypes import COMPLEX, DTYPES, cast, count_nonfinite
from mmldlm.checkpoints.files.file_io import run_in_threads
from mmldlm.checkpoints.files.tensor_writer import TensorFileWriter, TensorSpec
from mmldlm.checkpoints.files.torch_writer import TorchFileLayout, TorchFileWriter
from mmldlm.checkpoints.formats.export_plan import ExportPlan
from mmldlm.checkpoints.formats.optimizer import OptimizerMetadata
from mmldlm.checkpoints.formats.weight_source import (
    WEIGHT,
    OpenedCheckpoint,
    ReadOptions,
    WeightSource,
)
from mmldlm.checkpoints.manifest import SUB_GROUP_SIZE
from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.moments import MOMENTS


@dataclass(frozen=True)
class WriteRequest:
    """What a format should write.

    Attributes:
        source: Opened checkpoint.
        target: Target among manifest.TARGETS.
        folder: Folder of the new files.
        world_size: Number of ranks of the new checkpoint.
        optimizer: Optimizer metadata; None to write the weights alone.
        sub_group_size: Size of ZeRO-3's sub-groups in elements.
        export: What to write of the weights; None for targets with an optimizer.
        metadata: Strings for the header of safetensors.
        shard_bytes: Maximum size of a safetensors file (a larger tensor has its own); None for one
            file.
        verify: Whether safetensors files keep the checksums of their tensors.
    """

    source: WeightSource
    target: str
    folder: Path
    world_size: int = 1
    optimizer: OptimizerMetadata | None = None
    sub_group_size: int = SUB_GROUP_SIZE
    export: ExportPlan | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    shard_bytes: int | None = None
    verify: bool = False

    @property
    def required_optimizer(self) -> OptimizerMetadata:
        """`optimizer`, of a target that has one."""
        assert self.optimizer is not None
        return self.optimizer

    @property
    def required_export(self) -> ExportPlan:
        """`export`, of a target with weights alone."""
        assert self.export is not None
        return self.export


class CheckpointFormat(Protocol):
    """A file format of checkpoints; registry.FORMATS lists them.

    Attributes:
        name: Name of the format.
        targets: Targets among manifest.TARGETS that it writes.
        has_keys: Whether its files may hold several state dicts, of which ReadOptions.key names
            one.
    """

    name: str
    targets: tuple[str, ...]
    has_keys: bool

    def detect(self, path: Path) -> Path | None:
        """Return the file or folder to open for `path`; None if it does not hold this format."""

    def open(self, path: Path, options: ReadOptions) -> WeightSource:
        """Open what detect returned.

        Raises:
            UserError: damaged, missing, hostile or mismatched files.
        """

    def can_resume(self, path: Path) -> bool:
        """Return whether what detect returned may hold an optimizer; False for weights alone."""

    def read_optimizer_metadata(self, opened: OpenedCheckpoint) -> OptimizerMetadata:
        """Return parameter groups, settings and counters of a source that was opened with its
        moments.

        Raises:
            UserError: they are damaged.
        """

    def plan_write(self, request: WriteRequest) -> tuple[WritePlan, Callable[[Path], object]]:
        """Return the plan of the tensor files, and a function that writes all other files into the
        folder.
        """


# -- Writing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WriteSegment:
    """Elements [start, start + count) of a source's tensor, written to `tensor` in `file` from
    element `offset` on.
    """

    file: TensorFileWriter
    tensor: TensorSpec
    offset: int
    start: int
    count: int


@dataclass
class WritePlan:
    """What to write.

    Attributes:
        files: All files to write.
        segments: (name, "weight" | "exp_avg" | "exp_avg_sq") -> where its elements go.
        copied: Names of weights in files that are copied as they are.
        copied_bytes: Size of these files.
    """

    files: list[TensorFileWriter] = field(default_factory=list)
    segments: dict[tuple[str, str], list[WriteSegment]] = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)
    copied_bytes: int = 0

    def new_file(
        self, path: Path, value: Any, padding: Sequence[tuple[TensorSpec, int, int]] = ()
    ) -> TorchFileWriter:
        """Add a file for torch.load; the arguments are those of TorchFileLayout and
        TorchFileWriter.
        """
        file = TorchFileWriter(path, [TorchFileLayout(value, path.stem)], padding)
        self.files.append(file)
        return file

    def add(self, name: str, what: str, segments: Iterable[WriteSegment]) -> None:
        """Add targets of a tensor; empty segments are dropped."""
        self.segments.setdefault((name, what), []).extend(
            segment for segment in segments if segment.count
        )

    def add_whole(self, name: str, what: str, file: TensorFileWriter, tensor: TensorSpec) -> None:
        """Add a file's tensor that holds all elements of the source's."""
        self.add(name, what, [WriteSegment(file, tensor, 0, 0, tensor.numel)])

    def covered(self) -> dict[tuple[str, str], int]:
        """Return the number of different elements of every weight and moment that are written."""
        counts = {}
        for key, segments in self.segments.items():
            end = counts[key] = 0
            for segment in sorted(segments, key=lambda segment: segment.start):
                last = segment.start + segment.count
                counts[key] += max(0, last - max(end, segment.start))
                end = max(end, last)
        return counts

    @property
    def nbytes(self) -> int:
        """Number of bytes of all files."""
        return sum(file.size for file in self.files)


def execute(
    source: WeightSource,
    plan: WritePlan,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    write: bool = True,
) -> None:
    """Write all files of a plan.

    The files are flushed to the disk by the caller.

    Args:
        source: Source, opened with the moments that the plan has.
        plan: Plan of the files.
        on_bytes: Callback with the bytes written so far and in total.
        write: Whether to write; False to read and check alone.

    Raises:
        UserError: a damaged source, weights or moments that are not finite, or that overflow
            their new dtype. OSError: a failed write.
    """
    done, total = 0, sum(file.tensor_bytes for file in plan.files)
    lock = threading.Lock()

    def copy(item: tuple[str, str, int, int]) -> None:
        """Copy one range of one tensor, chunk by chunk."""
        nonlocal done
        name, what, low, high = item
        dtype = source.tensors[name].dtype if what == WEIGHT else "float32"
        for chunk, crc in source.iter_range(name, what, low, high):
            num_bytes = 0
            for segment in plan.segments[name, what]:
                first = max(segment.start, low)
                last = min(segment.start + segment.count, low + chunk.size)
                if first < last:
                    # The CRC of the chunk is reused if the chunk is written as it was read.
                    values = chunk
                    if last - first < chunk.size:
                        values = chunk[first - low : last - low]
                    target = segment.tensor.dtype
                    values = _cast_to(source, name, values, dtype, target)
                    at = (segment.offset + first - segment.start) * DTYPES[target].itemsize
                    if write:
                        num_bytes += segment.file.write(
                            segment.tensor, at, values, crc if values is chunk else None
                        )
            low += chunk.size
            with lock:
                done += num_bytes
                on_bytes(done, total)

    try:
        run_in_threads(copy, _ranges(source, plan))
        source.finish()
        for file in plan.files if write else ():
            file.finish()
    finally:
        for file in plan.files:
            file.close()


def check_nothing_left(
    source: WeightSource, covered: Mapping[tuple[str, str], int], moments: Iterable[str] = ()
) -> None:
    """Compare what was written with what the source holds: every weight, and its moments.

    A writer knows whether its own tensors are complete. This finds elements of the source that no
    writer covers.

    Args:
        covered: (name in the source, "weight" or a moment) -> number of elements in the output.
        moments: Moments that belong into the output.

    Raises:
        MmldlmError: elements of the source are left over.
    """
    expected = [(name, WEIGHT) for name, info in source.tensors.items() if not info.alias_of]
    expected += [(name, what) for what in moments for name in source.moments.get(what, {})]
    left = [key for key in expected if covered.get(key, 0) < source.tensors[key[0]].numel]
    if left:
        missing = join_some(f"{what} of {name}" for name, what in left)
        raise MmldlmError(
            f"nothing was published, as the output would not hold all of {source.path}: {missing}"
        )


def _ranges(source: WeightSource, plan: WritePlan) -> Iterator[tuple[str, str, int, int]]:
    """Yield (name, what, first element, end) of everything in the plan, in the order of the
    source's files.
    """
    for what in (WEIGHT, *MOMENTS):
        table = source.parts if what == WEIGHT else source.moments.get(what, {})
        planned = {name: parts for name, parts in table.items() if (name, what) in plan.segments}
        for name in source.in_file_order(planned):
            yield from ((name, what, *bounds) for bounds in source.ranges(name))


def _cast_to(
    source: WeightSource, name: str, values: np.ndarray, dtype: str, target: str
) -> np.ndarray:
    if dtype == target:
        return values
    if dtype in COMPLEX:
        fix = "leave it out with --only, or write --to model.pt"
        raise UserError(f"numbers that can be written as {target}", f"complex ones in {name}", fix)
    if not DTYPES[dtype].is_float:
        # A buffer: ds_to_universal widens it, too.
        return values.astype(DTYPES[target].raw)
    converted = cast(values, dtype, target)
    count = 0 if source.options.allow_nonfinite else count_nonfinite(converted, target)
    if count and count > count_nonfinite(values, dtype):
        raise UserError(
            f"weights in the range of {target}",
            f"{count} elements of {name} that overflow it",
            "use --dtype fp32 or bf16, or --allow-nonfinite",
        )
    return converted
