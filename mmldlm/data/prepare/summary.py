"""What preparation shows: progress over all ranks, and a table of what was made."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mmldlm.data.prepare.task_queue import TaskQueue


class ProgressBar:
    """A bar with rate and ETA on a terminal; elsewhere a plain line every ten seconds. Counts over all ranks.

    Args:
        what: names the stage, once. unit: what is counted. total: how many there are.
    """

    def __init__(self, console: Console, peers: TaskQueue, what: str, unit: str, total: int = 0):
        self._console, self._peers, self._what, self._unit, self.total = console, peers, what, unit, total
        self._started = self._printed = time.perf_counter()
        self._bar = None

    def __enter__(self):
        if self._console.is_terminal and not self._console.quiet:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.0f} {task.fields[unit]}/s"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(self._what, total=self.total, rate=0.0, unit=self._unit)
            self._bar.start()
        return self

    def __call__(self, num_done: int) -> None:
        """Count what this rank has done; leave with the others where one of them has failed."""
        if not num_done:
            return
        self._peers.check()
        done = self._peers.add(f"progress/{self._what}", num_done)
        now = time.perf_counter()
        rate = done / max(now - self._started, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self.total, rate=rate)
        elif now - self._printed >= 10:
            self._printed = now
            left = max(self.total - done, 0) / rate
            self._console.print(
                f"{self._what}: {done:,} of {self.total:,}, {rate:.0f} {self._unit}/s, {left:.0f} s left"
            )

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.stop()


def print_summary(console: Console, root: Path, manifest: dict[str, Any], seconds: float) -> None:
    """The table that ends a preparation."""
    table = Table(title=f"store {root}", show_header=False)
    corpus, statistics = manifest["corpus"], manifest["latent_stats"]
    table.add_row("corpus", corpus["source"])
    table.add_row("texts read", f"{corpus['read']:,}")
    for reason, number in corpus["dropped"].items():
        table.add_row(f"  dropped: {reason.replace('_', ' ')}", f"{number:,}")
    table.add_row("kept", f"{corpus['kept']:,}")
    if corpus.get("truncated"):
        table.add_row("  of them truncated", f"{corpus['truncated']:,}")
    if corpus.get("chunked"):
        table.add_row("  of them pieces", f"{corpus['chunks']:,} of {corpus['chunked']:,} longer texts")
    for name, split in manifest["splits"].items():
        lengths = f"mean {split['num_tokens'] / split['num_samples']:.1f}, max {split['max_tokens']}"
        table.add_row(name, f"{split['num_samples']:,} samples, {split['num_tokens']:,} tokens ({lengths})")
    table.add_row("tokenizer", f"{manifest['tokenizer']['key']}, {manifest['tokenizer']['vocab_size']:,} tokens")
    norm = statistics["norm"]
    encoder = manifest["encoder"]
    table.add_row("latents", f"{encoder['name']} ({encoder['source']}), {manifest['latent_dim']} dimensions")
    if "latents_per_text" in manifest:
        table.add_row("  of each text", f"{manifest['latents_per_text']}")
    table.add_row("  norm", f"{norm['mean']:.4f} ({norm['min']:.4f} to {norm['max']:.4f})")
    table.add_row("  effective rank", f"{statistics['effective_rank']:.1f} of {manifest['latent_dim']}")
    if manifest["files"]:
        table.add_row("size", f"{sum(entry['bytes'] for entry in manifest['files'].values()) / 2**20:.1f} MiB")
    table.add_row("time", f"{seconds:.0f} s")
    console.print(table)
    if manifest["files"]:
        console.print(f"next: mmldlm config --config-name quickstart data.latent_data_root={root}", soft_wrap=True)
    else:
        console.print(f"next: mmldlm pack {root} --output-dir STORE", soft_wrap=True)
