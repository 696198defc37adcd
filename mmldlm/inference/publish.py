"""Publish a converted folder on the Hugging Face hub, from where `mmldlm.load` opens it.

Checked first: the folder is a complete model, and no file of it names a folder of this machine or
holds a secret. A push is one commit: the repository has the whole model or what it had before.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.formats.safetensors import SafetensorsFile
from mmldlm.checkpoints.manifest import (
    CONFIG_FILE,
    RUN_CONFIG,
    SAFETENSORS_FILE,
    SAFETENSORS_INDEX,
)
from mmldlm.checkpoints.output_folder import (
    CARD,
    COMPANION_FILES,
    CONVERSION_MARKER,
    is_machine_path,
    list_tree,
)
from mmldlm.config.task_names import DEFAULT_TASK, TASK_NAMES
from mmldlm.config.yaml_reader import read_yaml
from mmldlm.errors import UserError
from mmldlm.inference.load import load_pretrained
from mmldlm.utils.formatting import first_line, join_some
from mmldlm.utils.hub import MODEL_TYPE
from mmldlm.utils.input_files import read_text
from mmldlm.utils.json_files import read_json, read_json_value

_CONVERT = "make the folder with `mmldlm convert RUN/latest FOLDER`"
_CLEAN = (
    "`mmldlm convert FOLDER NEW` leaves the folders out of the settings; edit the other files, and"
    " push again"
)
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
# What a user adds to a model before it is published.
_ADDED = re.compile(r"LICENSE(\.\w+)?|NOTICE(\.\w+)?|CITATION\.\w+|.*\.png")
# Files of words of a language: any of them may look like a path.
_VOCABULARY = re.compile(r"tokenizer\.json|vocab\.(json|txt)|merges\.txt|added_tokens\.json")
_WORD = re.compile(r"(?<![\w.:/~<-])(?:~|/[\w.-]+)/[^\s\"'`()\[\]<>,;|]+")
_SECRETS = re.compile(
    r"\bhf_\w{20,}|\bgh[pousr]_\w{30,}|\bgithub_pat_\w{30,}|\bsk-[\w-]{20,}|\bAKIA[0-9A-Z]{16}\b"
    r"|PRIVATE KEY-----|://[^/\s:@]+:[^/\s:@]+@"
)
_LOADS = re.compile(r'mmldlm\.load\("[^"\n]*"\)')


def publishable_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Check a converted folder; return its files to publish, and the names of what else is in it.

    Raises:
        UserError: the folder is not a complete model, a link leaves it, or a file names a folder
            of this machine or holds a secret.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"a converted folder at {folder}", f"no {CONFIG_FILE} there", _CONVERT)
    config = read_json(folder / CONFIG_FILE, _CONVERT)
    if config.get("model_type") != MODEL_TYPE:
        found = f"model_type {config.get('model_type')!r} in its {CONFIG_FILE}"
        raise UserError(f"a folder of a model of {MODEL_TYPE} at {folder}", found, _CONVERT)
    if not any((folder / name).is_file() for name in (SAFETENSORS_FILE, SAFETENSORS_INDEX)):
        raise UserError(f"{SAFETENSORS_FILE} in {folder}", "no weights there", _CONVERT)
    if not (folder / CARD).is_file():
        raise UserError(f"a model card, {CARD}, in {folder}", "none there", _CONVERT)
    if config.get("task", DEFAULT_TASK) in TASK_NAMES:
        # As whoever downloads it will: weights, settings and tokenizer are all read.
        load_pretrained(folder)
    else:
        open_source(folder).weights.close()
    files = [path for path in list_tree(folder, folder) if _is_published(path, folder)]
    private = [found for path in files for found in _private_parts(path, folder)]
    if private:
        raise UserError(
            f"no folder of a machine and no secret in what is published of {folder}",
            join_some(private, 12, "; "),
            _CLEAN,
        )
    published = {path.relative_to(folder).parts[0] for path in files} | {CONVERSION_MARKER}
    return files, sorted({path.name for path in folder.iterdir()} - published)


def _is_published(path: Path, folder: Path) -> bool:
    name = path.relative_to(folder).parts[0]
    kinds = (_WEIGHTS, COMPANION_FILES, _ADDED)
    return name == CARD or any(kind.fullmatch(name) for kind in kinds)


def push(
    folder: Path, files: list[Path], repository: str, revision: str | None, private: bool
) -> str:
    """Upload files of a folder as one commit; return its URL. Weights of an earlier push that the
    folder does not have are deleted.

    Args:
        folder: Converted folder.
        files: Files in it, as `publishable_files` returns them.
        repository: OWNER/NAME; created if it does not exist.
        revision: Branch; created if it does not exist. None: main.
        private: Whether the repository must be private.

    Raises:
        UserError: the hub refuses it or cannot be reached, or the repository is public against
            `private`.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

    api = HfApi(library_name=MODEL_TYPE)
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        is_public = private and not api.model_info(repository).private
        if not is_public:
            if revision is not None:
                api.create_branch(repository, branch=revision, exist_ok=True)
            names = {path.relative_to(folder).as_posix(): path for path in files}
            stale = [
                name
                for name in api.list_repo_files(repository, revision=revision)
                if _WEIGHTS.fullmatch(name) and name not in names
            ]
            operations: list[Any] = [CommitOperationDelete(name) for name in stale]
            operations += [
                CommitOperationAdd(name, _card(path, repository) if name == CARD else path)
                for name, path in names.items()
            ]
            message = f"mmldlm push of {folder.resolve().name}"
            commit = api.create_commit(
                repository, operations, commit_message=message, revision=revision
            )
    except Exception as error:
        # The hub client raises many types: no network, no login, a name it does not allow.
        raise UserError(
            f"the Hugging Face hub at {constants.ENDPOINT}, with a login that may write"
            f" {repository}",
            first_line(error),
            "log in with `hf auth login` (or HF_TOKEN) and check the name; nothing was published",
        ) from error
    if is_public:
        raise UserError(
            f"a private repository {repository} for --private",
            "one that is public",
            "make it private on its page on the hub, or name another one",
        )
    return commit.commit_url


def _card(path: Path, repository: str) -> bytes:
    """Return the model card, in which the model has the name under which it is published."""
    card = read_text(path, errors="replace")
    return _LOADS.sub(f'mmldlm.load("{repository}")', card).encode()


# -- what must not be published -------------------------------------------------------------------


def _private_parts(path: Path, folder: Path) -> Iterator[str]:
    """Yield the places in a file that name a folder of a machine or hold a secret."""
    name = path.relative_to(folder).as_posix()
    if path.suffix == ".safetensors":
        with contextlib.closing(SafetensorsFile(path)) as file:
            yield from _private_values(file.metadata, f"{name}: header")
    elif _VOCABULARY.fullmatch(path.name) or path.suffix in (".model", ".npy", ".png"):
        return
    elif path.suffix == ".json":
        yield from _private_values(read_json_value(path, _CONVERT), f"{name}: ")
    elif path.name == RUN_CONFIG:
        yield from _private_values(read_yaml(path), f"{name}: ")
    else:
        for number, line in enumerate(read_text(path, errors="replace").splitlines(), 1):
            if _is_secret(line):
                yield f"{name}: a secret in line {number}"
            for word in _WORD.findall(line):
                # What is no folder here is no path of this machine, as /v1/models of a web page.
                if word.startswith("~") or os.path.lexists("/" + word.split("/")[1]):
                    yield f"{name}: {word} in line {number}"


def _private_values(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _private_values(entry, f"{place}{'' if place.endswith(' ') else '.'}{key}")
    elif isinstance(value, list):
        for entry in value:
            yield from _private_values(entry, place)
    elif is_machine_path(value):
        yield f"{place} {value}"
    elif isinstance(value, str) and _is_secret(value):
        yield f"{place}, a secret"


def _is_secret(text: str) -> bool:
    """Whether a text has a token or password in it: one by its form, or one of this shell."""
    names = ("TOKEN", "KEY", "SECRET", "PASSWORD")
    of_shell = (value for key, value in os.environ.items() if key.upper().endswith(names))
    return bool(_SECRETS.search(text)) or any(
        len(value) >= 12 and value in text for value in of_shell
    )
