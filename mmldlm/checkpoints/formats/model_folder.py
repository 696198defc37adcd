"""Which models a folder of another program holds, by the names of its files: never the first of
several.

accelerate numbers the models of a program (model.safetensors, model_1.safetensors),
sentence-transformers lists modules in folders of their own, diffusers has a folder per model. One
model may be there in several formats.
"""

from __future__ import annotations

import re
from pathlib import Path

from mmldlm.checkpoints.formats.rank_files import PartOfCheckpoint, check_siblings
from mmldlm.checkpoints.layout import DCP_METADATA
from mmldlm.data.encoders.sentence_transformer import MODULES, read_modules
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some

_WEIGHTS = re.compile(r"(?P<stem>.+)\.(safetensors|bin|pt|pth|ckpt)(\.index\.json|\.tar)?")
_SHARD = re.compile(r"-\d+-of-\d+\.\w+$")
# What trainers save beside the weights, under names of their own.
_STATE = re.compile(
    r"(optim|optimizer|scheduler|lr_scheduler|scaler|rng|rng_state|random_states|sampler|dl_state_dict|training_args|args"
    r"|custom_checkpoint|training_state|trainer_state|ema_rank)([-_.]?[\d_]+)?|rng_state_.*|.*_states|\..*"
)
_PRECISION = re.compile(r"\.(fp32|fp16|bf16|fp8)$")
_NUMBERED_FOLDER = re.compile(r"pytorch_model(_fsdp)?(_\d+)?")
_ROUNDED = re.compile(r"\.(fp16|bf16|fp8)$")
# The order in which formats of one model are taken, after those whose name says that it is
# rounded.
_PREFERRED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


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
    found: dict[str, list[Path]] = {}
    for path in entries:
        name = path.name
        if path.is_dir():
            if _NUMBERED_FOLDER.fullmatch(name) and _holds_checkpoint(path):
                found.setdefault(_model_of(name), []).append(path)
            continue
        match = _WEIGHTS.fullmatch(name)
        if match is None or _STATE.fullmatch(match["stem"]) or not path.is_file():
            continue
        if _SHARD.search(name) and _is_listed(name, indexes):
            continue
        if not name.endswith((".safetensors", ".index.json")) and not _holds_matrix(path):
            continue
        found.setdefault(_model_of(match["stem"]), []).append(path)
    return {model: sorted(paths, key=_preference) for model, paths in found.items()}


def check_folder(folder: Path, notes: list[str]) -> Path | None:
    """Return the one model in a folder, in the preferred of its formats; None if there is none by
    a known name.

    Raises:
        UserError: several models, or a model of sentence-transformers with weights in several
            modules.
    """
    models = list_models(folder)
    others = modules_with_weights(folder)
    if others:
        own = [str(paths[0]) for paths in models.values()]
        raise UserError(
            f"one model in {folder}",
            f"a model of sentence-transformers, whose {MODULES} lists weights in"
            f" {join_some(others)}, too",
            "give the file of one module:"
            f" {join_some([*own, *(str(path) for path in _files_of(folder, others))])}",
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


def modules_with_weights(folder: Path) -> list[str]:
    """Return the folders of the modules of a sentence-transformers model, besides the first, that
    hold weights.
    """
    return [path for path in list_modules(folder) if any(_weights_below(folder / path))]


def list_modules(folder: Path) -> list[str]:
    """Return the subfolders that the modules.json of a sentence-transformers model names; [] for
    other folders.

    Raises:
        UserError: one that is not a list of modules inside the folder.
    """
    return [part for _, part in read_modules(folder) or () if part not in ("", ".")]


def where_models_are(folder: Path) -> list[Path]:
    """Return the subfolders of a folder that hold models, as of a pipeline of diffusers."""
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and list_models(path)]


def _files_of(folder: Path, modules: list[str]) -> list[Path]:
    return [next(_weights_below(folder / name)) for name in modules]


def _weights_below(folder: Path):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return (
        path
        for path in files
        if (match := _WEIGHTS.fullmatch(path.name)) and not _STATE.fullmatch(match["stem"])
    )


def _holds_checkpoint(folder: Path) -> bool:
    return (folder / DCP_METADATA).is_file() or any(folder.glob("*_states.pt"))


def _holds_matrix(path: Path) -> bool:
    """Return whether a torch.save'd file holds the weights of a model, not a state or
    statistics.
    """
    from mmldlm.checkpoints.formats.model_pt.reader import ModelFile

    try:
        with ModelFile.open(path, allow_nonfinite=True) as source:
            return any(len(info.shape) > 1 for info in source.tensors.values())
    except PartOfCheckpoint:
        return True
    except UserError:
        return False


def _refuse_parts(path: Path) -> None:
    """Raise PartOfCheckpoint for one rank's file, in the words of the program that wrote it if
    they are in the file.
    """
    from mmldlm.checkpoints.formats.model_pt.reader import ModelFile
    from mmldlm.checkpoints.formats.safetensors.reader import SafetensorsModel

    try:
        check_siblings(path)
    except PartOfCheckpoint:
        reader = SafetensorsModel if path.suffix == ".safetensors" else ModelFile
        reader.open(path, allow_nonfinite=True).close()
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
    kinds = [number for number, suffix in enumerate(_PREFERRED) if path.name.endswith(suffix)]
    return (is_rounded, kinds[0] if kinds else len(_PREFERRED), path.name)
