"""The options of every command that takes a run's config."""

from __future__ import annotations

import argparse

from mmldlm.config.load import preset_names
from mmldlm.config.schema import Config
from mmldlm.tasks.registry import load_config
from mmldlm.utils import option_types


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options shared by every way to start a run."""
    parser.add_argument(
        "--config-name", metavar="NAME", help=f"preset: {', '.join(preset_names())}"
    )
    parser.add_argument(
        "--config", type=option_types.path, metavar="FILE", help="YAML file, read over the preset"
    )
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        type=option_types.path,
        metavar="JSON",
        help="DeepSpeed settings (`mmldlm init DIR` lays out some in DIR/ds_configs)",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="set single keys"
    )


def parse_config(args: argparse.Namespace) -> Config:
    """Return preset, file and overrides of a command line as one Config.

    Raises:
        UserError: see load_config.
    """
    overrides = list(args.overrides)
    if args.deepspeed_config:
        overrides.append(f"engine.deepspeed_config={args.deepspeed_config}")
    return load_config(args.config_name, args.config, overrides)
