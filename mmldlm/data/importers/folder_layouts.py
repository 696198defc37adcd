"""Folders of one file a sample: which latent belongs to which text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmldlm.data.store.store import SPLITS
from mmldlm.errors import UserError

LAYOUTS = (
    "train_data.json; texts/train/*.txt and latents/train/*.npy; tokens/train/*.npz and latents/train/*.npy; or X.npy "
    "with X_tokens.npz"
)


@dataclass(frozen=True)
class SampleFiles:
    """Where one sample lies: its latent, and its text, a file of it, or a file of its tokens."""

    latent: Path
    text: str | None = None
    text_path: Path | None = None
    tokens_path: Path | None = None


def find_samples(source: Path, counts: Counter) -> dict[str, list[SampleFiles]]:
    """Split -> samples of a folder; files without a partner are counted.

    Raises:
        UserError: no known layout.
    """
    if not source.is_dir():
        raise UserError(f"a folder with {LAYOUTS}, at {source}", "no folder", "check the path")
    counts["files"] = sum(1 for path in source.rglob("*") if path.is_file())
    splits: dict[str, list[SampleFiles]] = {}
    for split in SPLITS:
        found = list(_from_json(source, split))
        if found:
            listed = {sample.latent.resolve() for sample in found}
            others = sum(path.resolve() not in listed for path in (source / "latents" / split).glob("*.npy"))
            counts["read"] += others
            counts["drop_not_in_json"] += others
        else:
            found = list(_from_folders(source, split, counts))
        if found:
            splits[split] = found
    if not splits:
        flat = list(_pairs(source, source, counts))
        if not flat:
            shown = ", ".join(sorted(path.name for path in source.iterdir())[:8]) or "nothing"
            raise UserError(f"a folder with {LAYOUTS}, at {source}", f"{shown}", "give the folder that has these")
        splits["train"] = flat
    if "train" not in splits:
        raise UserError(f"a train split in {source}", f"only {', '.join(splits)}", "check the folder's names")
    return splits


def _from_json(source: Path, split: str) -> Iterator[SampleFiles]:
    path = source / f"{split}_data.json"
    if not path.is_file():
        return
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        for record in records:
            text, text_path = record.get("text"), record.get("text_path")
            if not isinstance(text, str | None):
                raise TypeError(f"a text that is a {type(text).__name__}")
            yield SampleFiles(source / record["latent_path"], text, source / text_path if text_path else None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"a list of records with latent_path and text or text_path in {path}", repr(error), "repair the file"
        ) from None


def _from_folders(source: Path, split: str, counts: Counter) -> Iterator[SampleFiles]:
    latents = source / "latents" / split
    if latents.is_dir():
        for kind in ("texts", "tokens"):
            if (source / kind / split).is_dir():
                yield from _pairs(source / kind / split, latents, counts)
                return


def _pairs(folder: Path, latents: Path, counts: Counter) -> Iterator[SampleFiles]:
    """Pairs by name. A latent without a text, or a text without a latent, is a sample read and dropped."""
    texts: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".txt", ".npz"):
            texts[path.stem.removesuffix("_tokens")] = path
    vectors = {path.stem: path for path in sorted(latents.iterdir()) if path.suffix == ".npy"}
    for name in sorted(texts.keys() & vectors.keys()):
        path = texts[name]
        is_text = path.suffix == ".txt"
        yield SampleFiles(vectors[name], None, path if is_text else None, None if is_text else path)
    for reason, names in (("no_text", vectors.keys() - texts.keys()), ("no_latent", texts.keys() - vectors.keys())):
        counts["read"] += len(names)
        counts[f"drop_{reason}"] += len(names)
