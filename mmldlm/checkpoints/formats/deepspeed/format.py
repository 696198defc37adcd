"""DeepSpeed ZeRO-0 to 3 and universal checkpoints: detect, open, read optimizer metadata, plan a
write.
"""

from __future__ import annotations

from pathlib import Path

from mmldlm.checkpoints.formats.base import OpenedCheckpoint, ReadOptions, WriteRequest
from mmldlm.checkpoints.layout import ENGINE_FOLDER, LATEST, UNIVERSAL_TAG, ZERO_TAG
from mmldlm.errors import UserError
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.paths import path_inside

_SUBFOLDERS = (
    ZERO_TAG,
    ENGINE_FOLDER,
    f"{ENGINE_FOLDER}/{ZERO_TAG}",
    UNIVERSAL_TAG,
    f"{ENGINE_FOLDER}/{UNIVERSAL_TAG}",
)


class DeepSpeedFormat:
    """A folder with *_states.pt files."""

    name = "deepspeed"
    targets: tuple[str, ...] = ("universal", "zero1", "zero2", "zero3")
    has_keys = False

    def detect(self, path: Path) -> Path | None:
        """Return the folder with the *_states.pt files for an engine, tag or step folder.

        Raises:
            UserError: a `latest` file names a tag that does not exist.
        """
        if _has_states(path):
            return path
        latest = path / LATEST
        if latest.is_file():
            tag = read_bytes(latest, 1 << 16).decode(errors="replace").strip()
            try:
                folder = path_inside(path, tag)
            except ValueError:
                return None
            if not _has_states(folder):
                raise UserError(
                    f"the checkpoint {tag!r} that {latest} names",
                    "no *_states.pt files there",
                    f"give the folder of the checkpoint itself, one of those in {path}",
                )
            return folder
        return next((path / name for name in _SUBFOLDERS if _has_states(path / name)), None)

    def open(self, path: Path, options: ReadOptions):
        from mmldlm.checkpoints.formats.deepspeed.reader import ZeroCheckpoint

        return ZeroCheckpoint.open(
            path,
            options.allow_nonfinite,
            options.with_moments,
            options.random_access,
            options.is_one_save,
        )

    def can_resume(self, path: Path) -> bool:
        return True

    def read_optimizer_metadata(self, opened: OpenedCheckpoint):
        from mmldlm.checkpoints.formats.deepspeed.optimizer_metadata import read_optimizer_metadata

        return read_optimizer_metadata(opened)

    def plan_write(self, request: WriteRequest):
        source, optimizer, folder = request.source, request.optimizer, request.folder
        if request.target == UNIVERSAL_TAG:
            from mmldlm.checkpoints.formats.deepspeed.universal_writer import (
                plan_universal,
                write_other_files,
            )

            plan = plan_universal(source, optimizer, folder)
            return plan, lambda folder: write_other_files(source, optimizer, folder)
        from mmldlm.checkpoints.formats.deepspeed.writer import ZeroTarget, plan_zero

        target = ZeroTarget(
            int(request.target.removeprefix("zero")), request.world_size, request.sub_group_size
        )
        return plan_zero(source, optimizer, target, folder / ZERO_TAG), lambda folder: None


def _has_states(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*_states.pt"))
