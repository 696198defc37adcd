"""The command line: one file per verb, with all of its argument parsing."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from mmldlm.utils import option_types


class FormerOption(argparse.Action):
    """An option that is gone: an error that says what became of it. Not listed in --help.

    Args:
        became: What is said behind the option.
    """

    def __init__(self, option_strings: list[str], dest: str, became: str, **options: Any):
        options |= {"nargs": "?", "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        super().__init__(option_strings, dest, **options)
        self.became = became

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"{option_string} {self.became}")


def add_removed(parser: argparse.ArgumentParser, options: Iterable[str], page: str) -> None:
    """Add options that are gone, whose error names the page with their measurements."""
    for option in options:
        became = f"was removed: {page} has what was measured with it"
        parser.add_argument(option, action=FormerOption, became=became)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add --checkpoint and --revision, of which `inference.load.load_pretrained` makes a model."""
    parser.add_argument(
        "--checkpoint",
        type=option_types.path,
        required=True,
        metavar="PATH",
        help="a run, RUN/latest, a checkpoint, a model.pt, or a folder written by"
        " `mmldlm convert`, here or on the Hugging Face hub (OWNER/NAME)",
    )
    parser.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a model on the hub (default main)",
    )


def add_encoder_dir(parser: argparse.ArgumentParser) -> None:
    """Add --encoder-dir, whose folder `data.encoders.model_files.encoder_dir` takes."""
    parser.add_argument(
        "--encoder-dir",
        type=option_types.path,
        metavar="DIR",
        help="folder of the own encoder of the model's latents, or the folder that holds it",
    )
