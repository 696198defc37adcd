"""The inputs of a preparation: every file of its corpora, encoder and tokenizer, by size and
content.

They are part of the plan, so that a later launch never mixes its results with those of another
encoder or corpus. Files are identified by their content, not by the time of their last change: a
corpus that was downloaded again is the same corpus. Above 1 GiB, where reading a whole file takes
long, the time counts as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from mmldlm.data.corpora.text_corpus import UNKNOWN_VERSION
from mmldlm.data.encoders.model_files import VaeFiles, find_model_folder, model_files
from mmldlm.data.encoders.specs import ENCODERS
from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import sha256_of, write_json
from mmldlm.utils.formatting import describe_os_error, join_some
from mmldlm.utils.input_files import open_regular, refuse_pointer
from mmldlm.utils.json_files import read_json
from mmldlm.utils.paths import without_folders

_WHOLE_BYTES = 1 << 30
# Of a larger file, this many bytes are read at the start, in the middle and at the end.
_SAMPLE_BYTES = 1 << 20
_THREADS = 8
_MAX_IN_MANIFEST = 1000


class FileIdentities:
    """The identities of files; those of an earlier launch are kept while a file's size and time
    stay the same.

    Args:
        path: File in which the identities are kept between launches.
    """

    def __init__(self, path: Path):
        self._path = path
        self._known: dict[str, list[Any]] = {}
        with contextlib.suppress(UserError):
            known = read_json(path, "", 1 << 30)
            self._known = {name: own for name, own in known.items() if isinstance(own, list)}

    def of(self, files: dict[str, Path]) -> dict[str, str]:
        """Return name -> size and content of files.

        Raises:
            UserError: one of them is a pointer of Git LFS.
        """
        with ThreadPool(_THREADS) as pool:
            return dict(zip(files, pool.imap(self._identity, files.values(), chunksize=16)))

    def save(self) -> None:
        """Keep them for later launches."""
        write_json(self._path, self._known)

    def _identity(self, path: Path) -> str:
        try:
            state = os.stat(path)
            stamp, key = [state.st_size, state.st_mtime_ns, state.st_ino], str(path)
            cached = self._known.get(key)
            if cached is None or len(cached) != 4 or cached[:3] != stamp:
                refuse_pointer(path)
                self._known[key] = cached = [*stamp, _content(path, state)]
            return f"{state.st_size:,} bytes, {cached[3]}"
        except OSError as error:
            return describe_os_error(error)


def _content(path: Path, state: os.stat_result) -> str:
    if state.st_size <= _WHOLE_BYTES:
        return f"sha256 {sha256_of(path)[:16]}"
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for start in (0, state.st_size // 2, state.st_size - _SAMPLE_BYTES):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return f"changed at {state.st_mtime_ns / 1e9:.6f}, sha256 of parts {digest.hexdigest()[:16]}"


def encoder_inputs(
    name: str, cache_dir: str | None, dtype: str, identities: FileIdentities
) -> dict[str, str]:
    """Return the identity of an encoder: its files, and the precision of its forward pass.

    Raises:
        UserError: the encoder is not available, or its files are pointers of Git LFS.
    """
    folder, _ = find_model_folder(name, cache_dir)
    label = f"encoder {name if name in ENCODERS else without_folders(name)}"
    files = {
        f"{label}/{path.relative_to(folder).as_posix()}": path for path in model_files(folder)
    }
    return {label: f"computed in {dtype}", **identities.of(files)}


def autoencoder_inputs(files: VaeFiles, dtype: str, identities: FileIdentities) -> dict[str, str]:
    """Return the identity of an autoencoder of images: its files, and the precision of its forward
    pass.
    """
    label = f"autoencoder {files.name}"
    files_by_label = {
        f"{label}/{path.name}": path for path in (files.weights, files.folder / "config.json")
    }
    return {label: f"computed in {dtype}", **identities.of(files_by_label)}


def tokenizer_inputs(name: str, cache_dir: str | None, add_mask_token: bool) -> dict[str, str]:
    """Return the identity of a tokenizer; nothing for one that is made from the corpus.

    Raises:
        UserError: it cannot be loaded, or lacks special tokens.
    """
    if name in (tokenizers.TRAIN, tokenizers.WORDS):
        return {}
    identity = tokenizers.identity(tokenizers.load(name, cache_dir, add_mask_token), name)
    return {f"tokenizer {identity['name']}": f"sha256 {str(identity['sha256'])[:16]}"}


def file_inputs(named: Iterable[tuple[str, Path]], identities: FileIdentities) -> dict[str, str]:
    """Return the identities of the files of all corpora; different files of one name get
    numbers.
    """
    files: dict[str, Path] = {}
    numbers: Counter = Counter()
    for name, path in dict.fromkeys(named):
        label = f"file {name}"
        while label in files:
            numbers[name] += 1
            label = f"file {name} ({numbers[name] + 1})"
        files[label] = path
    return identities.of(files)


def check_same_encoder(inputs: dict[str, str], plan: dict[str, str], rank: int) -> None:
    """Check that a rank, perhaps on another machine, encodes as rank 0 does.

    Args:
        inputs: Inputs of the encoder on this rank.
        plan: All inputs of rank 0.

    Raises:
        UserError: its encoder has other files, or another precision.
    """
    if changes := diff_inputs({name: plan[name] for name in inputs if name in plan}, inputs):
        raise UserError(
            "one encoder on all ranks",
            f"on rank {rank} ({os.uname().nodename}): {'; '.join(changes)}",
            "install the same files on all machines, and give --dtype where their devices differ",
        )


def check_unchanged(
    named: Iterable[tuple[str, Path]], inputs: dict[str, str], identities: FileIdentities
) -> None:
    """Check that the files of corpora are still those of a plan, after they were read.

    Raises:
        UserError: one was replaced or edited meanwhile.
    """
    now = file_inputs(named, identities)
    if changes := diff_inputs({name: inputs[name] for name in now if name in inputs}, now):
        raise UserError(
            "a corpus that stays as it is while it is read",
            "; ".join(changes),
            "prepare it again with --force",
        )


def with_known_versions(inputs: dict[str, str], then: dict[str, str] | None) -> dict[str, str]:
    """Return the inputs of a preparation as an earlier one knew them: a dataset whose version one
    of them could not learn, for lack of a network, is not another one."""
    then = then or {}
    return {
        name: then.get(name, value) if UNKNOWN_VERSION in (value, then.get(name)) else value
        for name, value in inputs.items()
    }


def diff_inputs(recorded: dict[str, str] | None, now: dict[str, str]) -> list[str]:
    """Describe each input in which two preparations differ, with both identities."""
    if recorded is None:
        return ["the files that were read are not recorded (by an earlier version of mmldlm)"]
    lines = [
        f"{name} was {recorded.get(name, 'not there')}, now {now.get(name, 'not there')}"
        for name in dict.fromkeys([*recorded, *now])
        if recorded.get(name) != now.get(name)
    ]
    return [join_some(lines, limit=5, separator="; ")] if lines else []


def inputs_entry(inputs: dict[str, str]) -> dict[str, Any]:
    """Return the manifest's entry of the inputs; nothing for too many, which its digest covers."""
    return {"inputs": inputs} if len(inputs) <= _MAX_IN_MANIFEST else {}
