"""`mmldlm verify-data`: check a store and show its statistics."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import numpy as np
from rich.table import Table

from mmldlm.data.prepare.summary import training_command
from mmldlm.data.store import Store, read_manifest
from mmldlm.data.verify import StoreReport, examine
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, UserError
from mmldlm.utils import option_types
from mmldlm.utils.figures import new_figure, save_figure
from mmldlm.utils.formatting import count_noun
from mmldlm.utils.paths import check_writable_file, claimed_file
from mmldlm.utils.screen import open_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mmldlm verify-data`."""
    parser.add_argument(
        "root",
        type=option_types.path,
        metavar="DIR",
        help="a store made by mmldlm prepare or pack",
    )
    parser.add_argument(
        "--plot",
        type=option_types.path,
        metavar="FILE",
        help="plot lengths, norms and components of the latents (.png, .pdf)",
    )
    parser.add_argument(
        "--sheet",
        type=option_types.path,
        metavar="FILE.png",
        help="of a store of images: images with their captions",
    )
    parser.add_argument(
        "--vae",
        type=option_types.path,
        metavar="FOLDER",
        help="of --sheet and vae:NAME: the autoencoder (default: as prepared)",
    )


def main(args: argparse.Namespace) -> int:
    """Print tables and the problems; return 0 if there are none, else 1."""
    if args.plot:
        check_writable_file(args.plot, "--plot")
    if args.vae and not args.sheet:
        raise UserError(
            "--vae with --sheet", "--vae alone", "add --sheet FILE.png, or leave --vae out"
        )
    if args.sheet:
        _check_sheet(args)
    with claimed_file(args.plot, "--plot"), claimed_file(args.sheet, "--sheet"):
        return _verify(args)


def _verify(args: argparse.Namespace) -> int:
    report, console = examine(args.root), open_console()
    manifest = read_manifest(args.root)
    num_problems, num_files = len(report.problems), count_noun(len(manifest["files"]), "file")
    found = count_noun(num_problems, "problem") if num_problems else "no problems"
    console.print(f"{found} in {num_files} of {args.root}", soft_wrap=True)
    console.print(_splits_table(args.root, report, manifest))
    checks = Table("check", "result")
    for name, problems in report.checks.items():
        checks.add_row(name, count_noun(len(problems), "problem") if problems else "passed")
    console.print(checks)
    for warning in report.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    for problem in report.problems:
        console.print(f"problem: {problem}", soft_wrap=True)
    if args.plot:
        plot(report, manifest, args.plot)
        console.print(f"plotted: {args.plot}", soft_wrap=True)
    if args.sheet:
        write_sheet(args.root, args.sheet, vae=args.vae)
        console.print(f"drawn: {args.sheet}", soft_wrap=True)
    if num_problems:
        return EXIT_FAILED
    console.print(f"next: {shlex.join(training_command(args.root, manifest))}", soft_wrap=True)
    return EXIT_DONE


def _check_sheet(args: argparse.Namespace) -> None:
    check_writable_file(args.sheet, "--sheet")
    if read_manifest(args.root).get("kind", "text") != "image":
        raise UserError(
            "--sheet with a store of images", f"a store of texts: {args.root}", "leave --sheet out"
        )
    if not args.sheet.endswith(".png"):
        raise UserError("--sheet FILE.png", args.sheet, "give a name that ends in .png")


def write_sheet(root: str, path: str, count: int = 60, vae: str | None = None) -> None:
    """Draw images of both splits with their captions, evenly spread: the first three quarters are
    of training.
    """
    from mmldlm.data.image_codec import ImageCodec
    from mmldlm.data.images import contact_sheet

    codec, images, captions = ImageCodec.open(root).ready(vae), [], []
    for split, share in (("train", count * 3 // 4), ("validation", count // 4)):
        store = Store(root, split)
        rows = np.unique(np.linspace(0, len(store) - 1, share).astype(np.int64))
        images.append(codec.decode(store.get(rows).latents))
        captions += [
            f"{split}: {text}" if split != "train" else text for text in store.texts(rows)
        ]
    contact_sheet(np.concatenate(images), captions, path)


def _splits_table(root: str, report: StoreReport, manifest: dict[str, Any]) -> Table:
    """Return the table of the splits; "?" for what a damaged split does not tell."""
    columns = ("split", "samples", "tokens", "longest", "norm", "rank", "[UNK]")
    table = Table(*columns, title=f"store {root}")
    for name, split in manifest["splits"].items():
        numbers = [f"{split.get(key, 0):,}" for key in ("num_samples", "num_tokens", "max_tokens")]
        norm = rank = "ids" if manifest["latent_stats"] is None else "?"
        unknown = "?"
        found = report.splits.get(name)
        if found is not None:
            unknown = f"{found.num_unknown / max(int(found.lengths.sum()), 1):.2%}"
            if found.statistics is not None:
                norm = f"{found.statistics['norm']['mean']:.4f}"
                rank = f"{found.statistics['effective_rank']:.0f}/{manifest['latent_dim']}"
        table.add_row(name, *numbers, norm, rank, unknown)
    return table


def _shares(values: np.ndarray) -> np.ndarray:
    """Return weights with which the bars of a histogram add up to 1."""
    return np.full(len(values), 1 / len(values))


def plot(report: StoreReport, manifest: dict[str, Any], path: str) -> None:
    """Plot token counts, latent norms, and mean and deviation of each component of the training
    latents.
    """
    figure = new_figure(13, 3.6)
    left, middle, right = figure.subplots(1, 3)
    for name, found in report.splits.items():
        if len(found.lengths):
            left.hist(
                found.lengths, bins=50, weights=_shares(found.lengths), alpha=0.6, label=name
            )
        norms = found.norms[np.isfinite(found.norms)].astype(np.float64)
        if len(norms):  # unit vectors differ by rounding only: show them as one bar
            limits = (norms.min() - 1e-3, norms.max() + 1e-3)
            middle.hist(
                norms, bins=50, range=limits, weights=_shares(norms), alpha=0.6, label=name
            )
    left.set(xlabel="tokens", ylabel="share of samples")
    left.legend()
    statistics = manifest["latent_stats"]
    if statistics is None:  # ids of codes have neither norms nor components
        middle.set_axis_off()
        right.set_axis_off()
    else:
        middle.set(xlabel="norm of the latent", ylabel="share of samples")
        middle.legend()
        right.plot(np.sort(np.abs(statistics["mean"]))[::-1], label="|mean|")
        right.plot(np.sort(statistics["std"])[::-1], label="std")
        right.set(
            xlabel="component, sorted",
            title=f"effective rank {statistics['effective_rank']:.1f}",
            yscale="log",
        )
        right.legend()
    save_figure(figure, path, dpi=120)
