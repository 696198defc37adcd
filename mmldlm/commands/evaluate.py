"""`mmldlm evaluate`: the conditioning gain of a model, or its correlation with human scores."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mmldlm.commands import RemovedOption, RenamedOption
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, UserError
from mmldlm.inference.options import IMAGE_GUIDANCE, IMAGE_STEPS
from mmldlm.inference.search import ARGUMENTS as SEARCH_ARGUMENTS
from mmldlm.inference.search import SearchOptions
from mmldlm.observe.pages.page import check_page_path, write_page
from mmldlm.sampling.settings import BY_CERTAINTY, RESULTS_PAGE
from mmldlm.utils import option_types
from mmldlm.utils.formatting import join_some
from mmldlm.utils.json_files import nonfinite_places
from mmldlm.utils.paths import check_writable_file, claimed_file
from mmldlm.utils.progress import ProgressBar

if TYPE_CHECKING:
    from mmldlm.evaluation.image_report import ImageReport
    from mmldlm.evaluation.report import Report
    from mmldlm.tasks.pretrained import Pretrained

INFORMATION_PAGE = "studies/information/README.md"
SUITES = {
    "conditioning_gain": (
        "NELBO, text overlap and retrieval on unseen sentences, with and without the condition"
    ),
    "stsb": "correlation of embedding similarity with human scores (STS Benchmark)",
}
# Options of l2t, which the suite `stsb` does not read.
NOT_STSB = ("num_steps", "sampler", "num_draws", "presence_penalty")
LATENT_STEPS_HELP = (
    f"steps of t2l (default 1, or 10 for prediction epsilon; images: {IMAGE_STEPS}, of codes 12)"
)
# Options that an evaluation of images does not read.
NOT_IMAGES = ("sampler", *SEARCH_ARGUMENTS)
# Options that only an evaluation of images reads.
IMAGES_ONLY = ("vae", "clip", "inception_weights")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm evaluate`."""
    add = parser.add_argument
    add(
        "--checkpoint",
        type=option_types.path,
        required=True,
        metavar="PATH",
        help=(
            "a run, RUN/latest, a checkpoint, a model.pt, or a folder written by `mmldlm convert`"
        ),
    )
    suites = "; ".join(f"{name}: {text}" for name, text in SUITES.items())
    add(
        "--suite",
        type=_suite,
        choices=tuple(SUITES),
        default="conditioning_gain",
        help=f"{suites} (default %(default)s)",
    )
    add(
        "--eval-dataset",
        action=RenamedOption,
        new="--suite conditioning_gain (formerly gain) or --suite stsb",
    )
    add(
        "--data",
        type=option_types.path,
        metavar="STORE",
        help="prepared store; its validation split is evaluated",
    )
    add(
        "--num-samples",
        type=option_types.integer(2),
        metavar="N",
        help="number of unseen sentences (default 1000, or all)",
    )
    add(
        "--num-steps",
        type=option_types.count,
        help="most steps of l2t (default 64, as in mmldlm sample; images: 8)",
    )
    add(
        "--sampler",
        metavar="NAME",
        help="sampler of l2t, by its own settings (default: the task's first)",
    )
    add("--num-lengths", action=RemovedOption, page=RESULTS_PAGE)
    add("--latent-steps", type=option_types.count, help=LATENT_STEPS_HELP)
    add(
        "--num-draws",
        type=option_types.count,
        help="timesteps per text in the NELBO (default 2; images: 4)",
    )
    add("--control-samples", type=option_types.integer(2), default=100,
        help="sentences of the untrained controls (default %(default)s)")  # fmt: skip
    add(
        "--guidance",
        type=option_types.number(),
        help=(
            "classifier-free guidance of both samplers (default 1: none); of images the scale"
            f" measured beside 1 (default {IMAGE_GUIDANCE:g})"
        ),
    )
    add(
        "--presence-penalty",
        type=option_types.number(),
        help="penalty of l2t on repeated tokens (default 1; images: 0)",
    )
    for key, options in SEARCH_ARGUMENTS.items():
        add("--" + key.replace("_", "-"), **options)
    add(
        "--batch-size",
        type=option_types.count,
        metavar="N",
        help="texts of full length per pass (default: some thousand tokens)",
    )
    add(
        "--seed",
        type=option_types.seed,
        default=0,
        help="seed of every draw (default %(default)s)",
    )
    add(
        "--json",
        type=option_types.path,
        metavar="FILE",
        help="also write the results to this file",
    )
    add("--html", type=option_types.path, metavar="FILE.html",
        help="also write the results to this page: tables, plots and samples")  # fmt: skip
    add("--sts-file", type=option_types.path, metavar="CSV",
        help="STS Benchmark file (sts-dev.csv), for --suite stsb")  # fmt: skip
    for option in ("--samplers", "--plot", "--write-schedule"):
        add(option, action=RemovedOption, page=INFORMATION_PAGE)
    add(
        "--clip",
        type=option_types.path,
        metavar="FOLDER",
        help="of images: also the CLIP score by this local CLIPModel with its processor",
    )
    add("--inception-weights", type=option_types.path, metavar="FILE",
        help="of images: also FID and KID by this TorchScript feature network")  # fmt: skip
    add(
        "--vae",
        type=option_types.path,
        metavar="FOLDER",
        help="of images as vae:NAME: folder of the autoencoder (default: as prepared)",
    )
    add("--device", help="default: cuda if available, else cpu")


def _suite(name: str) -> str:
    """Return the name of a suite; the error for the one that became a study says so."""
    if name == "information":
        raise argparse.ArgumentTypeError(
            f"the suite information was removed: it is a study now, {INFORMATION_PAGE}"
        )
    return name


def main(args: argparse.Namespace) -> int:
    """Run `mmldlm evaluate`; return 0, also if a claim does not hold (the report shows it), or 1.

    1 means that a figure is not finite: the report shows it, too, and is written.
    """
    _check_arguments(args)
    with contextlib.ExitStack() as claims:
        for key in ("json", "html"):
            claims.enter_context(claimed_file(getattr(args, key), "--" + key.replace("_", "-")))
        report = _measure(args)
        lines = _write_files(args, report)
    report.show()
    for line in lines:
        print(line)
    if wrong := nonfinite_places({"details": report.as_dict()["details"]}):
        print(f"error: figures that are not finite: {join_some(wrong, limit=8)}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_DONE


def _write_files(args: argparse.Namespace, report: Report) -> list[str]:
    """Write the files that were asked for, before anything is printed; return a line about each.

    Raises:
        Exception: of the first that could not be written, once the others are.
    """

    def write_json() -> list[str]:
        report.write(args.json)
        return [f"written to {args.json}"]

    def write_html() -> list[str]:
        write_page(args.html, report.page())
        return [f"page: {args.html}"]

    writers = [write_json] * bool(args.json) + [write_html] * bool(args.html)
    lines: list[str] = []
    failure: Exception | None = None
    for write in writers:
        try:
            lines += write()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return lines


def _measure(args: argparse.Namespace) -> Report:
    from mmldlm.data.run_data import check_store_kind
    from mmldlm.evaluation import gain, sts
    from mmldlm.evaluation.directions import Settings
    from mmldlm.inference.load import load_pretrained
    from mmldlm.sampling.device import usable_device

    device = usable_device(args.device)
    pairs = sts.read_pairs(args.sts_file) if args.suite == "stsb" else None
    store = None
    if pairs is None:
        from mmldlm.data.store import Store

        store = Store(args.data, "validation")
    pretrained = load_pretrained(args.checkpoint, device)
    if store is not None:
        check_store_kind(store, "text" if pretrained.image is None else "image")
    report: Report
    with ProgressBar() as progress:
        if pretrained.image is None:
            _check_no_image_options(args, pretrained)
        if pretrained.image is not None:
            report = _evaluate_images(args, pretrained, progress)
        elif pairs is not None:
            report = sts.evaluate(
                pretrained,
                pairs,
                steps=args.latent_steps,
                guidance=1.0 if args.guidance is None else args.guidance,
                seed=args.seed,
                log=progress.start,
                batch_size=args.batch_size,
            )
        else:
            _check_task(args, pretrained)
            given = {key: getattr(args, key) for key in Settings.__dataclass_fields__}
            settings = Settings(
                **{key: value for key, value in given.items() if value is not None}
            )
            report = gain.evaluate(pretrained, store, settings, progress.start)
    return report


def _check_no_image_options(args: argparse.Namespace, pretrained: Pretrained) -> None:
    if given := ", ".join(
        "--" + key.replace("_", "-") for key in IMAGES_ONLY if getattr(args, key) is not None
    ):
        raise UserError(
            f"{given} with a model of images", f"task={pretrained.task.name}", f"omit {given}"
        )


def _evaluate_images(
    args: argparse.Namespace, pretrained: Pretrained, progress: ProgressBar
) -> ImageReport:
    from mmldlm.evaluation.images import ImageSettings, evaluate_images

    if args.suite != "conditioning_gain":
        raise UserError(
            "--suite conditioning_gain for a model of images",
            f"--suite {args.suite}",
            "omit --suite",
        )
    if unread := [
        "--" + key.replace("_", "-") for key in NOT_IMAGES if getattr(args, key) is not None
    ]:
        raise UserError(
            "options that an evaluation of images reads", ", ".join(unread), "omit them"
        )
    pretrained.vae = args.vae
    given = {key: getattr(args, key) for key in ImageSettings.__dataclass_fields__}
    settings = ImageSettings(**{key: value for key, value in given.items() if value is not None})
    return evaluate_images(pretrained, args.data, settings, progress.start)


def _check_task(args: argparse.Namespace, pretrained: Pretrained) -> None:
    task = pretrained.task
    if args.sampler is not None:
        pretrained.check_kind("l2t", args.sampler)
        if args.num_steps is not None and "num_steps" in task.unread_options("l2t", args.sampler):
            raise UserError(
                f"options that --sampler {args.sampler} reads", "--num-steps", "omit it"
            )
        has_penalty = "presence_penalty" in task.sampling_options
        if args.presence_penalty is None and has_penalty and args.sampler not in BY_CERTAINTY:
            args.presence_penalty = 0.0  # as in `mmldlm sample`
    options = {key: getattr(args, key) for key in ("num_steps", "presence_penalty")}
    options["guidance"] = None if args.guidance == 1 else args.guidance  # 1 is what all tasks do
    given = [
        key
        for key, value in options.items()
        if value is not None and key not in task.sampling_options
    ]
    given += ["latent_steps"] * (args.latent_steps is not None and "t2l" not in task.samplers)
    given += ["num_draws"] * (args.num_draws is not None and task.exact_likelihood)
    if given:
        names = ", ".join("--" + key.replace("_", "-") for key in given)
        raise UserError(f"options that task={task.name} reads", names, "omit them")
    SearchOptions.of(args).check(task, ())


def _check_arguments(args: argparse.Namespace) -> None:
    if args.suite == "stsb" and not args.sts_file:
        raise UserError(
            "--sts-file: an STS Benchmark file (sts-dev.csv or sts-test.csv)",
            "none given",
            "name the file; no substitute is built in",
        )
    unread = [key for key in NOT_STSB if args.suite == "stsb" and getattr(args, key) is not None]
    if unread:
        names = ", ".join("--" + key.replace("_", "-") for key in unread)
        raise UserError(
            f"options that --suite {args.suite} reads", names, "omit them, or name another --suite"
        )
    if args.suite != "stsb" and not args.data:
        raise UserError(
            "--data STORE, whose validation split is evaluated",
            "none given",
            "name the prepared store",
        )
    search = SearchOptions.of(args)
    if args.suite != "conditioning_gain" and search.way is not None:
        name = "--search" if search.correct is None else "--correct"
        raise UserError(
            f"{name} with --suite conditioning_gain", f"--suite {args.suite}", f"omit {name}"
        )
    if args.json:
        check_writable_file(args.json, "--json")
    if args.html:
        check_page_path(args.html, "--html")
        if args.json and Path(args.json).absolute() == Path(args.html).absolute():
            raise UserError(
                "two files for --json and --html", f"{args.html} for both", "give another name"
            )
