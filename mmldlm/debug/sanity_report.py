"""Tables and JSON report of `mmldlm sanity`."""

from __future__ import annotations

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mmldlm.debug.findings import FAIL, PASS
from mmldlm.debug.sanity_runner import SanityRunner
from mmldlm.observe.layer_stats import LayerStats
from mmldlm.utils.json_files import plain_value


def as_dict(sanity: SanityRunner) -> dict:
    """Return the report for --json; non-finite numbers are words."""
    rows = sanity.findings.rows()
    config, engine = sanity.config, sanity.engine
    report = {
        "ok": all(row.status == PASS for row in rows),
        "conditions": {
            "engine": engine.describe(),
            "device": str(engine.device),
            "dtype": config.training.dtype,
            "task": sanity.task.describe(config),
            "grad_clip_norm": config.optimizer.grad_clip_norm,
            "torch": torch.__version__,
        },
        "checks": [
            {"id": row.id, "what": row.title, "status": row.status, "reason": row.reason}
            for row in rows
        ],
        "groups": sanity.groups,
        "steps": sanity.steps,
        "layers": None if sanity.layer_stats is None else sanity.layer_stats.record()["layers"],
        "peak_memory_bytes": sanity.peak_bytes,
    }
    return plain_value(report)


def heading(sanity: SanityRunner) -> str:
    """Describe the run about to start: a large model on a CPU takes minutes per step."""
    config, engine = sanity.config, sanity.engine
    return (
        f"sanity   {engine.describe()}, {engine.device}, {config.training.dtype},"
        f" {sanity.task.describe(config)}; "
        + ", ".join(
            f"{group} {part:,} of {total:,}" for group, (part, total) in sanity.trainable.items()
        )
        + f" parameters trainable; batches of {config.training.train_batch_size}"
    )


def print_tables(sanity: SanityRunner, console: Console) -> None:
    """Print layer statistics, parameter groups and checks."""
    if sanity.layer_stats is not None:
        console.print(_layer_table(sanity.layer_stats))
    if sanity.groups:
        table = Table("group", "tensors", "elements", "LR", "weight decay", box=SIMPLE)
        for number, group in enumerate(sanity.groups):
            numbers = (f"{group['tensors']:,}", f"{group['elements']:,}", f"{group['lr']:.3g}")
            table.add_row(str(number), *numbers, f"{group['weight_decay']:g}")
        console.print(table)
    rows = sanity.findings.rows()
    width = max(len(row.title) for row in rows)
    for row in rows:
        color = {PASS: "green", FAIL: "red"}.get(row.status, "yellow")
        line = Text.assemble((f"{row.status:7}", color), f" {row.title:{width}}  {row.reason}")
        console.print(line, soft_wrap=True)
    failed = sum(row.status != PASS for row in rows)
    console.print(
        f"{len(rows)} checks, {failed} not passed" if failed else f"{len(rows)} checks passed"
    )


def _layer_table(stats: LayerStats) -> Table:
    columns = ("grad norm", "zero share", "non- finite", "update / weight", "output RMS")
    table = Table(Column("layer", no_wrap=True), *columns, title=f"step {stats.step}", box=SIMPLE)
    for name, tensor in stats.layers.items():
        values = tensor.record()
        cells = [
            values.get(key)
            for key in ("grad_norm", "zero_share", "nonfinite", "update_ratio", "activation_rms")
        ]
        table.add_row(name, *("-" if value is None else f"{value:.3g}" for value in cells))
    return table
