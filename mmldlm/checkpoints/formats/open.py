"""From a path a user gives to a readable source: a run, a checkpoint of any engine, the file or folder of a model."""

from __future__ import annotations

import codecs
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.deepspeed.files import find_zero_folder
from mmldlm.checkpoints.formats.detect import METADATA, find_safetensors, is_dcp_folder
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.locate import CHECKPOINTS, LATEST, locate_checkpoint
from mmldlm.checkpoints.manifest import MANIFEST, examine, read_manifest
from mmldlm.errors import UserError

# Of a MultimodalMMDiT saved before model_config.json listed them; everything else in it is trained.
_BUFFERS = ("latent_mean", "latent_std")
MODEL_FILE, OPTIMIZER_FILE = "model.pt", "optimizer.pt"
_HEAD_BYTES = 512
_STEP = re.compile(r"step_\d{8,}")
# Where accelerate and the Hugging Face Trainer put the DCP folder of a model.
_DCP_FOLDERS = (".", "dcp", "pytorch_model_fsdp_0")


class OpenedCheckpoint:
    """An opened source. `checkpoint` is the mmldlm checkpoint folder around it, None for foreign weights."""

    def __init__(self, weights: WeightSource, checkpoint: Path | None):
        self.weights, self.checkpoint = weights, checkpoint

    def manifest_sha256(self) -> str | None:
        """Identity of the mmldlm checkpoint: its manifest lists the checksum of every file."""
        if self.checkpoint is None:
            return None
        import hashlib

        return hashlib.sha256((self.checkpoint / MANIFEST).read_bytes()).hexdigest()

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        return {} if self.checkpoint is None else read_manifest(self.checkpoint)

    @property
    def engine(self) -> str:
        """Who saved it: the engine's kind, or the kind of file."""
        return str(self._manifest.get("engine", self.weights.engine))

    @property
    def step(self) -> int | None:
        """Training step, None where nothing records it."""
        return self._manifest.get("step", self.weights.step)

    @property
    def world_size(self) -> int | None:
        """Ranks that saved it, None where nothing records it."""
        return self._manifest.get("world_size", self.weights.world_size)


def open_source(
    path: Path | str,
    allow_nonfinite: bool = False,
    with_ema: bool = False,
    with_moments: bool = False,
    weights_only: bool = False,
) -> OpenedCheckpoint:
    """Opens a run, RUN/latest, a step folder, a DeepSpeed folder (the tag folder or the one above), a DCP folder, a
    model.pt, a safetensors file or a Hugging Face folder.

    For an mmldlm checkpoint, presence, size and end of every file are compared with the manifest first.

    Args:
        with_ema: find the moving average of the weights too, where one was saved.
        with_moments: find AdamW's moments too, where there are any.
        weights_only: damaged files that hold no state of training (the tokenizer, copies of the config) do not matter.

    Raises:
        UserError: nothing readable there, or a damaged checkpoint; the file is named.
    """
    path = Path(path)
    _refuse_a_store(path)
    if _is_run_checkpoint(path):
        checkpoint = locate_checkpoint(path)
        found = examine(checkpoint, checksums=False, tails=True)
        if found.problems:
            fix = "make it readable again" if found.unreadable else "use an older checkpoint of the run"
            raise UserError(f"a whole checkpoint in {checkpoint}", "; ".join(found.problems[:3]), fix)
        if found.descriptions and not weights_only:
            fix = "the weights are whole: copy these files from another checkpoint of the run"
            raise UserError(f"a whole checkpoint in {checkpoint}", "; ".join(found.descriptions[:3]), fix)
        folder = checkpoint / "engine"
        weights = open_folder(folder, allow_nonfinite, with_moments)
        if weights is None:
            expected = f"DeepSpeed files, {METADATA} or {MODEL_FILE} in {folder}"
            raise UserError(expected, _inside(folder), "was it saved by a newer mmldlm?")
        return OpenedCheckpoint(_with_ema(weights, folder, with_ema), checkpoint)
    is_file = path.is_file()
    opened = _open_file(path, allow_nonfinite) if is_file else open_folder(path, allow_nonfinite, with_moments)
    if opened is None:
        found = "nothing" if not path.exists() else f"a folder with {_inside(path)}" if path.is_dir() else "a file"
        raise UserError(
            f"a run, a checkpoint, a DeepSpeed or DCP folder, a model.pt or safetensors at {path}",
            found,
            "give e.g. RUN/latest, or the folder that holds the *_states.pt files",
        )
    folder = path if path.is_dir() else path.parent
    mark_buffers(opened, folder)
    return OpenedCheckpoint(_with_ema(opened, folder, with_ema), None)


def _is_run_checkpoint(path: Path) -> bool:
    # A plain file `latest` is ours or DeepSpeed's; DeepSpeed's lies in a folder that nobody names by that file.
    if path.name == LATEST and (path.is_symlink() or path.is_file()):
        return True
    if not path.is_dir():
        return False
    if (path / MANIFEST).exists() or (path / CHECKPOINTS).is_dir():
        return True
    if path.parent.name == CHECKPOINTS and _STEP.fullmatch(path.name):
        return True  # also without its manifest, which then is what is wrong with it
    # Other programs too call a folder "checkpoints".
    is_foreign = find_zero_folder(path) is not None or is_dcp_folder(path) or find_safetensors(path) is not None
    return CHECKPOINTS in (path.name, path.parent.name) and not is_foreign


def _open_file(path: Path, allow_nonfinite: bool) -> WeightSource:
    if path.name == METADATA:
        from mmldlm.checkpoints.formats.dcp.reader import DcpCheckpoint

        return DcpCheckpoint.open(path.parent, allow_nonfinite)
    if find_safetensors(path) is not None:
        from mmldlm.checkpoints.formats.safetensors.reader import SafetensorsModel

        return SafetensorsModel.open(path, allow_nonfinite)
    _refuse_text(path)
    from mmldlm.checkpoints.formats.model_pt.reader import ModelFile

    return ModelFile.open(path, allow_nonfinite)


def _refuse_a_store(path: Path) -> None:
    """Raises UserError for a folder of prepared data: its manifest looks like that of a checkpoint, and is none."""
    try:
        kind = json.loads((path / MANIFEST).read_bytes())["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if kind in ("mmldlm-store", "mmldlm-files"):
        raise UserError(f"a run or a checkpoint at {path}", "a store of prepared data", "give e.g. RUN/latest")


def _refuse_text(path: Path) -> None:
    """Raises UserError for a text file: no copy of it will be a checkpoint. (Also what git leaves of large files.)"""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except (OSError, UnicodeDecodeError):  # what cannot be read is said where it is read
        return
    if text and all(sign.isprintable() or sign.isspace() for sign in text):
        line = text.strip().partition("\n")[0][:60]
        raise UserError(f"a checkpoint or a model.pt at {path}", f"a text file ({line!r})", "give e.g. RUN/latest")


def open_folder(path: Path, allow_nonfinite: bool, with_moments: bool) -> WeightSource | None:
    """The files of an engine, or of a model, directly in a folder or where programs put them below it; None without."""
    if not path.is_dir():
        return None
    if find_zero_folder(path) is not None:
        from mmldlm.checkpoints.formats.deepspeed.reader import ZeroCheckpoint

        return ZeroCheckpoint.open(path, allow_nonfinite, with_moments)
    for name in _DCP_FOLDERS:
        if is_dcp_folder(path / name):
            from mmldlm.checkpoints.formats.dcp.reader import DcpCheckpoint

            return DcpCheckpoint.open(path / name, allow_nonfinite, with_moments)
    if (path / MODEL_FILE).is_file():
        optimizer = path / OPTIMIZER_FILE
        from mmldlm.checkpoints.formats.model_pt.reader import ModelFile

        has_optimizer = optimizer.is_file()
        return ModelFile.open(
            path / MODEL_FILE, allow_nonfinite, optimizer if has_optimizer else None, with_moments and has_optimizer
        )
    if find_safetensors(path) is not None:
        from mmldlm.checkpoints.formats.safetensors.reader import SafetensorsModel

        return SafetensorsModel.open(path, allow_nonfinite)
    return None


def _with_ema(weights: WeightSource, folder: Path, with_ema: bool) -> WeightSource:
    try:
        if with_ema:
            from mmldlm.checkpoints.formats.ema import add_ema, list_ema

            add_ema(weights, folder if list_ema(folder) else weights.path)
    except BaseException:
        weights.close()
        raise
    return weights


def _inside(path: Path) -> str:
    names = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    return ", ".join(names[:5]) or "nothing in it"


def mark_buffers(weights: WeightSource, folder: Path) -> None:
    """Of a model of ours in a foreign form, tells the buffers by the config.json beside it.

    The file itself calls all of them weights: --dtype would round them, and count them among the parameters,
    unlike in the checkpoint that it came from.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(config, dict):
        listed = config.get("buffers", _BUFFERS if config.get("architecture") == "MultimodalMMDiT" else ())
        for name in listed if isinstance(listed, list | tuple) else ():
            if name in weights.tensors and weights.tensors[name].kind == "parameter":
                weights.retype(name, "buffer")
