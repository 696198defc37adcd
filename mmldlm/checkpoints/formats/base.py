"""What a checkpoint format offers: detect, open, read optimizer metadata, plan a write."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmldlm.checkpoints.layout import SUB_GROUP_SIZE
from mmldlm.checkpoints.manifest import MANIFEST, read_manifest
from mmldlm.utils.input_files import read_bytes

if TYPE_CHECKING:
    from mmldlm.checkpoints.formats.optimizer_metadata import OptimizerMetadata
    from mmldlm.checkpoints.formats.torch_save.pickler import TensorSpec
    from mmldlm.checkpoints.formats.weight_source import WeightSource
    from mmldlm.checkpoints.formats.write_plan import WritePlan


@dataclass(frozen=True)
class ReadOptions:
    """How to open a checkpoint.

    Attributes:
        allow_nonfinite: return NaN and infinite weights instead of raising.
        with_moments: find the moments too, and refuse a checkpoint of another optimizer than AdamW
            and Muon.
        random_access: read only what is requested (see torch_save/reader).
        is_one_save: a manifest was compared with the files: their counters are not compared with
            each other. Those of mmldlm's runs may differ (skipped steps, rollbacks).
        key: which state dict of a file or DCP folder is the model (see selection); None for the
            only one.
    """

    allow_nonfinite: bool = False
    with_moments: bool = False
    random_access: bool = False
    is_one_save: bool = False
    key: str | None = None


@dataclass(frozen=True)
class WriteRequest:
    """What a format should write.

    Attributes:
        source: the opened checkpoint.
        target: one of layout.TARGETS.
        folder: where the files go.
        world_size: number of ranks of the new checkpoint.
        optimizer: None to write the weights alone.
        sub_group_size: ZeRO-3's, in elements.
        tensors: model.pt only: source name -> what to write of it.
        names: model.pt only: every name in the file -> source name; tied weights share one.
    """

    source: WeightSource
    target: str
    folder: Path
    world_size: int = 1
    optimizer: OptimizerMetadata | None = None
    sub_group_size: int = SUB_GROUP_SIZE
    tensors: dict[str, TensorSpec] | None = None
    names: dict[str, str] | None = None


class OpenedCheckpoint:
    """An opened source of weights.

    Attributes:
        weights: the source.
        checkpoint: the mmldlm checkpoint folder that contains it; None for weights of other
            programs.
    """

    def __init__(self, weights: WeightSource, checkpoint: Path | None):
        self.weights, self.checkpoint = weights, checkpoint

    def manifest_sha256(self) -> str | None:
        """Return the SHA-256 of the manifest, which lists the checksum of every file; None without
        a manifest.
        """
        if self.checkpoint is None:
            return None
        return hashlib.sha256(read_bytes(self.checkpoint / MANIFEST)).hexdigest()

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        return {} if self.checkpoint is None else read_manifest(self.checkpoint)

    @property
    def engine(self) -> str:
        """The engine that saved it, or the kind of file."""
        return str(self._manifest.get("engine", self.weights.engine))

    @property
    def step(self) -> int | None:
        """Training step; None if not recorded."""
        return self._manifest.get("step", self.weights.step)

    @property
    def world_size(self) -> int | None:
        """Number of ranks that saved it; None if not recorded."""
        return self._manifest.get("world_size", self.weights.world_size)


class CheckpointFormat(Protocol):
    """A file format of checkpoints. One module `format.py` per folder; registry.FORMATS lists
    them.

    Attributes:
        name: its name.
        targets: those of layout.TARGETS that it writes.
        has_keys: whether its files may hold several state dicts, of which ReadOptions.key names
            one.
    """

    name: str
    targets: tuple[str, ...]
    has_keys: bool

    def detect(self, path: Path) -> Path | None:
        """Return the file or folder to open for `path`;

        None if `path` does not hold this format.
        """

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
