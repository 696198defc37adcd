"""``mmldlm verify-data``: is a store whole, and is what it holds fit to train on?"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from mmldlm.data.store import SPLITS, Store, check_files, check_latents, load_tokenizer, read_manifest
from mmldlm.data.text import content_hash
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, UserError

_BLOCK = 65536


def verify(root: str | os.PathLike) -> list[str]:
    """Everything that is wrong with a store, one sentence each; empty if it is sound.

    Checks every file's size and SHA-256, offsets, latent dimension, finite and non-zero latents and their norms,
    token ids against the tokenizer, duplicate texts inside a split, and texts that lie in both splits.

    Raises:
        UserError: there is no store at ``root`` at all.
    """
    root = Path(root)
    manifest = read_manifest(root)
    problems: list[str] = []
    for name in manifest["files"]:
        _collect(problems, check_files, root, {"files": {name: manifest["files"][name]}}, "checksums")
    _collect(problems, load_tokenizer, root)
    absent = [split for split in SPLITS if split not in manifest["splits"]]
    problems += [f"there is no {split} split" for split in absent]
    hashes: dict[str, set[int]] = {}
    for split in (split for split in SPLITS if split not in absent):
        try:
            store = Store(root, split, verify="sizes")
        except UserError as error:
            problems += [_sentence(error)] if _sentence(error) not in problems else []
            continue
        hashes[split] = _verify_split(store, problems)
    if len(hashes) == 2:
        shared = len(hashes["train"] & hashes["validation"])
        if shared:
            problems.append(f"{shared} texts lie both in train and in validation: evaluation would see training texts")
    return problems


def _verify_split(store: Store, problems: list[str]) -> set[int]:
    where, manifest = store.root / store.split, store.manifest
    for name, offsets in (("text", store._text_offsets), ("token", store._token_offsets)):
        if offsets[0] != 0 or (np.diff(offsets) < 0).any():
            problems.append(f"{where}/{name}_offsets.npy does not start at 0 and rise")
            return set()
    summary = manifest["splits"][store.split]
    found = {"num_samples": len(store), "num_tokens": int(store.lengths.sum()), "max_tokens": int(store.lengths.max())}
    problems += [
        f"{where}: {key} is {found[key]}, the manifest says {summary[key]}"
        for key in found
        if found[key] != summary.get(key)
    ]
    if store.lengths.min() == 0:
        problems.append(f"{where}: {int((store.lengths == 0).sum())} samples without tokens")
    vocab_size = manifest["tokenizer"]["vocab_size"]
    normalised = manifest.get("encoder", {}).get("normalize", False)
    for start in range(0, len(store._tokens), _BLOCK * 16):
        block = np.asarray(store._tokens[start : start + _BLOCK * 16])
        if block.min() < 0 or block.max() >= vocab_size:
            problems.append(f"{where}: token ids {block.min()}..{block.max()}, the vocabulary has {vocab_size}")
            break
    for start in range(0, len(store), _BLOCK):
        block = np.asarray(store._latents[start : start + _BLOCK])
        if not _collect(problems, check_latents, block, f"{where} from row {start}", store.latent_dim):
            continue
        norms = np.linalg.norm(block, axis=1)
        if normalised and np.abs(norms - 1).max() > 1e-3:
            problems.append(f"{where}: norms {norms.min():.4f}..{norms.max():.4f}, the encoder's latents have norm 1")
    if not (np.isfinite(store.latent_mean).all() and np.isfinite(store.latent_std).all()):
        problems.append("the latent statistics of the manifest are not finite")
    hashes: set[int] = set()
    try:
        for index in range(len(store)):
            hashes.add(content_hash(store.text(index)))
    except UnicodeDecodeError as error:
        problems.append(f"{where}: text {index} is not UTF-8: {error}")
        return hashes
    if len(hashes) < len(store) and not manifest.get("options", {}).get("keep_duplicates"):
        problems.append(f"{where}: {len(store) - len(hashes)} texts repeat others of this split")
    return hashes


def _collect(problems: list[str], check: Callable, *args) -> bool:
    try:
        check(*args)
    except UserError as error:
        problems.append(_sentence(error))
        return False
    return True


def _sentence(error: UserError) -> str:
    return f"expected {error.expected}, found {error.found}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``mmldlm verify-data``."""
    parser.add_argument("root", metavar="DIR", help="a store made by mmldlm prepare")


def main(args: argparse.Namespace) -> int:
    """Prints a table and the problems; exit code 0 if there are none, 1 otherwise."""
    problems, console = verify(args.root), Console()
    manifest = read_manifest(args.root)
    table = Table("split", "samples", "tokens", "longest", title=f"store {args.root}")
    for name, split in manifest["splits"].items():
        table.add_row(name, *(f"{split[key]:,}" for key in ("num_samples", "num_tokens", "max_tokens")))
    console.print(table)
    for problem in problems:
        console.print(f"problem: {problem}", markup=False, highlight=False, soft_wrap=True)
    files = len(manifest["files"])
    console.print(f"{files} files, {'no problems' if not problems else f'{len(problems)} problems'}")
    return EXIT_FAILED if problems else EXIT_DONE
