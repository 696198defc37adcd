"""`mmldlm hypotheses`: write and embed a model's texts for a store, which a corrector is trained
on.
"""

from __future__ import annotations

import argparse

from mmldlm.commands import add_encoder_dir
from mmldlm.commands.prepare import run_shared
from mmldlm.data.encoders.model_files import encoder_dir
from mmldlm.utils import option_types


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mmldlm hypotheses`."""
    add = parser.add_argument
    add(
        "--checkpoint",
        type=option_types.path,
        required=True,
        metavar="PATH",
        help="the model that writes: a run, checkpoint or converted folder",
    )
    add("--data", type=option_types.path, required=True, metavar="STORE",
        help="the prepared store that the corrector will be trained on")  # fmt: skip
    add("--output-dir", type=option_types.path, required=True, metavar="DIR",
        help="output folder; rerun the same command to resume")  # fmt: skip
    add("--num-samples", type=option_types.count, metavar="N",
        help="hypotheses of the training split (default: one for each sample)")  # fmt: skip
    add("--num-steps", type=option_types.count, default=8,
        help="most passes for a text that is written whole (default %(default)s)")  # fmt: skip
    add(
        "--seed", type=option_types.seed, default=0, help="seed of the draws (default %(default)s)"
    )
    add("--device", help="default: cuda if available (under torchrun that of the rank), else cpu")
    add_encoder_dir(parser)
    add(
        "--force",
        action="store_true",
        help="replace an existing folder when the new one is complete",
    )


def main(args: argparse.Namespace) -> int:
    """Write hypotheses as one of the ranks of this launch (torchrun), or alone; return the exit
    code.
    """
    from mmldlm.tasks.corrector.write_hypotheses import HypothesisOptions, write_hypotheses

    options = HypothesisOptions(
        **{key: getattr(args, key) for key in HypothesisOptions.__dataclass_fields__}
    )
    with encoder_dir(args.encoder_dir):
        return run_shared(options.output_dir, lambda queue: write_hypotheses(options, queue))
