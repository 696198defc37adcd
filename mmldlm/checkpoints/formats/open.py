"""Open a path that a user gives: a run, a checkpoint of any engine, the file or folder of a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mmldlm.checkpoints.formats import registry
from mmldlm.checkpoints.formats.base import OpenedCheckpoint, ReadOptions
from mmldlm.checkpoints.formats.ema import add_ema
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.layout import CHECKPOINTS, CONFIG_FILE, DCP_METADATA, ENGINE_FOLDER, LATEST, MODEL_FILE
from mmldlm.checkpoints.locate import locate_checkpoint
from mmldlm.checkpoints.manifest import MANIFEST, examine
from mmldlm.errors import UserError

# Of a MultimodalMMDiT saved before model_config.json listed them; everything else in it is trained.
_BUFFERS = ("latent_mean", "latent_std")
_STEP = re.compile(r"step_\d{8,}")


def open_source(
    path: Path | str,
    allow_nonfinite: bool = False,
    with_ema: bool = False,
    with_moments: bool = False,
    weights_only: bool = False,
    key: str | None = None,
) -> OpenedCheckpoint:
    """Open a run, RUN/latest, a step folder, a folder of DeepSpeed or DCP, a model.pt, safetensors or their folder.

    For an mmldlm checkpoint, presence, size and end of every file are compared with the manifest first.

    Args:
        allow_nonfinite: return NaN and infinite weights instead of raising.
        with_ema: find the moving average of the weights too, if one was saved.
        with_moments: find the optimizer's moments too, if there are any.
        weights_only: ignore damaged files without training state (the tokenizer, copies of the config).
        key: which state dict of a file or DCP folder is the model, if it holds several (`state/model`).

    Raises:
        UserError: nothing readable there, or a damaged checkpoint; the error names the file.
    """
    path = Path(path)
    options = ReadOptions(allow_nonfinite, with_moments, key=key)
    _refuse_store(path)
    if _is_run_checkpoint(path):
        checkpoint = locate_checkpoint(path)
        _check_manifest(checkpoint, weights_only)
        folder = checkpoint / ENGINE_FOLDER
        weights = registry.open_path(folder, options) if folder.is_dir() else None
        if weights is None:
            expected = f"DeepSpeed files, {DCP_METADATA} or {MODEL_FILE} in {folder}"
            raise UserError(expected, _list_some(folder), "was it saved by a newer mmldlm?")
        return OpenedCheckpoint(_add_ema(weights, folder, with_ema), checkpoint)
    weights = registry.open_path(path, options)
    if weights is None:
        found = "nothing" if not path.exists() else f"a folder with {_list_some(path)}" if path.is_dir() else "a file"
        raise UserError(
            f"a run, a checkpoint, a DeepSpeed or DCP folder, a model.pt or safetensors at {path}",
            found,
            "give e.g. RUN/latest, or the folder that holds the *_states.pt files",
        )
    folder = path if path.is_dir() else path.parent
    mark_buffers(weights, folder)
    return OpenedCheckpoint(_add_ema(weights, folder, with_ema), None)


def _check_manifest(checkpoint: Path, weights_only: bool) -> None:
    found = examine(checkpoint, checksums=False, tails=True)
    if found.problems:
        fix = "make it readable again" if found.unreadable else "use an older checkpoint of the run"
        raise UserError(f"a complete checkpoint in {checkpoint}", "; ".join(found.problems[:3]), fix)
    if found.descriptions and not weights_only:
        fix = "copy these files from another checkpoint of the run; the weights are complete"
        raise UserError(f"a complete checkpoint in {checkpoint}", "; ".join(found.descriptions[:3]), fix)


def _is_run_checkpoint(path: Path) -> bool:
    # A plain file `latest` is mmldlm's or DeepSpeed's; users name DeepSpeed's folder, not that file.
    if path.name == LATEST and (path.is_symlink() or path.is_file()):
        return True
    if not path.is_dir():
        return False
    if (path / MANIFEST).exists() or (path / CHECKPOINTS).is_dir():
        return True
    if path.parent.name == CHECKPOINTS and _STEP.fullmatch(path.name):
        return True  # a missing manifest is then reported as the problem
    # Other programs too name a folder "checkpoints".
    return CHECKPOINTS in (path.name, path.parent.name) and registry.detect(path) is None


def _refuse_store(path: Path) -> None:
    """Raise UserError for a folder of prepared data, which has a manifest of another kind."""
    try:
        kind = json.loads((path / MANIFEST).read_bytes())["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if kind in ("mmldlm-store", "mmldlm-files"):
        raise UserError(f"a run or a checkpoint at {path}", "a store of prepared data", "give e.g. RUN/latest")


def _add_ema(weights: WeightSource, folder: Path, with_ema: bool) -> WeightSource:
    try:
        if with_ema:
            add_ema(weights, folder)
    except BaseException:
        weights.close()
        raise
    return weights


def _list_some(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    return ", ".join(names[:5]) or "nothing in it"


def mark_buffers(weights: WeightSource, folder: Path) -> None:
    """Classify the buffers that the config.json next to a file lists, for formats without kinds.

    Otherwise --dtype would round them, and they would count as parameters.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(config, dict):
        listed = config.get("buffers", _BUFFERS if config.get("architecture") == "MultimodalMMDiT" else ())
        for name in listed if isinstance(listed, list | tuple) else ():
            if name in weights.tensors and weights.tensors[name].kind == "parameter":
                weights.set_kind_and_dtype(name, "buffer")
