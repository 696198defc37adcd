"""Find the samples in folders of one file per sample, and match latents with texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmldlm.data.store.store import SPLITS
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import read_text

LAYOUTS = (
    "train_data.json; texts/train/*.txt and latents/train/*.npy; tokens/train/*.npz and latents/train/*.npy; or X.npy "
    "with X_tokens.npz"
)


@dataclass(frozen=True)
class SampleFiles:
    """The files of one sample: its latent, and its text, text file or token file."""

    latent: Path
    text: str | None = None
    text_path: Path | None = None
    tokens_path: Path | None = None


def find_samples(source: Path, counts: Counter) -> dict[str, list[SampleFiles]]:
    """Return split -> samples of a folder, and count files without a partner.

    Raises:
        UserError: an unknown layout.
    """
    if not source.is_dir():
        raise UserError(f"a folder with {LAYOUTS}, at {source}", "not a folder", "check the path")
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
            found = join_some(sorted(path.name for path in source.iterdir()), limit=8) or "nothing"
            raise UserError(f"a folder with {LAYOUTS}, at {source}", found, "give the folder that has these")
        splits["train"] = flat
    if "train" not in splits:
        raise UserError(f"a train split in {source}", f"only {', '.join(splits)}", "check the folder's names")
    return splits


def _from_json(source: Path, split: str) -> Iterator[SampleFiles]:
    path = source / f"{split}_data.json"
    if not path.is_file():
        return
    try:
        records = json.loads(read_text(path, 1 << 34))
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
    """Yield pairs of equal names; count latents without text and texts without latent as dropped samples."""
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
