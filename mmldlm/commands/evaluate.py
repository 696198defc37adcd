"""`mmldlm evaluate`: the conditioning gain of a model, and STS-B."""

from __future__ import annotations

import argparse

from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.utils.output_paths import check_writable_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `mmldlm evaluate`."""
    add = parser.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="PATH",
        help="a run, RUN/latest, a checkpoint, a model.pt, or a folder that `mmldlm convert` wrote",
    )
    add("--data", metavar="STORE", help="prepared store; its validation split is evaluated")
    add("--num-samples", type=int, metavar="N", help="unseen sentences (default 1000, or all there are)")
    add("--num-steps", type=int, default=12, help="confidence steps of l2t (default %(default)s)")
    add("--latent-steps", type=int, default=10, help="denoising steps of t2l (default %(default)s)")
    add("--num-draws", type=int, default=2, help="timesteps a sentence in the NELBO (default %(default)s)")
    add("--control-samples", type=int, default=100, help="sentences of the untrained controls (default %(default)s)")
    add("--guidance", type=float, default=1.0, help="classifier-free guidance of both samplers (default 1: none)")
    add("--presence-penalty", type=float, default=1.0, help="of l2t, against repetition (default %(default)s)")
    add("--batch-size", type=int, metavar="N", help="texts of full length in one pass (default: some thousand tokens)")
    add("--seed", type=int, default=0, help="of every draw (default %(default)s)")
    add("--json", metavar="FILE", help="also write the figures here")
    add("--eval-dataset", choices=("gain", "stsb"), default="gain", help="what is evaluated (default %(default)s)")
    add("--sts-file", metavar="CSV", help="STS Benchmark file (sts-dev.csv), for --eval-dataset stsb")
    add("--device", help="default: cuda where there is one, else cpu")


def main(args: argparse.Namespace) -> int:
    """Runs `mmldlm evaluate`; returns the exit code (0 also where a claim does not hold: the report says so)."""
    for key, least in (("num_samples", 2), ("num_steps", 1), ("latent_steps", 1), ("num_draws", 1),
                       ("control_samples", 2), ("seed", 0), ("batch_size", 1)):  # fmt: skip
        value = getattr(args, key)
        if value is not None and value < least:
            raise UserError(f"--{key.replace('_', '-')} of at least {least}", str(value), "give a larger number")
    if args.eval_dataset == "stsb" and not args.sts_file:
        raise UserError(
            "--sts-file: an STS Benchmark file (sts-dev.csv or sts-test.csv)",
            "none given",
            "name the file; there is no built-in stand-in for it",
        )
    if args.eval_dataset == "gain" and not args.data:
        raise UserError("--data STORE, whose validation split is evaluated", "none given", "name the prepared store")
    if args.json:
        check_writable_file(args.json, "--json")

    from mmldlm.evaluation.conditioning_gain import Settings, evaluate
    from mmldlm.evaluation.metrics import sts_benchmark
    from mmldlm.observe.progress_meter import Meter
    from mmldlm.sampling.device import usable_device
    from mmldlm.sampling.pretrained import load_pretrained

    device = usable_device(args.device)
    pairs = sts_benchmark.read_pairs(args.sts_file) if args.eval_dataset == "stsb" else None
    store = None
    if pairs is None:
        from mmldlm.data.store.store import Store

        store = Store(args.data, "validation")
    pretrained = load_pretrained(args.checkpoint, device)
    with Meter() as begin:
        if pairs is not None:
            report = sts_benchmark.evaluate(
                pretrained,
                pairs,
                steps=args.latent_steps,
                guidance=args.guidance,
                seed=args.seed,
                say=begin,
                batch_size=args.batch_size,
            )
        else:
            names = Settings.__dataclass_fields__
            settings = Settings(**{key: value for key, value in vars(args).items() if key in names})
            report = evaluate(pretrained, store, settings, begin)
    report.show()
    if args.json:
        report.write(args.json)
        print(f"written to {args.json}")
    return EXIT_DONE
