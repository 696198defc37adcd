"""model.pt, with mmldlm's optimizer.pt: detect, open, read optimizer metadata, plan a write."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

from mmldlm.checkpoints.formats.base import OpenedCheckpoint, ReadOptions, WriteRequest
from mmldlm.checkpoints.formats.shard_index import INDEX_SUFFIX
from mmldlm.checkpoints.layout import DCP_METADATA, MODEL_FILE, OPTIMIZER_FILE
from mmldlm.errors import UserError
from mmldlm.utils.input_files import open_regular

_HEAD_BYTES = 512


class ModelPtFormat:
    """A torch.save'd state_dict under any name, an index of such files, or a folder with
    model.pt.
    """

    name = "model.pt"
    targets: tuple[str, ...] = ("model.pt", "ddp")
    has_keys = True

    def detect(self, path: Path) -> Path | None:
        if path.is_file():
            is_other = (
                path.name.endswith((".safetensors", ".safetensors.index.json"))
                or path.name == DCP_METADATA
            )
            return None if is_other else path
        return path if (path / MODEL_FILE).is_file() else None

    def open(self, path: Path, options: ReadOptions):
        from mmldlm.checkpoints.formats.model_pt.reader import ModelFile

        if path.is_file():  # a file given by itself holds weights alone
            if path.name.endswith(INDEX_SUFFIX):
                return ModelFile.open_shards(path, options.allow_nonfinite)
            _refuse_text(path)
            return ModelFile.open(
                path,
                options.allow_nonfinite,
                None,
                options.with_moments,
                options.random_access,
                options.key,
            )
        optimizer = path / OPTIMIZER_FILE if self.can_resume(path) else None
        with_moments = options.with_moments and optimizer is not None
        return ModelFile.open(
            path / MODEL_FILE,
            options.allow_nonfinite,
            optimizer,
            with_moments,
            options.random_access,
            options.key,
        )

    def can_resume(self, path: Path) -> bool:
        return os.path.lexists(
            path / OPTIMIZER_FILE
        )  # if it is no regular file, opening it says so

    def read_optimizer_metadata(self, opened: OpenedCheckpoint):
        from mmldlm.checkpoints.formats.model_pt.optimizer_metadata import read_optimizer_metadata
        from mmldlm.checkpoints.formats.named_optimizer import named_optimizer_metadata

        if opened.weights.named_optimizer is not None:
            return named_optimizer_metadata(opened)
        return read_optimizer_metadata(opened)

    def plan_write(self, request: WriteRequest):
        from mmldlm.checkpoints.formats.deepspeed_state import write_deepspeed_state
        from mmldlm.checkpoints.formats.model_pt.writer import (
            plan_model_and_optimizer,
            plan_model_file,
        )

        source, folder = request.source, request.folder
        if request.target == "ddp":
            optimizer = request.optimizer
            plan = plan_model_and_optimizer(source, optimizer, folder)
            return plan, lambda folder: write_deepspeed_state(optimizer, folder)
        return (
            plan_model_file(request.tensors, request.names, folder / MODEL_FILE),
            lambda folder: None,
        )


def _refuse_text(path: Path) -> None:
    """Raise UserError for a text file, such as git leaves in place of large files."""
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except (OSError, UnicodeDecodeError):  # the reader reports an unreadable file
        return
    if text and all(char.isprintable() or char.isspace() for char in text):
        line = text.strip().partition("\n")[0][:60]
        raise UserError(
            f"a checkpoint or a model.pt at {path}",
            f"a text file ({line!r})",
            "give e.g. RUN/latest",
        )
