"""The output folder of a conversion: checked first, written under a temporary name, renamed when
complete; and the small files that are copied into it next to the weights.

Only regular files are copied, never through a link out of the source: an unpacked archive may
contain links to anything that its reader can read, and OUT is made to be passed on. A cache of
huggingface_hub is the exception: its snapshots/REVISION/* are links to blobs/* of the same
repository.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.file_io import open_regular_descriptor, read_json_object
from mmldlm.checkpoints.formats.safetensors import SafetensorsFile
from mmldlm.checkpoints.formats.weight_source import OpenedCheckpoint
from mmldlm.checkpoints.manifest import (
    CONFIG_FILE,
    MODEL_CONFIG,
    RUN_CONFIG,
    SAFETENSORS_FILE,
    read_manifest,
)
from mmldlm.data import CODEC_FILES
from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils.atomic_files import fsync_path
from mmldlm.utils.formatting import describe_os_error, explain_os_error, format_bytes, join_some
from mmldlm.utils.hub import MODEL_TYPE
from mmldlm.utils.json_files import read_json
from mmldlm.utils.paths import claimed_file

TOKENIZER_FOLDER = "tokenizer"
# Files of a tokenizer, where transformers looks for them: next to the weights.
_OF_TOKENIZER = (
    r"tokenizer(_config)?\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|spiece\.model|sentencepiece\.bpe\.model"
    r"|chat_template\.(jinja|json)"
)
# Files next to the weights in a Hugging Face folder, which belong to them in any format. Until
# 0.1.0 a conversion kept the tokenizer in a folder.
COMPANION_FILES = re.compile(
    rf"{_OF_TOKENIZER}|tokenizer|config\.json|config\.yaml|generation_config\.json"
    r"|(pre)?processor_config\.json|pca_basis\.npy|codebook\.npy"
)
# Files of a conversion of foreign weights that has no marker, as until 0.2.0: --force deletes only
# a folder without other files.
_OUTPUTS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|config\.json|config\.yaml|tokenizer"
    r"|universal|latest_universal|pca_basis\.npy|codebook\.npy"
)
# These files may belong to a training run or its user, and COMPANION_FILES to a model. They are
# deleted only next to the marker, which a conversion writes first.
_ONLY_BESIDE_MARKER = re.compile(
    r"README\.md|model\.pt|optimizer\.pt|deepspeed\.pt|\.metadata|trainable\.json|__\d+_0\.distcp|zero|latest|checkpoints"
)
CONVERSION_MARKER = "converted.json"
CARD = "README.md"
MODEL_FOLDER_FILES = {
    SAFETENSORS_FILE: (
        "the weights, with the source in the header; with `--shard-size` several files"
        " `model-N-of-N.safetensors`, and their index"
    ),
    CONFIG_FILE: "the sizes of the model, which `from_pretrained` reads",
    RUN_CONFIG: "the config of the training, without paths of the machine",
    "tokenizer.json": "the tokenizer, for `AutoTokenizer`",
    "tokenizer_config.json": "its class and special tokens",
    CARD: "the model card, from the run's own figures",
    CONVERSION_MARKER: (
        "what was converted into what, by which `--force` knows that it may replace the folder"
    ),
    **dict.fromkeys(CODEC_FILES, "of a model of images: what turns its latents into pixels"),
}
"""Names in a folder that `mmldlm convert` makes of a checkpoint, and what they hold, in Markdown.
"""
_MACHINE_PATH = re.compile(r"(file:/)?(~[\w.-]*)?/[^\n]*\w[^\n]*")
# From this number of files on one syncfs is faster than an fsync per file.
_MANY_FILES = 32


def check_target(origin: Path, out: Path, force: bool) -> None:
    """Raise UserError if `out` cannot be written: it contains or is inside `origin`, or it
    exists.
    """
    origin, real = origin.resolve(), out.resolve()
    if real == origin or origin in real.parents or real in origin.parents:
        raise UserError(
            "an output folder outside the checkpoint",
            f"{out}, which contains or is inside {origin}",
            "give another folder",
        )
    if os.path.lexists(out):
        if not force:
            raise UserError(
                f"no file or folder at {out}",
                "one that exists",
                "give another folder, or --force to replace it",
            )
        check_replaceable(out)
        check_replaceable(_replaced_path(out))
    check_replaceable(partial_path(out))


def check_replaceable(path: Path) -> None:
    """Raise UserError unless `path` does not exist, or is an empty folder or one with nothing but
    a conversion of mmldlm, of which the marker or the headers of the weights are the proof.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise UserError(
            f"a folder that mmldlm convert made at {path}",
            "something else",
            "move it away or give another folder",
        )
    names = {child.name for child in path.iterdir()}
    is_marked = CONVERSION_MARKER in names
    others = sorted(
        name
        for name in names - {CONVERSION_MARKER}
        if not (
            _OUTPUTS.fullmatch(name)
            or is_marked
            and (_ONLY_BESIDE_MARKER.fullmatch(name) or COMPANION_FILES.fullmatch(name))
        )
    )
    if others:
        raise UserError(
            f"only files of an earlier conversion in {path}",
            ", ".join(others[:4]),
            "move it away or give another folder; it will not be deleted",
        )
    if names and not is_marked and not _are_ours(path.glob("*.safetensors")):
        raise UserError(
            f"a folder that mmldlm convert made at {path}",
            f"{join_some(sorted(names))}, which another program may have written: neither"
            f" {CONVERSION_MARKER} nor a header of mmldlm in every file of weights",
            "move it away or give another folder; it will not be deleted",
        )


def _are_ours(paths: Iterable[Path]) -> bool:
    """Return whether there are files of weights, all of which say that a conversion wrote them."""
    has_any = False
    for path in paths:
        has_any = True
        try:
            with contextlib.closing(SafetensorsFile(path)) as file:
                if "mmldlm_version" not in file.metadata:
                    return False
        except (UserError, OSError):
            return False
    return has_any


def check_space(parent: Path, needed: int) -> None:
    """Raise UserError if the disk of `parent` has less than `needed` bytes free."""
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(
            f"{format_bytes(needed)} of free space on the disk of {parent}",
            format_bytes(free),
            "free some space, give a folder on another disk, or use --dtype bf16",
        )


def partial_path(out: Path) -> Path:
    """Return the temporary name of `out`."""
    return out.with_name(out.name + ".partial")


def write_atomically(
    origin: Path,
    out: Path,
    force: bool,
    needed: int,
    write: Callable[[Path], None],
    marker: dict,
    fsync: bool = True,
) -> None:
    """Call write(temporary folder) and rename the folder to `out` when it is complete. The caller
    has called check_target.

    Args:
        origin: Source; `out` must be outside it.
        out: New folder.
        force: Whether to replace `out` if it is a conversion.
        needed: Number of bytes that will be written.
        write: Function that fills the folder.
        marker: Content of converted.json, which permits --force to replace the folder.
        fsync: Whether to flush the folder to the disk before it is renamed.

    Raises:
        UserError: `out` cannot be written, or the disk has no space.
        MmldlmError: writing failed. In both cases, and if `write` raises, `out` is unchanged.
    """
    with claimed_file(out, "OUT", "conversion"):
        _restore_replaced(out)
        check_target(origin, out, force)
        partial = partial_path(out)
        _remove_leftover(partial)
        if os.path.lexists(out):
            _remove_leftover(_replaced_path(out))
        try:
            partial.mkdir()
        except OSError as error:
            raise UserError(
                "a writable output folder",
                f"{partial}: {describe_os_error(error)}",
                "give another folder",
            ) from error
        identity = _identity(partial)
        try:
            check_space(out.parent, needed)
            (partial / CONVERSION_MARKER).write_text(json.dumps(marker, indent=1) + "\n")
            write(partial)
            if fsync:
                flush(partial)
            # File systems without locks let two processes reach this place.
            if _identity(partial) != identity:
                raise MmldlmError(
                    f"another process replaced {partial} while {out} was written: nothing was"
                    " published"
                )
            # Something may have appeared there meanwhile.
            check_target(origin, out, force)
            _publish(out, fsync)
        except BaseException as error:
            if _identity(partial) == identity:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise MmldlmError(f"writing {out} failed: {explain_os_error(error)}") from error
            raise


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what distinguishes a folder from another one at the same path; None if there is
    none.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _remove_leftover(path: Path) -> None:
    """Delete what an earlier conversion left under a temporary name; check_target has verified
    that it is nothing else.

    Raises:
        UserError: it cannot be deleted.
    """
    if os.path.lexists(path):
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise UserError(
                f"to delete {path}, which an earlier conversion left",
                f"{error.filename or path}: {describe_os_error(error)}",
                "delete it, or give another folder",
            ) from error


def _publish(out: Path, fsync: bool) -> None:
    """Rename the partial folder; if that fails, `out` is unchanged."""
    partial, replaced = partial_path(out), _replaced_path(out)
    is_replacement = os.path.lexists(out)
    try:
        if is_replacement:
            os.rename(out, replaced)
        os.rename(partial, out)
    except BaseException:
        _restore_replaced(out)
        raise
    if fsync:
        fsync_path(out.parent)
    if is_replacement:
        # `out` is complete, whatever is left of the old one; the next conversion deletes it.
        shutil.rmtree(replaced, ignore_errors=True)


def _replaced_path(out: Path) -> Path:
    return out.with_name(out.name + ".replaced")


def _restore_replaced(out: Path) -> None:
    """Put the old folder back if a conversion has ended between the two renames of `_publish`."""
    replaced = _replaced_path(out)
    if os.path.lexists(out) or not os.path.lexists(replaced):
        return
    # A folder of this name that is no conversion is somebody else's.
    with contextlib.suppress(UserError, OSError):
        check_replaceable(replaced)
        os.rename(replaced, out)


def flush(folder: Path) -> None:
    """Flush a folder and everything in it to the disk; many files with one call for their file
    system.
    """
    paths = [
        Path(base) / name
        for base, folders, names in os.walk(folder)
        for name in (*names, *folders)
    ]
    paths = [path for path in paths if not path.is_symlink()]
    if len(paths) > _MANY_FILES and sync_file_system(folder):
        return
    for path in [*paths, folder]:
        fsync_path(path)


def sync_file_system(folder: Path) -> bool:
    """Flush the file system of a folder to the disk; return False if the system has no such call.

    Raises:
        OSError: it could not be written.
    """
    try:
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except (AttributeError, OSError):
        # Only Linux has this call.
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if syncfs(ctypes.c_int(descriptor)):
            raise OSError(
                ctypes.get_errno(), f"syncfs of {folder}: {os.strerror(ctypes.get_errno())}"
            )
    finally:
        os.close(descriptor)
    return True


# -- Copies of small files ------------------------------------------------------------------------


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
                f"{path}, which leads to {real}",
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


def _unusable(path: Path, found: str) -> UserError:
    fix = "restore the file, or remove it from the checkpoint"
    return UserError(f"a regular file, or a link to one, at {path}", found, fix)


# -- config.json and the tokenizer ----------------------------------------------------------------


def copy_companion_files(opened: OpenedCheckpoint, dtype: str | None, folder: Path) -> list[str]:
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
        is_ours = config.get("model_type") == MODEL_TYPE
        for path in sorted(source.iterdir()):
            if is_ours and path.name == RUN_CONFIG:
                _copy_run_config(source, path, folder)
            elif (
                path.name == CARD
                and is_ours
                or (COMPANION_FILES.fullmatch(path.name) and path.name != CONFIG_FILE)
            ):
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
        _copy_config(checkpoint, checkpoint / MODEL_CONFIG, dtype, folder, MODEL_TYPE)
    else:
        notes.append(f"{MODEL_CONFIG} is not in the checkpoint: no config.json was written")
    if RUN_CONFIG in listed:
        _copy_run_config(checkpoint, checkpoint / RUN_CONFIG, folder)
    for name in CODEC_FILES:
        if name in listed:
            copy_file(checkpoint, checkpoint / name, folder / name)
    tokenizer = [name for name in listed if name.startswith(f"{TOKENIZER_FOLDER}/")]
    for name in tokenizer:
        own_name = name.removeprefix(f"{TOKENIZER_FOLDER}/")
        # A file of another name stays in its folder: it could be named as one of the model's.
        is_known = re.fullmatch(_OF_TOKENIZER, own_name)
        copy_file(checkpoint, checkpoint / name, folder / (own_name if is_known else name))
    if not tokenizer:
        notes.append(f"the checkpoint has no {TOKENIZER_FOLDER}/: none was written")
    return notes


def model_folder(opened: OpenedCheckpoint) -> Path | None:
    """Return the model folder of the weights, Hugging Face's or of `--to model.pt`; None for other
    sources.

    Trainers save the config of the model beside the folder of the ranks' files.
    """
    if opened.checkpoint is not None:
        return None
    path = opened.weights.path
    is_weights = opened.weights.engine in ("safetensors", "model.pt")
    if is_weights and path.is_dir():
        return path if os.path.lexists(path / CONFIG_FILE) else None
    # The config beside a single file, or around a checkpoint, may be of something else.
    folder = path if path.is_dir() else path.parent
    candidates = (folder,) if is_weights else (folder, folder.parent)
    return next((place for place in candidates if _is_model_config(place / CONFIG_FILE)), None)


def _is_model_config(path: Path) -> bool:
    config = read_json_object(path)
    keys = ("model_type", "architectures", "architecture", "_class_name")
    return any(key in config for key in keys)


def _copy_config(
    root: Path, path: Path, dtype: str | None, folder: Path, model_type: str | None = None
) -> dict:
    """Copy a model's config as config.json, with the dtype of the written weights; return it."""
    config = read_json(real_path(root, path), "restore the file, or move it away")
    if model_type is not None:
        config = {"model_type": model_type, **config}
    if config.get("model_type") == MODEL_TYPE:
        config = without_machine_paths(config)
    if dtype is not None:
        # transformers has renamed this key and reads both names.
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    return config


def _copy_run_config(root: Path, path: Path, folder: Path) -> None:
    """Copy a run's config.yaml, of whose paths (store, run folder, cache) the names are left."""
    from mmldlm.config.yaml_reader import format_yaml, read_yaml

    values = without_machine_paths(read_yaml(real_path(root, path)))
    (folder / RUN_CONFIG).write_text(format_yaml(values), encoding="utf-8")


def without_machine_paths(value: Any) -> Any:
    """Return a value of JSON or YAML with the last part of every absolute path in it alone."""
    if isinstance(value, dict):
        return {key: without_machine_paths(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_machine_paths(entry) for entry in value]
    return Path(value).name if is_machine_path(value) else value


def is_machine_path(value: Any) -> bool:
    """Whether a value is an absolute path of some machine, or one below a user's home."""
    return isinstance(value, str) and bool(_MACHINE_PATH.fullmatch(value))
