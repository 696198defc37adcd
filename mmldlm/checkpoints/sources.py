"""From a path a user gives to a readable source of weights: a run, a checkpoint, a DeepSpeed folder or a model.pt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from mmldlm.checkpoints.commit import CHECKPOINTS, LATEST, resolve
from mmldlm.checkpoints.manifest import MANIFEST, verify
from mmldlm.checkpoints.model_file import ModelFile
from mmldlm.checkpoints.weights import WeightSource
from mmldlm.checkpoints.zero_files import find_zero_folder, is_zero_folder
from mmldlm.checkpoints.zero_reader import ZeroCheckpoint
from mmldlm.errors import UserError

MODEL_FILE = "model.pt"


@dataclass(frozen=True)
class Opened:
    """An opened source. `checkpoint` is the mmldlm checkpoint folder around it, None for foreign weights."""

    weights: WeightSource
    checkpoint: Path | None

    def manifest_sha256(self) -> str | None:
        """Identity of the mmldlm checkpoint: its manifest lists the checksum of every file."""
        if self.checkpoint is None:
            return None
        return hashlib.sha256((self.checkpoint / MANIFEST).read_bytes()).hexdigest()


def open_source(path: Path | str, allow_nonfinite: bool = False) -> Opened:
    """Opens RUN, RUN/latest, a step folder, a DeepSpeed folder (the tag folder or the one above), or a model.pt.

    For an mmldlm checkpoint, presence, size and end of every file are compared with the manifest first.

    Raises:
        UserError: nothing readable there, or a damaged checkpoint; the file is named.
    """
    path = Path(path)
    if path.is_file() and path.name != LATEST:
        return Opened(ModelFile.open(path, allow_nonfinite), None)
    if is_zero_folder(path):
        return Opened(ZeroCheckpoint.open(path, allow_nonfinite), None)
    if _is_ours(path):
        return _open_checkpoint(resolve(path), allow_nonfinite)
    if path.is_dir() and find_zero_folder(path) is not None:
        return Opened(ZeroCheckpoint.open(path, allow_nonfinite), None)
    if (path / MODEL_FILE).is_file():
        return Opened(ModelFile.open(path / MODEL_FILE, allow_nonfinite), None)
    found = "nothing" if not path.exists() else f"a folder with {_inside(path)}" if path.is_dir() else "a file"
    raise UserError(
        f"a run, a checkpoint, a DeepSpeed folder or a model.pt at {path}",
        found,
        "give e.g. RUN/latest, or the folder that holds the *_states.pt files",
    )


def _is_ours(path: Path) -> bool:
    return (
        path.name == LATEST
        or (path / MANIFEST).exists()
        or (path / CHECKPOINTS).is_dir()
        or path.name == CHECKPOINTS
        or (path.parent.name == CHECKPOINTS and path.is_dir())
    )


def _open_checkpoint(folder: Path, allow_nonfinite: bool) -> Opened:
    problems = verify(folder, checksums=False, tails=True)
    if problems:
        raise UserError(
            f"a whole checkpoint in {folder}", "; ".join(problems[:3]), "use an older checkpoint of the run"
        )
    engine = folder / "engine"
    weights: WeightSource
    if find_zero_folder(engine) is not None:
        weights = ZeroCheckpoint.open(engine, allow_nonfinite)
    elif (engine / MODEL_FILE).is_file():
        weights = ModelFile.open(engine / MODEL_FILE, allow_nonfinite)
    else:
        raise UserError(
            f"DeepSpeed files or {MODEL_FILE} in {engine}",
            _inside(engine),
            "this version converts checkpoints of the engines deepspeed, ddp and single",
        )
    return Opened(weights, folder)


def _inside(path: Path) -> str:
    names = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    return ", ".join(names[:5]) or "nothing in it"
