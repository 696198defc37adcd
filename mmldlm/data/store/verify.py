"""``mmldlm verify-data``: is a store whole, and is what it holds fit to train on?"""

from __future__ import annotations

import argparse
import array
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mmldlm.data.sentences import content_hash
from mmldlm.data.store.latent_statistics import LatentStatistics
from mmldlm.data.store.store import SPLITS, Store, check_files, check_latents, load_tokenizer, read_manifest
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, UserError
from mmldlm.utils.output_paths import check_writable_file

BARS, DIGITS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", " 12345678"  # the second for terminals of ASCII
_BLOCK = 4096
_TOKEN_BLOCK = 1 << 20


@dataclass
class SplitFindings:
    """What one split holds. hashes: sorted uint64 of every text's content. norms: of every latent. lengths: tokens."""

    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    norms: np.ndarray = field(default_factory=lambda: np.empty(0))
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    statistics: dict[str, Any] | None = None


@dataclass
class StoreReport:
    """All checks of a store: name -> what is wrong, one sentence each; and what was measured, by split."""

    checks: dict[str, list[str]]
    splits: dict[str, SplitFindings]

    @property
    def problems(self) -> list[str]:
        """Everything that is wrong."""
        return [problem for found in self.checks.values() for problem in found]


def verify(root: str | os.PathLike) -> list[str]:
    """Everything that is wrong with a store, one sentence each; empty if it is sound. See ``examine``."""
    return examine(root).problems


def examine(root: str | os.PathLike) -> StoreReport:
    """Checks every file's size and SHA-256, offsets, latent dimension, finite and non-zero latents, their norms and
    statistics, token ids against the tokenizer, duplicate texts inside a split, and texts that lie in both splits.

    Raises:
        UserError: there is no store at ``root`` at all.
    """
    root = Path(root)
    manifest = read_manifest(root)
    names = ("checksums", "tokenizer", "shape", "token ids", "latents", "statistics", "texts", "duplicates", "leakage")
    checks: dict[str, list[str]] = {name: [] for name in names}
    for name in manifest["files"]:
        _collect(checks["checksums"], check_files, root, {"files": {name: manifest["files"][name]}}, "checksums")
    _collect(checks["tokenizer"], load_tokenizer, root)
    absent = [split for split in SPLITS if split not in manifest["splits"]]
    checks["shape"] += [f"there is no {split} split" for split in absent]
    found: dict[str, SplitFindings] = {}
    for split in (split for split in SPLITS if split not in absent):
        try:
            store = Store(root, split, verify="sizes")
        except UserError as error:
            known = _sentence(error) in checks["checksums"]
            checks["shape"] += [] if known else [_sentence(error)]
            continue
        found[split] = _examine_split(store, checks)
    if len(found) == 2:
        shared = len(np.intersect1d(found["train"].hashes, found["validation"].hashes))
        if shared:
            checks["leakage"].append(
                f"{shared} texts lie both in train and in validation: evaluation would see training texts"
            )
    return StoreReport(checks, found)


def _examine_split(store: Store, checks: dict[str, list[str]]) -> SplitFindings:
    where, manifest, found = store.root / store.split, store.manifest, SplitFindings()
    for name, offsets in (("text", store._text_offsets), ("token", store._token_offsets)):
        if offsets[0] != 0 or (np.diff(offsets) < 0).any():
            checks["shape"].append(f"{where}/{name}_offsets.npy does not start at 0 and rise")
            return found
    found.lengths = store.lengths
    summary = manifest["splits"][store.split]
    own = {"num_samples": len(store), "num_tokens": int(store.lengths.sum()), "max_tokens": int(store.lengths.max())}
    checks["shape"] += [
        f"{where}: {key} is {own[key]}, the manifest says {summary[key]}" for key in own if own[key] != summary.get(key)
    ]
    if store.documents is not None and len(store.documents) != len(store):
        checks["shape"].append(f"{where}/documents.npy has {len(store.documents)} rows")
    if store.lengths.min() == 0:
        checks["shape"].append(f"{where}: {int((store.lengths == 0).sum())} samples without tokens")
    _examine_tokens(store, checks["token ids"])
    _examine_latents(store, checks, found)
    hashes = array.array("Q")
    try:
        for index in range(len(store)):
            hashes.append(content_hash(store.text(index)))
    except UnicodeDecodeError as error:
        checks["texts"].append(f"{where}: text {index} is not UTF-8: {error}")
    found.hashes = np.unique(np.array(hashes, np.uint64))
    if len(found.hashes) < len(hashes) and not manifest.get("options", {}).get("keep_duplicates"):
        checks["duplicates"].append(f"{where}: {len(hashes) - len(found.hashes)} texts repeat others of this split")
    return found


def _examine_tokens(store: Store, problems: list[str]) -> None:
    where, vocab_size = store.root / store.split, store.manifest["tokenizer"]["vocab_size"]
    special = [store.manifest["tokenizer"][f"{kind}_token_id"] for kind in ("mask", "pad")]
    num_special = 0
    for start in range(0, len(store._tokens), _TOKEN_BLOCK):
        block = np.asarray(store._tokens[start : start + _TOKEN_BLOCK])
        if block.min() < 0 or block.max() >= vocab_size:
            problems.append(f"{where}: token ids {block.min()}..{block.max()}, the vocabulary has {vocab_size}")
            return
        num_special += int(np.isin(block, special).sum())
    if num_special:
        problems.append(f"{where}: {num_special} MASK or PAD tokens among the texts' own")


def _examine_latents(store: Store, checks: dict[str, list[str]], found: SplitFindings) -> None:
    where, manifest = store.root / store.split, store.manifest
    statistics, norms = LatentStatistics(store.latent_dim, len(store) * store.latents_per_text), []
    is_sound = True
    for start, block in store.latent_blocks(len(store)):
        is_sound &= _collect(checks["latents"], check_latents, block, str(where), store.latent_dim, start)
        norms.append(np.linalg.norm(block, axis=-1).ravel())
        if is_sound:
            statistics.add(block)
    found.norms = np.concatenate(norms)
    if not (np.isfinite(store.latent_mean).all() and np.isfinite(store.latent_std).all()):
        checks["statistics"].append("the latent statistics of the manifest are not finite")
        return
    finite = found.norms[np.isfinite(found.norms)]
    if manifest.get("encoder", {}).get("normalize", False) and len(finite) and np.abs(finite - 1).max() > 1e-3:
        checks["latents"].append(
            f"{where}: norms {finite.min():.4f}..{finite.max():.4f}, the encoder's latents have norm 1"
        )
    if not is_sound:
        return
    found.statistics = statistics.result()
    if store.split == "train":
        scale = max(float(store.latent_std.max()), 1e-12)
        for name in ("mean", "std"):
            gap = np.abs(np.array(found.statistics[name]) - np.array(manifest["latent_stats"][name])).max() / scale
            if gap > 1e-3:
                checks["statistics"].append(
                    f"{where}: {name} of the latents is off the manifest's by {gap:.2g} standard deviations"
                )


def _collect(problems: list[str], check: Callable, *args) -> bool:
    try:
        check(*args)
    except UserError as error:
        problems.append(_sentence(error))
        return False
    return True


def _sentence(error: UserError) -> str:
    return f"expected {error.expected}, found {error.found}"


# The command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``mmldlm verify-data``."""
    parser.add_argument("root", metavar="DIR", help="a store made by mmldlm prepare or pack")
    parser.add_argument("--plot", metavar="FILE", help="draw lengths, norms and the spread of components (.png, .pdf)")


def main(args: argparse.Namespace) -> int:
    """Prints tables and the problems; exit code 0 if there are none, 1 otherwise."""
    if args.plot:
        check_writable_file(args.plot, "--plot")
    report, console = examine(args.root), Console()
    marks = BARS if console.encoding.startswith("utf") else DIGITS
    manifest = read_manifest(args.root)
    table = Table("split", "samples", "tokens", "longest", "lengths", "norm", "rank", title=f"store {args.root}")
    for name, split in manifest["splits"].items():
        numbers = [f"{split[key]:,}" for key in ("num_samples", "num_tokens", "max_tokens")]
        found = report.splits.get(name)
        statistics = None if found is None else found.statistics
        norm = "?" if statistics is None else f"{statistics['norm']['mean']:.4f}"
        rank = "?" if statistics is None else f"{statistics['effective_rank']:.0f}/{manifest['latent_dim']}"
        table.add_row(name, *numbers, "?" if found is None else histogram(found.lengths, marks), norm, rank)
    console.print(table)
    checks = Table("check", "result")
    for name, problems in report.checks.items():
        checks.add_row(name, f"{len(problems)} problems" if problems else "passed")
    console.print(checks)
    for problem in report.problems:
        console.print(f"problem: {problem}", markup=False, highlight=False, soft_wrap=True)
    if args.plot:
        plot(report, manifest, args.plot)
        console.print(f"drawn: {args.plot}", soft_wrap=True)
    num_problems, files = len(report.problems), len(manifest["files"])
    console.print(f"{files} files, {'no problems' if not num_problems else f'{num_problems} problems'}")
    return EXIT_FAILED if num_problems else EXIT_DONE


def histogram(lengths: np.ndarray, marks: str = BARS, bins: int = 10) -> str:
    """A line of nine kinds of marks: the share of samples in equal ranges of length, from 0 to the longest."""
    if not len(lengths):
        return ""
    counts, _ = np.histogram(lengths, bins=bins, range=(0, max(int(lengths.max()), 1)))
    return "".join(marks[int(np.ceil(8 * count / counts.max()))] for count in counts)


def _shares(values: np.ndarray) -> np.ndarray:
    """Weights with which a histogram's bars add up to 1 in every split."""
    return np.full(len(values), 1 / len(values))


def plot(report: StoreReport, manifest: dict[str, Any], path: str) -> None:
    """Draws token counts, latent norms, and mean and deviation of each component of the training latents."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for name, found in report.splits.items():
        if len(found.lengths):
            left.hist(found.lengths, bins=50, weights=_shares(found.lengths), alpha=0.6, label=name)
        norms = found.norms[np.isfinite(found.norms)].astype(np.float64)
        if len(norms):  # unit vectors differ by rounding alone: show them as one bar
            limits = (norms.min() - 1e-3, norms.max() + 1e-3)
            middle.hist(norms, bins=50, range=limits, weights=_shares(norms), alpha=0.6, label=name)
    left.set(xlabel="tokens", ylabel="share of samples")
    middle.set(xlabel="norm of the latent", ylabel="share of samples")
    for axes in (left, middle):
        axes.legend()
    statistics = manifest["latent_stats"]
    right.plot(np.sort(np.abs(statistics["mean"]))[::-1], label="|mean|")
    right.plot(np.sort(statistics["std"])[::-1], label="std")
    right.set(xlabel="component, sorted", title=f"effective rank {statistics['effective_rank']:.1f}", yscale="log")
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
