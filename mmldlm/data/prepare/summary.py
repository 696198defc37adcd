"""The display of a preparation: progress over all ranks, and the table at the end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mmldlm.data.prepare.task_queue import TaskQueue
from mmldlm.data.unknown_tokens import describe_share
from mmldlm.data.verify import cut_warnings
from mmldlm.utils.formatting import join_some
from mmldlm.utils.progress import ProgressBar


class RankProgress:
    """Progress of one stage, counted over all ranks and displayed by rank 0.

    Attributes:
        total: number of items of the stage over all ranks.
    """

    def __init__(self, console: Console, queue: TaskQueue, label: str, unit: str, total: int = 0):
        self.total = total
        self._queue, self._key = queue, f"progress/{label}"
        self._bar = ProgressBar(label, unit, stream=console.file, enabled=not console.quiet)

    def __call__(self, num_done: int) -> None:
        """Add the number of items that this rank has done since the last call.

        Raises:
            RankFailed: another rank has failed.
        """
        if num_done:
            self._queue.check()
            self._bar(self._queue.add(self._key, num_done), self.total)

    def __enter__(self) -> RankProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def add_files_not_read(table: Table, corpus: dict[str, Any]) -> None:
    """Add a row for each reason for which files of a corpus were not read, with the names
    of some.
    """
    for reason, found in corpus.get("not_read", {}).items():
        table.add_row(
            f"  not read: {reason}", f"{found['number']:,}: {join_some(found['such_as'], limit=3)}"
        )


def print_summary(console: Console, root: Path, manifest: dict[str, Any], seconds: float) -> None:
    """Print the table that ends a preparation."""
    table = Table(title=f"store {root}", show_header=False)
    corpus, statistics = manifest["corpus"], manifest["latent_stats"]
    table.add_row("corpus", corpus["source"])
    table.add_row("texts read", f"{corpus['read']:,}")
    for reason, number in corpus["dropped"].items():
        table.add_row(f"  dropped: {reason.replace('_', ' ')}", f"{number:,}")
    add_files_not_read(table, corpus)
    table.add_row("kept", f"{corpus['kept']:,}")
    if corpus.get("truncated"):
        table.add_row("  truncated", f"{corpus['truncated']:,}")
    if corpus.get("chunked"):
        table.add_row("  pieces", f"{corpus['chunks']:,} of {corpus['chunked']:,} longer texts")
    for name, split in manifest["splits"].items():
        lengths = (
            f"mean {split['num_tokens'] / split['num_samples']:.1f}, max {split['max_tokens']}"
        )
        table.add_row(
            name, f"{split['num_samples']:,} samples, {split['num_tokens']:,} tokens ({lengths})"
        )
        if "num_unknown" in split:
            table.add_row("  [UNK]", describe_share(split["num_unknown"], split["num_tokens"]))
        if split.get("num_cut_by_encoder"):
            table.add_row("  cut by the encoder", f"{split['num_cut_by_encoder']:,} texts")
    table.add_row(
        "tokenizer",
        f"{manifest['tokenizer']['key']}, {manifest['tokenizer']['vocab_size']:,} tokens",
    )
    norm = statistics["norm"]
    encoder = manifest["encoder"]
    table.add_row(
        "latents", f"{encoder['name']} ({encoder['source']}), {manifest['latent_dim']} dimensions"
    )
    if "latents_per_text" in manifest:
        table.add_row("  per text", f"{manifest['latents_per_text']}")
    table.add_row("  norm", f"{norm['mean']:.4f} ({norm['min']:.4f} to {norm['max']:.4f})")
    table.add_row(
        "  effective rank", f"{statistics['effective_rank']:.1f} of {manifest['latent_dim']}"
    )
    if manifest["files"]:
        table.add_row(
            "size",
            f"{sum(entry['bytes'] for entry in manifest['files'].values()) / 2**20:.1f} MiB",
        )
    table.add_row("time", f"{seconds:.0f} s")
    console.print(table)
    for warning in cut_warnings(manifest):
        console.print(f"warning: {warning}", soft_wrap=True)
    if manifest["files"]:
        key = shlex.quote(f"data.latent_data_root={root}")
        console.print(f"next: mmldlm config --config-name quickstart {key}", soft_wrap=True)
    else:
        console.print(
            f"next: mmldlm pack {shlex.quote(str(root))} --output-dir STORE", soft_wrap=True
        )
