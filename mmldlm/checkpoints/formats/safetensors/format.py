"""safetensors: detect and open; weights alone."""

from __future__ import annotations

from pathlib import Path

from mmldlm.checkpoints.formats.base import OpenedCheckpoint, ReadOptions, WriteRequest
from mmldlm.checkpoints.layout import SAFETENSORS_FILE, SAFETENSORS_INDEX


class SafetensorsFormat:
    """A .safetensors file, an index of shards, or a Hugging Face folder with model.safetensors or
    its index.
    """

    name = "safetensors"
    targets: tuple[str, ...] = ()
    has_keys = False

    def detect(self, path: Path) -> Path | None:
        if path.is_file():
            return find_safetensors(path)
        return path if find_safetensors(path) is not None else None

    def open(self, path: Path, options: ReadOptions):
        from mmldlm.checkpoints.formats.safetensors.reader import SafetensorsModel

        return SafetensorsModel.open(path, options.allow_nonfinite)

    def can_resume(self, path: Path) -> bool:
        return False

    def read_optimizer_metadata(self, opened: OpenedCheckpoint):
        raise AssertionError("safetensors hold weights alone")

    def plan_write(self, request: WriteRequest):
        raise AssertionError("safetensors are written by convert/to_safetensors")


def find_safetensors(path: Path) -> Path | None:
    """Return the file or index of a model at `path`, a file or a folder; None if there is none."""
    if path.is_file():
        return path if path.name.endswith((".safetensors", ".safetensors.index.json")) else None
    return next(
        (path / name for name in (SAFETENSORS_FILE, SAFETENSORS_INDEX) if (path / name).is_file()),
        None,
    )
