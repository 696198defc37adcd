"""Find the samples in folders of one file per sample, and match latents with texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmldlm.data.arrays import read_array
from mmldlm.data.manifest import MANIFEST
from mmldlm.data.store import SPLITS, TOKENIZER_FOLDER
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import LeftOut, is_of_macos, read_text, walk_files

_OWN_FILES = (MANIFEST, *(f"{split}_data.json" for split in SPLITS))
LAYOUTS = (
    "train_data.json; texts/train/*.txt and latents/train/*.npy; tokens/train/*.npz and"
    " latents/train/*.npy; or X.npy with X_tokens.npz"
)


@dataclass(frozen=True)
class SampleFiles:
    """The files of one sample: its latent, and its text, text file or token file."""

    latent: Path
    text: str | None = None
    text_path: Path | None = None
    tokens_path: Path | None = None

    def read_latent(self) -> np.ndarray:
        """Return what the file of the latent holds.

        Raises:
            ValueError, OSError: as of `read_array`.
        """
        return read_array(self.latent)


def find_samples(source: Path, counts: Counter, left_out: LeftOut) -> dict[str, list[SampleFiles]]:
    """Return split -> samples of a folder, and count files without a partner.

    Args:
        left_out: Receiver of the files that are part of no sample, such as those of other folders.

    Raises:
        UserError: an unknown layout.
    """
    if not source.is_dir():
        raise UserError(f"a folder with {LAYOUTS}, at {source}", "not a folder", "check the path")
    files = walk_files(source, left_out)
    counts["files"] = len(files)
    unpaired: set[Path] = set()
    splits: dict[str, list[SampleFiles]] = {}
    for split in SPLITS:
        in_split = _from_json(source, split, counts, unpaired)
        in_split = in_split or list(_from_folders(source, split, counts, unpaired))
        if in_split:
            splits[split] = in_split
    if not splits:
        flat = list(_pairs(source, source, counts, unpaired))
        if not flat:
            names = join_some(sorted(path.name for path in source.iterdir()), limit=8)
            raise UserError(
                f"a folder with {LAYOUTS}, at {source}",
                names or "nothing",
                "give the folder that has these",
            )
        splits["train"] = flat
    if "train" not in splits:
        raise UserError(
            f"a train split in {source}", f"only {', '.join(splits)}", "check the folder's names"
        )
    used: set[Path | None] = {*unpaired, *(source / name for name in _OWN_FILES)}
    for sample in (sample for part in splits.values() for sample in part):
        used |= {sample.latent, sample.text_path, sample.tokens_path}
    for path in files:
        if path not in used and path.relative_to(source).parts[0] != TOKENIZER_FOLDER:
            left_out.add("files of no sample", path.relative_to(source))
    return splits


def _from_json(
    source: Path, split: str, counts: Counter, unpaired: set[Path]
) -> list[SampleFiles]:
    """Return the samples that a list names; count latents beside them that it does not name."""
    path = source / f"{split}_data.json"
    if not path.is_file():
        return []
    samples = []
    try:
        for record in json.loads(read_text(path, 1 << 34, encoding="utf-8-sig")):
            text, text_path = record.get("text"), record.get("text_path")
            if not isinstance(text, str | None):
                raise TypeError(f"a text that is a {type(text).__name__}")
            if text is None and not text_path:
                raise KeyError("text or text_path")
            text_path = source / text_path if text_path else None
            samples.append(SampleFiles(source / record["latent_path"], text, text_path))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"a list of records with latent_path and text or text_path in {path}",
            repr(error),
            "repair the file",
        ) from None
    listed = {sample.latent.resolve() for sample in samples}
    latents = (source / "latents" / split).glob("*.npy") if samples else ()
    others = [
        path for path in latents if path.resolve() not in listed and not is_of_macos(path.name)
    ]
    counts["read"] += len(others)
    counts["drop_not_in_json"] += len(others)
    unpaired.update(others)
    return samples


def _from_folders(
    source: Path, split: str, counts: Counter, unpaired: set[Path]
) -> Iterator[SampleFiles]:
    latents = source / "latents" / split
    if latents.is_dir():
        for kind in ("texts", "tokens"):
            if (source / kind / split).is_dir():
                yield from _pairs(source / kind / split, latents, counts, unpaired)
                return


def _pairs(
    folder: Path, latents: Path, counts: Counter, unpaired: set[Path]
) -> Iterator[SampleFiles]:
    """Yield pairs of equal names; count latents without text and texts without latent as dropped
    samples.
    """
    texts = _by_name(folder, (".npz", ".txt"), counts, unpaired)
    vectors = _by_name(latents, (".npy",), counts, unpaired)
    for name in sorted(texts.keys() & vectors.keys()):
        path = texts[name]
        is_text = path.suffix.lower() == ".txt"
        yield SampleFiles(
            vectors[name], None, path if is_text else None, None if is_text else path
        )
    for reason, files, others in (("no_text", vectors, texts), ("no_latent", texts, vectors)):
        alone = [path for name, path in files.items() if name not in others]
        counts["read"] += len(alone)
        counts[f"drop_{reason}"] += len(alone)
        unpaired.update(alone)


def _by_name(
    folder: Path, suffixes: tuple[str, ...], counts: Counter, unpaired: set[Path]
) -> dict[str, Path]:
    """Return the files of a folder by the name of their sample; of several with one name the first
    suffix counts.
    """
    paths = [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in suffixes and not is_of_macos(path.name)
    ]
    by_name: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: (suffixes.index(path.suffix.lower()), path)):
        if by_name.setdefault(path.stem.removesuffix("_tokens"), path) != path:
            counts["read"] += 1
            counts["drop_second_of_its_name"] += 1
            unpaired.add(path)
    return by_name
