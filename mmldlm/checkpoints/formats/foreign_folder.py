"""Folders of other programs: which models are in one, and what else.

A folder may hold several models, of which the first is never taken. accelerate numbers them
(model.safetensors, model_1.safetensors), sentence-transformers lists modules in folders of their
own, diffusers has a folder per model. One model may be there in several formats.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from mmldlm.checkpoints.files.file_kinds import (
    HEAD_BYTES,
    OLD_TORCH,
    TORCH_ZIP,
    FileKind,
    kind_by_mark,
)
from mmldlm.checkpoints.formats import registry
from mmldlm.checkpoints.formats.deepspeed_files import list_states
from mmldlm.checkpoints.formats.model_pt import ModelFile
from mmldlm.checkpoints.formats.part_files import PartOfCheckpoint, check_siblings, check_tensors
from mmldlm.checkpoints.formats.safetensors import SafetensorsModel
from mmldlm.checkpoints.formats.selection import NoWeights
from mmldlm.checkpoints.formats.weight_source import ReadOptions
from mmldlm.checkpoints.manifest import DCP_METADATA
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import kind_of_file, open_regular

_WEIGHTS = re.compile(r"(?P<stem>.+)\.(safetensors|bin|pt|pth|ckpt)(\.index\.json|\.tar)?")
_SHARD = re.compile(r"-\d+-of-\d+\.\w+$")
# Names of files that trainers save next to the weights.
_STATE = re.compile(
    r"(optim|optimizer|scheduler|lr_scheduler|scaler|rng|rng_state|random_states|sampler|dl_state_dict|training_args|args"
    r"|custom_checkpoint|training_state|trainer_state|ema_rank)([-_.]?[\d_]+)?|rng_state_.*|.*_states|\..*"
)
_PRECISION = re.compile(r"\.(fp32|fp16|bf16|fp8)$")
_MAX_ENTRIES = 100
_NUMBERED_FOLDER = re.compile(r"pytorch_model(_fsdp)?(_\d+)?")
_ROUNDED = re.compile(r"\.(fp16|bf16|fp8)$")
# The order in which formats of one model are taken, after those whose name says that it is
# rounded.
_PREFERRED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
# The list of modules of a model of sentence-transformers.
_MODULES = "modules.json"


def list_models(folder: Path) -> dict[str, list[Path]]:
    """Return model -> its files (an index in place of its shards) or folders in `folder`, the
    preferred one first.
    """
    entries = sorted(folder.iterdir())
    indexes = [
        path
        for path in entries
        if path.name.endswith(".index.json") and _WEIGHTS.fullmatch(path.name)
    ]
    models: dict[str, list[Path]] = {}
    for path in entries:
        name = path.name
        if path.is_dir():
            if _NUMBERED_FOLDER.fullmatch(name) and (
                (path / DCP_METADATA).is_file() or list_states(path)
            ):
                models.setdefault(_model_of(name), []).append(path)
            continue
        match = _WEIGHTS.fullmatch(name)
        if match is None or _STATE.fullmatch(match["stem"]) or not path.is_file():
            continue
        if _SHARD.search(name) and _is_listed(name, indexes):
            continue
        if not name.endswith((".safetensors", ".index.json")) and not _may_be_model(path):
            continue
        models.setdefault(_model_of(match["stem"]), []).append(path)
    return {model: sorted(paths, key=_preference) for model, paths in models.items()}


def check_folder(folder: Path, notes: list[str]) -> Path | None:
    """Return the one model in a folder, in the preferred of its formats; None if there is none by
    a known name.

    Raises:
        UserError: several models, or a model of sentence-transformers with weights in several
            modules.
    """
    models = list_models(folder)
    others = [path for path in list_modules(folder) if any(_weights_below(folder / path))]
    if others:
        files = [paths[0] for paths in models.values()]
        files += [next(_weights_below(folder / name)) for name in others]
        raise UserError(
            f"one model in {folder}",
            f"a model of sentence-transformers, whose {_MODULES} lists weights in"
            f" {join_some(others)}, too",
            f"give the file of one module: {join_some(map(str, files))}",
        )
    if len(models) > 1:
        for first, *_ in models.values():
            if first.is_file():
                _refuse_parts(first)
        raise UserError(
            f"one model in {folder}",
            f"{len(models)} models: {join_some(paths[0].name for paths in models.values())}",
            "give one of them:"
            f" {join_some((str(paths[0]) for paths in models.values()), 8, ' or ')}",
        )
    for first, *more in models.values():
        if more:
            names = join_some(path.name for path in more)
            notes.append(f"{names}, next to {first.name}: taken as the same model in another form")
        return first
    return None


def nothing_error(path: Path) -> UserError:
    """Return the error for a path that is in no known format; of a folder it lists what can be
    converted in it, and names the kinds of other files.
    """
    expected = (
        f"a run, a checkpoint, a DeepSpeed or DCP folder, a model.pt or safetensors at {path}"
    )
    fix = "give e.g. RUN/latest, or the folder that holds the *_states.pt files"
    if not path.is_dir():
        kind = (kind_of_file(path.stat().st_mode) or "a file") if path.exists() else "nothing"
        return UserError(expected, kind, fix)
    if kinds := [found for child in _entries(path) if (found := _foreign_kind(child))]:
        fix = kinds[0].fix
    folders = [child for child in _entries(path) if child.is_dir()]
    if inside := _sources(path) or [below for folder in folders for below in _sources(folder)]:
        fix = f"give one of the models in it: {join_some(inside, 8, ' or ')}"
    return UserError(expected, f"a folder with {list_some(path)}", fix)


def list_some(folder: Path) -> str:
    """Return the first names in a folder, with the kinds of files of other programs."""
    kinds = [(entry.name, _foreign_kind(entry)) for entry in _entries(folder)[:5]]
    listed = [f"{name} ({kind.found})" if kind else name for name, kind in kinds]
    return ", ".join(listed) or "nothing in it"


def _sources(folder: Path) -> list[Path]:
    return [child for child in _entries(folder) if is_source(child)]


def _entries(folder: Path) -> list[Path]:
    """Return the first entries of a folder, which may be any: all of /home are not opened for an
    error.
    """
    try:
        return sorted(folder.iterdir())[:_MAX_ENTRIES]
    except OSError:
        return []


def _foreign_kind(path: Path) -> FileKind | None:
    kind = kind_by_mark(_head(path))
    # A file of torch that is listed holds no weights, such as an optimizer.pt.
    return kind if kind is not TORCH_ZIP else None


def is_source(path: Path) -> bool:
    """Return whether a path in a folder can be converted: a file of weights, a folder of a
    checkpoint or of models.
    """
    if path.is_file():
        return _may_be_model(path)
    with contextlib.suppress(UserError, OSError):
        return path.is_dir() and bool(registry.detect(path) or list_models(path))
    return False


def list_modules(folder: Path) -> list[str]:
    """Return the subfolders that the modules.json of a sentence-transformers model names; [] for
    other folders.

    Raises:
        UserError: one that is not a list of modules inside the folder.
    """
    if not (folder / _MODULES).is_file():
        return []
    # With pydantic, which would double the start of every `mmldlm convert`.
    from mmldlm.data.encoders.sentence_transformer import read_modules

    return [part for _, part in read_modules(folder) or () if part not in ("", ".")]


def _weights_below(folder: Path) -> Iterator[Path]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return (
        path
        for path in files
        if (match := _WEIGHTS.fullmatch(path.name)) and not _STATE.fullmatch(match["stem"])
    )


def _may_be_model(path: Path) -> bool:
    """Return whether a file holds weights of a model, not a state or statistics, or is one of
    torch's that cannot be read: then its error is the user's concern.
    """
    try:
        with ModelFile.open(path, ReadOptions(allow_nonfinite=True)) as source:
            check_tensors(path, source.tensors)
            return any(len(info.shape) > 1 for info in source.tensors.values())
    except NoWeights:
        return False
    except PartOfCheckpoint:
        return True
    except UserError:
        return kind_by_mark(_head(path)) in (TORCH_ZIP, OLD_TORCH)


def _head(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def _refuse_parts(path: Path) -> None:
    """Raise PartOfCheckpoint for one rank's file, in the words of the program that wrote it if
    they are in the file.
    """
    try:
        check_siblings(path)
    except PartOfCheckpoint:
        reader = SafetensorsModel if path.suffix == ".safetensors" else ModelFile
        reader.open(path, ReadOptions(allow_nonfinite=True)).close()
        raise


def _is_listed(shard: str, indexes: list[Path]) -> bool:
    stem = _SHARD.sub("", shard)
    return any(index.name.startswith(stem + ".") for index in indexes)


def _model_of(stem: str) -> str:
    """Return one name for the forms of one model: pytorch_model, model.fp16,
    pytorch_model_fsdp_0.
    """
    stem = _PRECISION.sub("", _SHARD.sub("", stem + ".x") if _SHARD.search(stem + ".x") else stem)
    stem = stem.removeprefix("pytorch_").replace("model_fsdp", "model")
    return stem.removesuffix("_0")


def _preference(path: Path) -> tuple[bool, int, str]:
    match = _WEIGHTS.fullmatch(path.name)
    is_rounded = bool(match and _ROUNDED.search(_SHARD.sub("", match["stem"])))
    kinds = [rank for rank, suffix in enumerate(_PREFERRED) if path.name.endswith(suffix)]
    return (is_rounded, kinds[0] if kinds else len(_PREFERRED), path.name)
