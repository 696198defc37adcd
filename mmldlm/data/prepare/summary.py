"""The display of a preparation: progress over all ranks, and the table at the end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mmldlm.data.corpora.image_lists import GLYPHS
from mmldlm.data.encoders.specs import ENCODERS, UNKNOWN_ENCODER
from mmldlm.data.prepare.task_queue import TaskQueue
from mmldlm.data.unknown_tokens import describe_share
from mmldlm.data.verify import cut_warnings
from mmldlm.utils.formatting import closing_lines, count_noun, for_screen, join_some
from mmldlm.utils.progress import ProgressBar

_WITHOUT_ENCODER = (
    "The encoder of these latents is unknown. A model trained on them is given embeddings"
    " (`mmldlm sample l2t --latent-file FILE`), not texts to embed (`--text`, `--search` and STS),"
    " and the texts that it writes are not embedded again (`mmldlm evaluate`). If it is one of"
    f" {', '.join(ENCODERS)}: pack again with --encoder NAME."
)


class RankProgress:
    """Progress of one stage, counted over all ranks and displayed by rank 0.

    Attributes:
        total: Number of items of the stage over all ranks.
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


def print_summary(console: Console, root: Path, manifest: dict[str, Any], seconds: float) -> None:
    """Print the table that ends a preparation, and what to do next."""
    of_images = manifest.get("kind") == "image"
    table = Table(title=f"store {root}", show_header=False)
    items = "images" if of_images else "texts"
    _add_corpus(table, "corpus", manifest["corpus"], items)
    if "validation_corpus" in manifest:
        _add_corpus(table, "validation corpus", manifest["validation_corpus"], items)
    for name, split in manifest["splits"].items():
        _add_split(table, name, split, of_images)
    tokenizer = manifest["tokenizer"]
    table.add_row("tokenizer", f"{tokenizer['key']}, {tokenizer['vocab_size']:,} tokens")
    if of_images:
        _add_image_latents(table, manifest)
    else:
        _add_text_latents(table, manifest)
    if manifest["files"]:
        num_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
        table.add_row("size", f"{num_bytes / 2**20:.1f} MiB")
    table.add_row("time", f"{seconds:.0f} s")
    console.print(table)
    for warning in () if of_images else cut_warnings(manifest):
        console.print(for_screen(f"warning: {warning}", console.file), soft_wrap=True)
    if manifest["encoder"]["name"] == UNKNOWN_ENCODER:
        console.print(for_screen(_WITHOUT_ENCODER, console.file), soft_wrap=True)
    folder = shlex.quote(str(root))
    if of_images:
        console.print(f"look: mmldlm verify-data {folder} --sheet FILE.png", soft_wrap=True)
    num_samples = sum(split["num_samples"] for split in manifest["splits"].values())
    result = f"{count_noun(num_samples, 'image' if of_images else 'sample')} in {root}"
    words = training_command(root, manifest)
    if not manifest["files"]:
        words = ["mmldlm", "pack", str(root), "--output-dir", "STORE"]
    for line in closing_lines(result, *words):
        console.print(line, soft_wrap=True)


def training_command(root: str | Path, manifest: dict[str, Any]) -> list[str]:
    """Return the words of the command that trains on a store with the preset for its kind."""
    of_images = manifest.get("kind") == "image"
    preset = _preset_for(manifest["image"]) if of_images else "quickstart"
    return ["mmldlm", "train", "--config-name", preset, f"data.latent_data_root={root}"]


def _add_corpus(table: Table, label: str, corpus: dict[str, Any], items: str) -> None:
    """Add what was read, what became of it, and what was not read."""
    table.add_row(label, corpus["source"])
    table.add_row(f"{items} read", f"{corpus['read']:,}")
    for reason, count in corpus["dropped"].items():
        table.add_row(f"  dropped: {reason.replace('_', ' ')}", f"{count:,}")
    if "unreadable_images" in corpus:
        table.add_row("  such as", join_some(corpus["unreadable_images"], limit=3, separator="\n"))
    for reason, left_out in corpus.get("not_read", {}).items():
        names = join_some(left_out["such_as"], limit=3)
        table.add_row(f"  not read: {reason}", f"{left_out['number']:,}: {names}")
    table.add_row("kept", f"{corpus['kept']:,}")
    if corpus.get("truncated"):
        label = "  captions cut" if items == "images" else "  truncated"
        table.add_row(label, f"{corpus['truncated']:,}")
    if corpus.get("chunked"):
        table.add_row("  pieces", f"{corpus['chunks']:,} of {corpus['chunked']:,} longer texts")


def _add_split(table: Table, name: str, split: dict[str, int], of_images: bool) -> None:
    lengths = f"mean {split['num_tokens'] / split['num_samples']:.1f}, max {split['max_tokens']}"
    items = "images, captions of" if of_images else "samples,"
    table.add_row(
        name, f"{split['num_samples']:,} {items} {split['num_tokens']:,} tokens ({lengths})"
    )
    if "num_unknown" in split:
        table.add_row("  [UNK]", describe_share(split["num_unknown"], split["num_tokens"]))
    if split.get("num_cut_by_encoder"):
        table.add_row("  cut by the encoder", f"{split['num_cut_by_encoder']:,} texts")


def _add_text_latents(table: Table, manifest: dict[str, Any]) -> None:
    encoder, statistics = manifest["encoder"], manifest["latent_stats"]
    dim = manifest["latent_dim"]
    table.add_row("latents", f"{encoder['name']} ({encoder['source']}), {dim} dimensions")
    if "latents_per_text" in manifest:
        table.add_row("  per text", f"{manifest['latents_per_text']}")
    norm = statistics["norm"]
    table.add_row("  norm", f"{norm['mean']:.4f} ({norm['min']:.4f} to {norm['max']:.4f})")
    table.add_row("  effective rank", f"{statistics['effective_rank']:.1f} of {dim}")


def _add_image_latents(table: Table, manifest: dict[str, Any]) -> None:
    image, size = manifest["image"], manifest["image"]["size"]
    color = "gray" if image["channels"] == 1 else "RGB"
    table.add_row("images", f"{size} x {size} {color}, {manifest['encoder']['name']}")
    values = (
        f"ids of {image['codes']:,} codes" if "codes" in image else f"of {manifest['latent_dim']}"
    )
    count = manifest.get("latents_per_text", 1)
    table.add_row("latents", f"{count} {values} (patch {image['patch']})")
    for name, statistics in image.get("codebook_statistics", {}).items():
        psnr = statistics["psnr"]
        sharpness = "exact" if psnr is None else f"PSNR {psnr:.1f} dB"
        use = (
            f"{statistics['used_codes']:,} codes in use,"
            f" {statistics['entropy_bits']:.2f} bits each without context"
        )
        table.add_row(f"  codebook, {name}", f"{sharpness}; {use}")


def _preset_for(image: dict[str, Any]) -> str:
    """Return the preset that trains on a store with this `image` entry of its manifest."""
    if "codes" in image:
        return "image_text_discrete"
    if image["latents"] == "vae":
        return "image_text_vae_512"
    if image["source"].startswith(f"{GLYPHS}:"):
        return "image_text_quick"
    return (
        "image_text_256"
        if image["latents"] == "pixels" and image["size"] >= 256
        else "image_text_continuous"
    )
