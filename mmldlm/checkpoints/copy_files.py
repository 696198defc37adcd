"""Copy the small files beside weights into a conversion: regular files alone, never through a link
out of the source.

An unpacked archive may contain links to anything that its reader can read, and OUT is made to be
passed on. A cache of huggingface_hub is the exception: its snapshots/REVISION/* are links to
blobs/* of the same repository.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mmldlm.checkpoints.files.file_io import open_regular_descriptor
from mmldlm.checkpoints.formats.weight_source import OpenedCheckpoint
from mmldlm.checkpoints.manifest import (
    CONFIG_FILE,
    MANIFEST,
    MODEL_CONFIG,
    RUN_CONFIG,
    SAFETENSORS_FILE,
    read_manifest,
)
from mmldlm.checkpoints.output_folder import TOKENIZER_FILES
from mmldlm.data.image_codec import FILES
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.json_files import read_json

TOKENIZER_FOLDER = "tokenizer"


def check_links(opened: OpenedCheckpoint) -> None:
    """Check that every file of weights is in the checkpoint. A single file that the user named may
    be a link.

    Raises:
        UserError: a link that leaves the checkpoint; the error names it.
    """
    weights = opened.weights
    root = opened.checkpoint or weights.path
    # The path is one file, or an index with its shards.
    if not root.is_dir():
        root = root.parent
    for path in {file.path for file in weights.files} - {weights.path}:
        # accelerate keeps the optimizer in a folder beside that of the model.
        real_path(root if root in path.parents else root.parent, path)


def copy_file(root: Path, path: Path, out: Path) -> None:
    """Copy a regular file of the checkpoint in `root` to the new file `out`; make its folder.

    Raises:
        UserError: `path` is a link that leaves `root`, or no regular file. OSError: a failed
            write.
    """
    real = real_path(root, path)
    try:
        source = open(open_regular_descriptor(real), "rb")
    except OSError as error:
        raise _unusable(path, describe_os_error(error)) from error
    with source:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "xb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)


def copy_tree(root: Path, folder: Path, out: Path) -> None:
    """Copy a folder of the checkpoint in `root` with everything in it.

    Raises:
        UserError: as copy_file.
    """
    out.mkdir()
    for path in list_tree(root, folder):
        copy_file(root, path, out / path.relative_to(folder))


def list_tree(root: Path, folder: Path) -> list[Path]:
    """Return all files below a folder of the checkpoint in `root`, also those behind links that
    stay inside.

    Raises:
        UserError: a link that leaves `root`, or to a folder that contains it.
    """
    files = []
    for child in sorted(folder.iterdir()):
        real = real_path(root, child)
        if not real.is_dir():
            files.append(child)
        elif real in folder.resolve().parents or real == folder.resolve():
            raise _unusable(child, f"a link to {real}, which contains it")
        else:
            files += list_tree(root, child)
    return files


def real_path(root: Path, path: Path) -> Path:
    """Return a path without links.

    Raises:
        UserError: it leads out of `root`, nowhere, or in a circle.
    """
    try:
        real, real_root = path.resolve(strict=True), root.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        # Before Python 3.13 links in a circle raise RuntimeError.
        raise _unusable(path, getattr(error, "strerror", None) or "links in a circle") from error
    if real != real_root and real_root not in real.parents:
        if not any(blobs == real.parent for blobs in _hub_blobs(real_root)):
            raise UserError(
                f"a checkpoint in {root} without links to files outside it",
                f"{_link_of(root, path)}, which leads to {real}",
                "if you trust it, copy the checkpoint with its files (cp -rL) and convert the"
                " copy",
            )
    return real


def _hub_blobs(root: Path) -> Iterator[Path]:
    """Yield the folder of blobs for a folder inside snapshots/REVISION of a cache of
    huggingface_hub.
    """
    for revision in (root, *root.parents):
        if revision.parent.name == "snapshots":
            yield revision.parent.parent / "blobs"


def _link_of(root: Path, path: Path) -> Path:
    """Return the first link on the way from `root` to `path`."""
    inside = [part for part in (path, *path.parents) if root in part.parents]
    return next((part for part in reversed(inside) if part.is_symlink()), path)


def _unusable(path: Path, found: str) -> UserError:
    fix = "restore the file, or remove it from the checkpoint"
    return UserError(f"a regular file, or a link to one, at {path}", found, fix)


# -- config.json and the tokenizer
# -------------------------------------------------------------------------------------------------


def copy_tokenizer_files(opened: OpenedCheckpoint, dtype: str | None, folder: Path) -> list[str]:
    """Copy config.json, config.yaml, the tokenizer and the basis of images, if the source has
    them. Return notes.
    """
    if opened.checkpoint is None:
        source = model_folder(opened)
        if source is None:
            return [
                "no mmldlm checkpoint around these weights: no config.json and no tokenizer were"
                " written"
            ]
        config = _copy_config(source, source / CONFIG_FILE, dtype, folder)
        for path in sorted(source.iterdir()):
            if TOKENIZER_FILES.fullmatch(path.name) and path.name != CONFIG_FILE:
                (copy_tree if path.is_dir() else copy_file)(source, path, folder / path.name)
        if "_class_name" in config:
            return [
                "diffusers looks for diffusion_pytorch_model.safetensors: rename"
                f" {SAFETENSORS_FILE}"
            ]
        return []
    return _copy_listed_files(opened.checkpoint, dtype, folder)


def _copy_listed_files(checkpoint: Path, dtype: str | None, folder: Path) -> list[str]:
    """Copy the files that the manifest of an mmldlm checkpoint lists next to those of the engine;
    return notes.

    A file that the manifest does not list is not part of the checkpoint: it was added later.
    """
    notes = []
    listed = read_manifest(checkpoint)["files"]
    if MODEL_CONFIG in listed:
        _copy_config(checkpoint, checkpoint / MODEL_CONFIG, dtype, folder)
    else:
        notes.append(f"{MODEL_CONFIG} is not in the checkpoint: no config.json was written")
    names = [
        name
        for name in listed
        if name in (RUN_CONFIG, *FILES) or name.startswith(f"{TOKENIZER_FOLDER}/")
    ]
    for name in names:
        copy_file(checkpoint, checkpoint / name, folder / name)
    if not any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in names):
        notes.append(f"the checkpoint has no {TOKENIZER_FOLDER}/: none was written")
    copied = (MODEL_CONFIG, RUN_CONFIG, TOKENIZER_FOLDER, *FILES)
    for name in copied:
        if os.path.lexists(checkpoint / name) and not any(
            name in (entry, entry.split("/")[0]) for entry in listed
        ):
            notes.append(
                f"{name} is not listed in {MANIFEST} and was not copied: it was added after the"
                " save"
            )
    return notes


def model_folder(opened: OpenedCheckpoint) -> Path | None:
    """Return the model folder of the weights, Hugging Face's or of `--to model.pt`; None for other
    sources.

    Trainers save the config of the model beside the folder of the ranks' files.
    """
    if opened.checkpoint is not None:
        return None
    path = opened.weights.path
    folder = path if path.is_dir() else path.parent
    if opened.weights.engine in ("safetensors", "model.pt"):
        return folder if os.path.lexists(folder / CONFIG_FILE) else None
    return next(
        (
            candidate
            for candidate in (folder, folder.parent)
            if _is_model_config(candidate / CONFIG_FILE)
        ),
        None,
    )


def _is_model_config(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        config = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and any(
        key in config for key in ("model_type", "architectures", "architecture")
    )


def _copy_config(root: Path, path: Path, dtype: str | None, folder: Path) -> dict:
    """Copy a model's config as config.json, with the dtype of the written weights; return it."""
    config = read_json(real_path(root, path), "restore the file, or move it away")
    if dtype is not None:
        # transformers has renamed this key and reads both names.
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    return config
