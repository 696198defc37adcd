"""`mmldlm evaluate`: the conditioning gain of a model, or its correlation with human scores."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmldlm.commands import FormerOption, add_checkpoint, add_encoder_dir, add_removed
from mmldlm.data.encoders.model_files import encoder_dir
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, UserError
from mmldlm.evaluation.settings import (
    SUITE_SETTINGS,
    GainSettings,
    ImageSettings,
    StsSettings,
    unread_options,
)
from mmldlm.inference.search_options import SearchOptions
from mmldlm.observe.pages.page import check_page_path, write_page
from mmldlm.sampling.settings import BY_CERTAINTY, RESULTS_PAGE
from mmldlm.utils import option_types
from mmldlm.utils.formatting import for_screen, join_some
from mmldlm.utils.json_files import nonfinite_places
from mmldlm.utils.paths import check_writable_file, claimed_file
from mmldlm.utils.progress import ProgressBar
from mmldlm.utils.settings import Settings, add_options, flags, given_options, options_of

if TYPE_CHECKING:
    from mmldlm.evaluation.report import Report
    from mmldlm.tasks.text_task import Pretrained

INFORMATION_PAGE = "studies/information/README.md"
SUITES = {
    "conditioning_gain": (
        "NELBO, text overlap and retrieval on unseen sentences, with and without the condition"
    ),
    "stsb": "correlation of embedding similarity with human scores (STS Benchmark)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm evaluate`."""
    add = parser.add_argument
    add_checkpoint(parser)
    suites = "; ".join(f"{name}: {text}" for name, text in SUITES.items())
    add(
        "--suite",
        choices=tuple(SUITES),
        default="conditioning_gain",
        help=f"{suites} (default %(default)s)",
    )
    add(
        "--eval-dataset",
        action=FormerOption,
        became="was renamed: use --suite conditioning_gain (formerly gain) or --suite stsb",
    )
    add(
        "--data",
        type=option_types.path,
        metavar="STORE",
        help="prepared store; its validation split is evaluated",
    )
    add_options(parser, *SUITE_SETTINGS)
    add_removed(parser, ["--num-lengths"], RESULTS_PAGE)
    add(
        "--json",
        type=option_types.path,
        metavar="FILE",
        help="also write the results to this file",
    )
    add("--html", type=option_types.path, metavar="FILE.html",
        help="also write the results to this page: tables, plots and samples")  # fmt: skip
    add_removed(parser, ["--samplers", "--plot", "--write-schedule"], INFORMATION_PAGE)
    add("--device", help="default: cuda if available, else cpu")
    add_encoder_dir(parser)
    parser.add_argument_group("--suite stsb").add_argument(
        "--sts-file",
        type=option_types.path,
        metavar="CSV",
        help="STS Benchmark file: sts-dev.csv or sts-test.csv",
    )


def main(args: argparse.Namespace) -> int:
    """Run `mmldlm evaluate`; return 0, also if a claim does not hold (the report shows it), or 1.

    1 means that a figure is not finite: the report shows it, too, and is written.
    """
    given = given_options(args, dict.fromkeys(chain(*map(options_of, SUITE_SETTINGS))))
    _check_arguments(args, given)
    with (
        claimed_file(args.json, "--json"),
        claimed_file(args.html, "--html"),
        encoder_dir(args.encoder_dir),
    ):
        report = _measure(args, given)
        try:
            if args.json:
                report.write(args.json)
        finally:  # one that cannot be written costs not the other one
            if args.html:
                write_page(args.html, report.page())
    print(for_screen(report.verdict, sys.stdout))
    report.show()
    if args.json:
        print(f"done: figures in {args.json}")
    if args.html:
        print(f"done: page in {args.html}")
    if wrong := nonfinite_places({"details": report.as_dict()["details"]}):
        print(f"error: figures that are not finite: {join_some(wrong, limit=8)}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_DONE


def _measure(args: argparse.Namespace, given: dict[str, Any]) -> Report:
    from mmldlm.data.run_data import check_store_kind
    from mmldlm.data.store import Store
    from mmldlm.evaluation import gain, images, sts
    from mmldlm.inference.load import load_pretrained, usable_device

    device = usable_device(args.device)
    pairs = sts.read_pairs(args.sts_file) if args.suite == "stsb" else None
    store = Store(args.data, "validation") if pairs is None else None
    pretrained = load_pretrained(args.checkpoint, device, revision=args.revision)
    if store is not None:
        check_store_kind(store, "text" if pretrained.image is None else "image")
    with ProgressBar() as progress:
        if pretrained.image is not None:
            settings = _image_settings(args.suite, given, pretrained)
            return images.evaluate_images(pretrained, args.data, settings, progress.start)
        if pairs is not None:
            sts_settings = StsSettings(**_read(StsSettings, given))
            return sts.evaluate(pretrained, pairs, sts_settings, progress.start)
        assert store is not None
        return gain.evaluate(pretrained, store, _gain_settings(given, pretrained), progress.start)


def _read(settings: type[Settings], given: dict[str, Any]) -> dict[str, Any]:
    """Return those of the given options that a suite reads."""
    return {key: given[key] for key in options_of(settings) if key in given}


def _refuse(unread: list[str], reader: str) -> None:
    """Raise a UserError for options that nothing reads."""
    if unread:
        raise UserError(f"options that {reader} reads", flags(unread), "omit them")


def _image_settings(suite: str, given: dict[str, Any], pretrained: Pretrained) -> ImageSettings:
    if suite != "conditioning_gain":
        raise UserError(
            "--suite conditioning_gain for a model of images", f"--suite {suite}", "omit --suite"
        )
    modes = {
        "num_steps": "l2t",
        "presence_penalty": "l2t",
        "guidance": "t2l",
        "latent_steps": "t2l",
    }
    unread = unread_options(ImageSettings, given)
    unread += [key for key in modes if key in given and not pretrained.supports(modes[key])]
    _refuse(unread, "an evaluation of images in the modes of this model")
    if "guidance" in given:
        pretrained.check_guidance(given["guidance"])
    return ImageSettings(**_read(ImageSettings, given))


def _gain_settings(given: dict[str, Any], pretrained: Pretrained) -> GainSettings:
    """Return the settings for a model of texts; refuse what its task does not read."""
    task = pretrained.task
    settings = GainSettings(**_read(GainSettings, given))
    writes = pretrained.reads_latents and pretrained.supports("l2t")
    scores = writes or not pretrained.reads_latents
    has_penalty = "presence_penalty" in task.sampling_options
    is_read = {
        "sampler": writes,
        "num_steps": scores and "num_steps" in task.sampling_options,
        "presence_penalty": writes and has_penalty,
        # Guidance 1 is what all tasks do.
        "guidance": settings.guidance == 1
        or (pretrained.reads_latents and "guidance" in task.sampling_options),
        "latent_steps": "t2l" in task.samplers and pretrained.supports("t2l"),
        "num_draws": scores and not task.exact_likelihood,
    }
    unread = unread_options(GainSettings, given)
    unread += [key for key, reads in is_read.items() if key in given and not reads]
    _refuse(unread, f"an evaluation of task={task.name} in the modes of this model")
    sampler = settings.sampler
    if sampler is not None:
        pretrained.check_kind("l2t", sampler)
        unread = [key for key in given if key in task.unread_options("l2t", sampler)]
        _refuse(unread, f"--sampler {sampler}")
        if has_penalty and "presence_penalty" not in given and sampler not in BY_CERTAINTY:
            settings = replace(settings, presence_penalty=0.0)  # as in `mmldlm sample`
    settings.check_search(task, given)
    return settings


def _check_arguments(args: argparse.Namespace, given: dict[str, Any]) -> None:
    SearchOptions(**_read(SearchOptions, given))
    if args.suite == "stsb":
        if not args.sts_file:
            raise UserError(
                "--sts-file: an STS Benchmark file (sts-dev.csv or sts-test.csv)",
                "none given",
                "name the file; no substitute is built in",
            )
        _refuse(unread_options(StsSettings, given), "--suite stsb")
    elif not args.data:
        raise UserError(
            "--data STORE, whose validation split is evaluated",
            "none given",
            "name the prepared store",
        )
    if args.json:
        check_writable_file(args.json, "--json")
    if args.html:
        check_page_path(args.html, "--html")
        if args.json and Path(args.json).absolute() == Path(args.html).absolute():
            raise UserError(
                "two files for --json and --html", f"{args.html} for both", "give another name"
            )
