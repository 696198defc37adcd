"""torch.distributed.checkpoint (FSDP2): detect, open, read optimizer metadata, plan a write."""

from __future__ import annotations

from pathlib import Path

from mmldlm.checkpoints.formats.base import OpenedCheckpoint, ReadOptions, WriteRequest
from mmldlm.checkpoints.layout import DCP_METADATA

# mmldlm's own name, that of accelerate and the Hugging Face Trainer, and OLMo-core's.
_SUBFOLDERS = (".", "dcp", "pytorch_model_fsdp_0", "model_and_optim")


class DcpFormat:
    """A folder with .metadata and *.distcp files."""

    name = "dcp"
    targets: tuple[str, ...] = ("dcp", "fsdp")
    has_keys = True

    def detect(self, path: Path) -> Path | None:
        if path.name == DCP_METADATA and path.is_file():
            return path.parent
        return next(
            (path / name for name in _SUBFOLDERS if (path / name / DCP_METADATA).is_file()), None
        )

    def open(self, path: Path, options: ReadOptions):
        from mmldlm.checkpoints.formats.dcp.reader import DcpCheckpoint

        return DcpCheckpoint.open(
            path, options.allow_nonfinite, options.with_moments, options.random_access, options.key
        )

    def can_resume(self, path: Path) -> bool:
        return True

    def read_optimizer_metadata(self, opened: OpenedCheckpoint):
        from mmldlm.checkpoints.formats.dcp.optimizer_metadata import read_optimizer_metadata
        from mmldlm.checkpoints.formats.named_optimizer import named_optimizer_metadata

        if opened.weights.named_optimizer is not None:
            return named_optimizer_metadata(opened)
        return read_optimizer_metadata(opened)

    def plan_write(self, request: WriteRequest):
        from mmldlm.checkpoints.formats.dcp.writer import plan_dcp, write_descriptions

        source, optimizer = request.source, request.optimizer
        plan, metadata = plan_dcp(source, optimizer, request.world_size, request.folder)
        return plan, lambda folder: write_descriptions(source, optimizer, metadata, folder)
