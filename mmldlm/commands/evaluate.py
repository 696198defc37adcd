"""`mmldlm evaluate`: the conditioning gain of a model, or its correlation with human scores on STS-B."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mmldlm.commands import RenamedOption
from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.evaluation.suite import SUITES
from mmldlm.sampling.search.options import ARGUMENTS as SEARCH_ARGUMENTS
from mmldlm.sampling.search.options import SearchOptions
from mmldlm.utils.output_paths import check_writable_file
from mmldlm.utils.progress import ProgressBar

if TYPE_CHECKING:
    from mmldlm.tasks.text_task import TextTask

MINIMUMS = {
    "num_samples": 2,
    "num_steps": 1,
    "latent_steps": 1,
    "num_draws": 1,
    "control_samples": 2,
    "seed": 0,
    "batch_size": 1,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm evaluate`."""
    add = parser.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="PATH",
        help="a run, RUN/latest, a checkpoint, a model.pt, or a folder written by `mmldlm convert`",
    )
    suites = "; ".join(f"{name}: {text}" for name, text in SUITES.items())
    add("--suite", choices=tuple(SUITES), default="conditioning_gain", help=f"{suites} (default %(default)s)")
    add("--eval-dataset", action=RenamedOption, new="--suite conditioning_gain (formerly gain) or --suite stsb")
    add("--data", metavar="STORE", help="prepared store; its validation split is evaluated")
    add("--num-samples", type=int, metavar="N", help="number of unseen sentences (default 1000, or all)")
    add("--num-steps", type=int, help="steps of l2t (default 12)")
    add("--latent-steps", type=int, help="denoising steps of t2l (default 1, or 10 for prediction epsilon)")
    add("--num-draws", type=int, help="timesteps per sentence in the NELBO (default 2)")
    add("--control-samples", type=int, default=100, help="sentences of the untrained controls (default %(default)s)")
    add("--guidance", type=float, default=1.0, help="classifier-free guidance of both samplers (default 1: none)")
    add("--presence-penalty", type=float, help="penalty of l2t on repeated tokens (default 1)")
    for key, options in SEARCH_ARGUMENTS.items():
        add("--" + key.replace("_", "-"), **options)
    add("--batch-size", type=int, metavar="N", help="texts of full length per pass (default: some thousand tokens)")
    add("--seed", type=int, default=0, help="seed of every draw (default %(default)s)")
    add("--json", metavar="FILE", help="also write the results to this file")
    add("--sts-file", metavar="CSV", help="STS Benchmark file (sts-dev.csv), for --suite stsb")
    add("--device", help="default: cuda if available, else cpu")


def main(args: argparse.Namespace) -> int:
    """Run `mmldlm evaluate`; return 0, also if a claim does not hold (the report shows it)."""
    _check_arguments(args)
    from mmldlm.evaluation import conditioning_gain
    from mmldlm.evaluation.directions import Settings
    from mmldlm.evaluation.metrics import sts_benchmark
    from mmldlm.sampling.device import usable_device
    from mmldlm.sampling.pretrained import load_pretrained

    device = usable_device(args.device)
    pairs = sts_benchmark.read_pairs(args.sts_file) if args.suite == "stsb" else None
    store = None
    if pairs is None:
        from mmldlm.data.store.store import Store

        store = Store(args.data, "validation")
    pretrained = load_pretrained(args.checkpoint, device)
    with ProgressBar() as progress:
        if pairs is not None:
            report = sts_benchmark.evaluate(
                pretrained,
                pairs,
                steps=args.latent_steps,
                guidance=args.guidance,
                seed=args.seed,
                log=progress.start,
                batch_size=args.batch_size,
            )
        else:
            _check_task(args, pretrained.task)
            given = {key: getattr(args, key) for key in Settings.__dataclass_fields__}
            settings = Settings(**{key: value for key, value in given.items() if value is not None})
            report = conditioning_gain.evaluate(pretrained, store, settings, progress.start)
    report.show()
    if args.json:
        report.write(args.json)
        print(f"written to {args.json}")
    return EXIT_DONE


def _check_task(args: argparse.Namespace, task: TextTask) -> None:
    options = {"num_steps": args.num_steps, "presence_penalty": args.presence_penalty}
    options["guidance"] = None if args.guidance == 1 else args.guidance
    given = [key for key, value in options.items() if value is not None and key not in task.sampling_options]
    given += ["latent_steps"] * (args.latent_steps is not None and "t2l" not in task.samplers)
    given += ["num_draws"] * (args.num_draws is not None and task.exact_likelihood)
    if given:
        names = ", ".join("--" + key.replace("_", "-") for key in given)
        raise UserError(f"options that task={task.name} reads", names, "omit them")
    SearchOptions.of(args).check(task, ())


def _check_arguments(args: argparse.Namespace) -> None:
    for key, minimum in MINIMUMS.items():
        value = getattr(args, key)
        if value is not None and value < minimum:
            raise UserError(f"--{key.replace('_', '-')} of at least {minimum}", str(value), "choose a larger number")
    if args.suite == "stsb" and not args.sts_file:
        raise UserError(
            "--sts-file: an STS Benchmark file (sts-dev.csv or sts-test.csv)",
            "none given",
            "name the file; no substitute is built in",
        )
    if args.suite == "conditioning_gain" and not args.data:
        raise UserError("--data STORE, whose validation split is evaluated", "none given", "name the prepared store")
    search = SearchOptions.of(args)
    if args.suite == "stsb" and search.search is not None:
        raise UserError(
            "--search with --suite conditioning_gain", "--suite stsb, which writes no texts", "omit --search"
        )
    if args.json:
        check_writable_file(args.json, "--json")
