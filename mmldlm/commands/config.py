"""`mmldlm config`: print the resolved config, the batch arithmetic and the parameter counts."""

from __future__ import annotations

import argparse
import json
import sys

from mmldlm.commands import config_options
from mmldlm.config.load import all_keys, allowed_words, to_yaml
from mmldlm.config.schema import Config
from mmldlm.engines.deepspeed_config import offloaded, resolve_stage
from mmldlm.errors import EXIT_DONE
from mmldlm.preflight import memory_model
from mmldlm.tasks.registry import find_task, open_run_data
from mmldlm.training.run_check import check_run
from mmldlm.utils import option_types
from mmldlm.utils.formatting import for_screen, format_bytes
from mmldlm.utils.paths import check_writable_dir

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_FILE = "mmldlm.schema.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm config` to those of `train`."""
    config_options.add_arguments(parser)
    parser.add_argument(
        "--keys",
        action="store_true",
        help="list every key with its default, its allowed values and its meaning",
    )
    parser.add_argument(
        "--schema",
        action="store_true",
        help="print the JSON schema of the task's config, by which editors check and complete it",
    )
    parser.add_argument(
        "--world-size",
        type=option_types.count,
        default=1,
        help="number of ranks, for the batch arithmetic and the memory",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="print nothing; check what `train` checks before starting its ranks",
    )


def main(args: argparse.Namespace) -> int:
    """Print the config; if it names data, also check it against the data."""
    config = config_options.parse_config(args)
    if args.check:
        check_run(config, args.world_size)
        check_writable_dir(config.run_dir(), "logging.save_dir and logging.run_name")
        return EXIT_DONE
    if args.keys:
        _print_keys(type(config))
        return EXIT_DONE
    if args.schema:
        print(json.dumps({"$schema": DIALECT, **type(config).model_json_schema()}, indent=2))
        return EXIT_DONE
    task = find_task(config.task)
    longest = getattr(getattr(config, "model", None), "max_seq_len", None)
    if task.names_data(config):
        data = open_run_data(config)
        config = data.config
        longest = int(max(data.train_lengths.max(), data.validation_lengths.max()))
    print(f"# yaml-language-server: $schema={SCHEMA_FILE}")
    print(f"# (`mmldlm config --schema task={config.task} > {SCHEMA_FILE}` makes it)")
    print(to_yaml(config), end="")
    training = config.training
    per_step = training.train_batch_size * training.grad_accum_steps * args.world_size
    print(
        f"\n# global batch {per_step} = {training.train_batch_size} per rank x"
        f" {training.grad_accum_steps} accumulated x {args.world_size} rank(s)"
    )
    counts = task.parameter_counts(config)
    if counts is None:
        missing = f"task={config.task} has no model_sizes, which docs/tasks.md describes"
        if not task.names_data(config):
            missing = "name the data (or set what it determines, such as model.vocab_size)"
        print(f"# parameters: not counted; {missing}")
        return EXIT_DONE
    print(f"# parameters {sum(counts.values()):,}")
    for group, count in counts.items():
        print(f"#   {group:7s}{count:>15,}")
    if longest is not None and (sizes := task.model_sizes(config, longest)) is not None:
        _print_memory(config, dict(sizes), longest, args.world_size)
    return EXIT_DONE


def _print_memory(config: Config, sizes: dict, length: int, world_size: int) -> None:
    """Print what a rank and a checkpoint need, as preflight's MEM001 and DISK001 calculate it."""
    sizes, own = memory_model.sizes_of_run(sizes, config), memory_model.plan_of(config)
    print(
        f"# memory of a GPU rank, micro-batch {config.training.train_batch_size} of {length:,}"
        f" positions, {world_size:,} rank(s):"
    )
    for plan in memory_model.PLANS[1:] if world_size > 1 else (own,):
        offload: tuple[str, ...] = ()
        if plan == own and config.engine.kind == "deepspeed":
            offload = tuple(offloaded(resolve_stage(config), config.engine.deepspeed_config))
        needed = memory_model.rank_bytes(config, sizes, world_size, plan, True, offload)
        note = "  (this config)" if plan == own else ""
        print(f"#   {plan:7s}{format_bytes(needed):>15}{note}")
    each = memory_model.checkpoint_bytes(own, sizes, config.training.dtype)
    print(f"# a checkpoint {format_bytes(each)}")


def _print_keys(config_class: type[Config]) -> None:
    for key, default, text in all_keys(config_class):
        values = allowed_words(key, config_class)
        choice = f"  ({' | '.join(values)})" if values else ""
        description = f"{key} = {default}{choice}\n    {' '.join(text.split())}"
        print(for_screen(description, sys.stdout, "  "))
