"""`mmldlm hypotheses`: write and embed a model's texts for a store, which a corrector is trained on."""

from __future__ import annotations

import argparse

from mmldlm.commands.prepare import run_shared
from mmldlm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mmldlm hypotheses`."""
    add = parser.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="PATH",
        help="the model that writes: a run, checkpoint or converted folder",
    )
    add("--data", required=True, metavar="STORE", help="the prepared store that the corrector will be trained on")
    add("--output-dir", required=True, metavar="DIR", help="output folder; rerun the same command to resume")
    add("--num-samples", type=int, metavar="N", help="hypotheses of the training split (default: one for each sample)")
    add("--num-steps", type=int, default=8, help="most passes for a text that is written whole (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the draws (default %(default)s)")
    add("--device", help="default: cuda if available (under torchrun that of the rank), else cpu")
    add("--force", action="store_true", help="replace an existing folder when the new one is complete")


def main(args: argparse.Namespace) -> int:
    """Write hypotheses as one of the ranks of this launch (torchrun), or alone; return the exit code."""
    for key in ("num_samples", "num_steps"):
        if (value := getattr(args, key)) is not None and value < 1:
            raise UserError(f"--{key.replace('_', '-')} of at least 1", str(value), "choose a larger number")
    from mmldlm.sampling.hypotheses import HypothesisOptions, write_hypotheses

    options = HypothesisOptions(**{key: getattr(args, key) for key in HypothesisOptions.__dataclass_fields__})
    return run_shared(options.output_dir, lambda queue: write_hypotheses(options, queue))
