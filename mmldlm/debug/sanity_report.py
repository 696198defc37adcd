"""`mmldlm sanity`: does a run of this config compute what it should? A table of PASS and FAIL from a few real steps."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from mmldlm.config.schema import Config
from mmldlm.data.batching.run_data import open_data
from mmldlm.debug.sanity_checks import FAIL, PASS
from mmldlm.debug.sanity_runner import OVERFIT_STEPS, SanityRunner
from mmldlm.engines.build import check_engine
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, UserError
from mmldlm.observe.layer_stats import LayerStats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside those of `train` (LMOL's names)."""
    option = parser.add_argument
    option("--max_steps", "--max-steps", type=_positive, default=3, help="steps on the run's own batches (default 3)")
    option("--overfit_steps", "--overfit-steps", type=_positive, default=OVERFIT_STEPS,
           help=f"steps on one batch, whose loss must fall (default {OVERFIT_STEPS})")  # fmt: skip
    option("--amp_dtype", "--amp-dtype", choices=("bf16", "fp32", "fp16"), help="training.dtype")
    option("--grad_log_interval", "--grad-log-interval", type=int, default=1,
           help="steps between two looks at gradients and activations, 0 for none (default 1)")  # fmt: skip
    option("--detect_anomaly", "--detect-anomaly", type=_word_to_bool, default=False, metavar="true|false",
           help="torch's anomaly detection: slow, names the operation behind a NaN (default false)")  # fmt: skip
    option("--clip_grad_norm", "--clip-grad-norm", type=float, help="optimizer.grad_clip_norm")
    option("--json", metavar="FILE", help="also write the findings as JSON")


def _positive(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{word} is not 1 or more")
    return value


def _word_to_bool(word: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if word.lower() not in values:
        raise argparse.ArgumentTypeError(f"{word} is neither true nor false")
    return values[word.lower()]


def main(args: argparse.Namespace, parse_config: Callable[[argparse.Namespace], Config]) -> int:
    """Run, print the tables; returns 0 when every check passed, else 1.

    Raises:
        UserError: a config that cannot be run, or more than one process.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) != 1:
        raise UserError("one process", f"WORLD_SIZE={os.environ['WORLD_SIZE']}", "run `mmldlm sanity` by itself")
    words = {"training.dtype": args.amp_dtype, "optimizer.grad_clip_norm": args.clip_grad_norm}
    args.overrides = [*args.overrides, *(f"{key}={value}" for key, value in words.items() if value is not None)]
    config = parse_config(args)
    check_engine(config, 1)
    console = Console()
    console.print(f"reading  {', '.join(config.data.roots)}", highlight=False, soft_wrap=True)
    sanity = SanityRunner(open_data(config), args.grad_log_interval, args.detect_anomaly)
    sanity.say = lambda text: console.print(text, highlight=False, soft_wrap=True)
    sanity.say(_heading(sanity))
    sanity.run(args.max_steps, args.overfit_steps)
    show(sanity, console)
    report = as_dict(sanity)
    if args.json:
        Path(args.json).write_text(json.dumps(to_strict(report), indent=2, allow_nan=False) + "\n")
    return EXIT_DONE if report["ok"] else EXIT_FAILED


def as_dict(sanity: SanityRunner) -> dict:
    """What --json holds, non-finite numbers still in it."""
    rows = sanity.findings.rows()
    config, engine = sanity.config, sanity.engine
    return {
        "ok": all(row.status == PASS for row in rows),
        "conditions": {
            "engine": engine.describe(),
            "device": str(engine.device),
            "dtype": config.training.dtype,
            "task": sanity.task.describe(config),
            "grad_clip_norm": config.optimizer.grad_clip_norm,
            "torch": torch.__version__,
        },
        "checks": [vars(row) for row in rows],
        "groups": sanity.groups,
        "steps": sanity.steps,
        "layers": None if sanity.look is None else sanity.look.record()["layers"],
        "peak_memory_bytes": sanity.peak_bytes,
    }


def _heading(sanity: SanityRunner) -> str:
    """What is about to be tried: a large model on a CPU takes minutes a step."""
    config, engine = sanity.config, sanity.engine
    return (
        f"sanity   {engine.describe()}, {engine.device}, {config.training.dtype}, {sanity.task.describe(config)}; "
        + ", ".join(f"{group} {part:,} of {total:,}" for group, (part, total) in sanity.trainable.items())
        + f" parameters trainable; batches of {config.training.train_batch_size}"
    )


def show(sanity: SanityRunner, console: Console) -> None:
    """The tables."""
    if sanity.look is not None:
        console.print(_layer_table(sanity.look))
    if sanity.groups:
        table = Table("group", "tensors", "elements", "LR", "weight decay", box=SIMPLE)
        for number, group in enumerate(sanity.groups):
            numbers = (f"{group['tensors']:,}", f"{group['elements']:,}", f"{group['lr']:.3g}")
            table.add_row(str(number), *numbers, f"{group['weight_decay']:g}")
        console.print(table)
    rows = sanity.findings.rows()
    width = max(len(row.what) for row in rows)
    for row in rows:
        colour = {PASS: "green", FAIL: "red"}.get(row.status, "yellow")
        console.print(f"[{colour}]{row.status:7}[/] {row.what:{width}}  ", end="", highlight=False)
        console.print(row.reason, highlight=False, markup=False, soft_wrap=True)
    failed = sum(row.status != PASS for row in rows)
    console.print(
        f"{len(rows)} checks, {failed} not passed" if failed else f"{len(rows)} checks passed", highlight=False
    )


def _layer_table(look: LayerStats) -> Table:
    columns = ("grad norm", "zero share", "non- finite", "update / weight", "output RMS")
    table = Table(Column("layer", no_wrap=True), *columns, title=f"step {look.step}", box=SIMPLE)
    for name, figures in look.layers.items():
        values = figures.record()
        cells = [values.get(key) for key in ("grad_norm", "zero_share", "nonfinite", "update_ratio", "activation_rms")]
        table.add_row(name, *("-" if value is None else f"{value:.3g}" for value in cells))
    return table


def to_strict(value):
    """A copy that strict JSON can hold: non-finite numbers become the words nan, inf and -inf."""
    if isinstance(value, dict):
        return {key: to_strict(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_strict(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
