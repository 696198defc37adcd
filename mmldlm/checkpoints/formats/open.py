"""Open a path that a user gives: a run, a checkpoint of any engine, the file or folder of a
model.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from mmldlm.checkpoints.files.file_io import closed_on_error, read_json_object
from mmldlm.checkpoints.files.torch_file import TorchFile
from mmldlm.checkpoints.formats import part_files, registry
from mmldlm.checkpoints.formats.ema import add_ema
from mmldlm.checkpoints.formats.foreign_folder import (
    check_folder,
    is_source,
    list_modules,
    list_some,
    nothing_error,
)
from mmldlm.checkpoints.formats.weight_source import OpenedCheckpoint, ReadOptions, WeightSource
from mmldlm.checkpoints.formats.wrapper_names import remove_wrappers
from mmldlm.checkpoints.locate import STEP_FOLDER, check_complete, locate_checkpoint
from mmldlm.checkpoints.manifest import (
    CONFIG_FILE,
    DCP_METADATA,
    ENGINE_FOLDER,
    FORMAT,
    LINKS,
    MANIFEST,
    MODEL_FILE,
)
from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.run_files import CHECKPOINTS, LATEST

P = ParamSpec("P")
T = TypeVar("T")
# Buffers of a MultimodalMMDiT saved before model_config.json listed them; everything else in it is
# trained.
_BUFFERS = ("latent_mean", "latent_std")


def open_source(
    path: Path | str,
    allow_nonfinite: bool = False,
    with_ema: bool = False,
    with_moments: bool = False,
    weights_only: bool = False,
    keep_names: bool = False,
    key: str | None = None,
) -> OpenedCheckpoint:
    """Open a run, RUN/latest, a step folder, a folder of DeepSpeed or DCP, a model.pt, safetensors
    or their folder.

    For an mmldlm checkpoint, presence, size and end of every file are compared with the manifest
    first.

    Args:
        allow_nonfinite: Whether to return NaN and infinite weights instead of raising.
        with_ema: Whether to find the moving average of the weights, if one was saved.
        with_moments: Whether to find the optimizer's moments, if there are any.
        weights_only: Whether to ignore damaged files without training state (the tokenizer,
            copies of the config).
        keep_names: Whether to keep what torch's wrappers put before the names of a state_dict (see
            wrapper_names).
        key: State dict of a file or DCP folder that is the model, if it holds several
            (`state/model`).

    Raises:
        UserError: nothing readable there, or a damaged checkpoint; the error names the file.
    """
    path = Path(path)
    is_plain = path.name == LATEST and path.is_file() and not path.is_symlink()
    if (
        is_plain
        and not (path.parent / CHECKPOINTS).is_dir()
        and registry.detect(path.parent) is not None
    ):
        # The file is DeepSpeed's.
        path = path.parent
    options = ReadOptions(allow_nonfinite, with_moments, key=key)
    _refuse_store(path)
    if _is_run_checkpoint(path):
        checkpoint = locate_checkpoint(path)
        changed = check_complete(checkpoint, checksums=False, tails=True)
        if changed and not weights_only:
            raise UserError(
                f"a complete checkpoint in {checkpoint}",
                "; ".join(changed[:3]),
                "copy these files from another checkpoint of the run; the weights are complete",
            )
        folder = checkpoint / ENGINE_FOLDER
        options = replace(options, is_one_save=True)
        weights = registry.open_path(folder, options) if folder.is_dir() else None
        if weights is None:
            expected = f"DeepSpeed files, {DCP_METADATA} or {MODEL_FILE} in {folder}"
            raise UserError(expected, list_some(folder), "was it saved by a newer mmldlm?")
        with closed_on_error(weights):
            if with_ema:
                add_ema(weights, folder)
        return OpenedCheckpoint(weights, checkpoint)
    weights, notes = _open_foreign(path, options)
    with closed_on_error(weights):
        weights.notes.extend(notes)
        folder = path if path.is_dir() else path.parent
        _note_foreign_objects(weights)
        mark_buffers(weights, folder)
        if with_ema:
            add_ema(weights, folder)
        _remove_wrappers(weights, keep_names)
    return OpenedCheckpoint(weights, None)


def _open_foreign(path: Path, options: ReadOptions) -> tuple[WeightSource, list[str]]:
    """Open a file or folder that is not of a run of mmldlm, and holds one complete model. Return
    it with notes.

    Raises:
        UserError: nothing readable there, several models, a part of one, or a damaged checkpoint.
    """
    notes: list[str] = []
    chosen = path
    if path.is_dir():
        only, detected = check_folder(path, notes), registry.detect(path)
        # A folder that no format knows by the names in it may still hold one file of weights.
        if only is not None and detected is None:
            chosen = only
        elif only and detected and only.is_file() and detected.format.name in ("deepspeed", "dcp"):
            notes.append(f"{only.name}, next to the checkpoint, was not read")
    if chosen.is_file():
        part_files.check_name(chosen)
    weights = registry.open_path(chosen, options)
    if weights is None:
        raise nothing_error(path)
    with closed_on_error(weights):
        part_files.check_tensors(weights.path, weights.tensors)
        if chosen.is_file():
            part_files.check_siblings(chosen)
    folder = path if path.is_dir() else path.parent
    if modules := list_modules(folder):
        notes.append(
            f"{folder} is a model of sentence-transformers: only the weights of"
            f" {weights.path.name} are taken, without modules.json and {join_some(modules)}"
        )
    return weights, notes


def _remove_wrappers(weights: WeightSource, keep_names: bool) -> None:
    """Take the names of torch's wrappers off those of a state_dict that another program saved.

    DeepSpeed and torch.distributed.checkpoint record the model's own names; mmldlm's optimizer.pt
    does, too.
    """
    is_state_dict = weights.engine in ("model.pt", "safetensors") and bool(weights.unclassified)
    bare = remove_wrappers(weights.tensors, weights.module_names)
    if keep_names or not bare.notes:
        return
    if is_state_dict:
        weights.rename(bare.names)
        weights.notes.extend(bare.notes)
    elif any(new != name for name, new in bare.names.items()):
        prefix = next(iter(weights.tensors)).partition(".")[0] + "."
        weights.notes.append(
            f"names of wrappers were kept, as saved; --strip-prefix {prefix} removes a prefix"
        )


def _note_foreign_objects(weights: WeightSource) -> None:
    kinds = sorted(
        {
            kind
            for file in weights.files
            if isinstance(file, TorchFile)
            for kind in file.foreign_objects
        }
    )
    if kinds:
        weights.notes.append(
            f"objects that are not weights were left unread: {join_some(kinds)}; nothing was"
            " executed"
        )


def reports_deletion(
    read: Callable[Concatenate[Path | str, P], T],
) -> Callable[Concatenate[Path | str, P], T]:
    """Wrap a function whose first argument is a source: if it fails because a run has deleted the
    checkpoint meanwhile, the error says so.
    """

    @functools.wraps(read)
    def wrapped(source: Path | str, *args: P.args, **options: P.kwargs) -> T:
        path = Path(source)
        folder = path.resolve()
        with contextlib.suppress(MmldlmError, OSError):
            # Resolved now, because `latest` moves on while the checkpoint is read.
            folder = locate_checkpoint(path) if _is_run_checkpoint(path) else folder
        was_there = (folder / MANIFEST).exists()
        try:
            return read(source, *args, **options)
        except (MmldlmError, OSError, ValueError) as error:
            if not was_there or (folder / MANIFEST).exists():
                raise
            raise UserError(
                f"a checkpoint that stays while it is read: {folder}",
                "its run deleted it meanwhile",
                f"take {folder.parent.parent / LATEST}, which names the newest one, or keep more"
                " of them",
            ) from error

    return wrapped


def _is_run_checkpoint(path: Path) -> bool:
    if path.name in LINKS and path.is_symlink() and path.exists():
        # Other programs link their newest checkpoint, too.
        return _is_run_checkpoint(path.parent / os.readlink(path))
    if path.name in LINKS and (path.is_symlink() or path.is_file()):
        return True
    if not path.is_dir():
        return False
    if _is_manifest(path / MANIFEST):
        return True
    if (path / CHECKPOINTS).is_dir():
        return not _is_foreign(path / CHECKPOINTS)
    if path.parent.name == CHECKPOINTS and STEP_FOLDER.fullmatch(path.name):
        # Of a checkpoint of mmldlm the missing manifest is then reported as the problem.
        return (path / ENGINE_FOLDER).is_dir() or registry.detect(path) is None
    is_named_so = CHECKPOINTS in (path.name, path.parent.name) and registry.detect(path) is None
    return is_named_so and not _is_foreign(path)


def _is_foreign(checkpoints: Path) -> bool:
    """Return whether a folder `checkpoints` is another program's: what can be converted in it is
    no step of mmldlm.
    """
    inside = list(checkpoints.iterdir())
    if any(STEP_FOLDER.fullmatch(child.name) and _is_run_checkpoint(child) for child in inside):
        return False
    return any(map(is_source, inside))


def _is_manifest(path: Path) -> bool:
    """Return whether a file is the manifest of a checkpoint, damaged or not; other programs write
    one, too.
    """
    # The reader of manifests reports a folder or a FIFO.
    if not path.is_file():
        return os.path.lexists(path)
    if (path.parent / ENGINE_FOLDER).is_dir():
        return True
    content = read_json_object(path)
    return content.get("format") == FORMAT if content else registry.detect(path.parent) is None


def _refuse_store(path: Path) -> None:
    """Raise UserError for a folder of prepared data, which has a manifest of another kind."""
    if read_json_object(path / MANIFEST).get("format") in ("mmldlm-store", "mmldlm-files"):
        raise UserError(
            f"a run or a checkpoint at {path}", "a store of prepared data", "give e.g. RUN/latest"
        )


def mark_buffers(weights: WeightSource, folder: Path) -> None:
    """Classify the buffers that the config.json next to a file lists, for formats without kinds.

    Otherwise --dtype would round them, and they would count as parameters.
    """
    config = read_json_object(folder / CONFIG_FILE)
    is_mmdit = config.get("architecture") == "MultimodalMMDiT"
    listed = config.get("buffers", _BUFFERS if is_mmdit else ())
    if isinstance(listed, list | tuple):
        names = {name for name in listed if isinstance(name, str)}
        for name in names.intersection(weights.unclassified):
            weights.set_kind_and_dtype(name, "buffer")
