"""Samples whose texts are the records of one file, and whose latents are the rows of another, or
of the same parquet file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmldlm.data.arrays import map_array, read_npz_array
from mmldlm.data.corpora.tables import read_vectors
from mmldlm.data.corpora.text_corpus import check_text_field, open_corpus
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error

_FORMS = "a .npy or .npz file [N, D], or a parquet file with a column of lists"


@dataclass(frozen=True)
class LatentRow:
    """One sample: a text, and its latents in row `row` of all latents."""

    text: str
    row: int
    latents: Sequence[np.ndarray | None] | np.ndarray

    def read_latent(self) -> np.ndarray:
        """Return the latents [D] or [K, D].

        Raises:
            ValueError: the file has none in this row.
        """
        values = self.latents[self.row]
        if values is None:
            raise ValueError("no latent")
        return values


def find_rows(
    source: Path,
    latents_path: Path,
    text_field: str | None,
    latents_field: str | None,
    counts: Counter,
) -> tuple[list[LatentRow], int]:
    """Return the samples of a file of texts and a file of latents, and the latents per text; count
    texts that are none.

    Args:
        text_field: Field or column of the texts (default: `text`).
        latents_field: Array of a .npz or column of a parquet file (default: the only one).

    Raises:
        UserError: a file is not readable or of another kind, the array is not one of numbers
            [N, D] or [N, K, D], or there are more or fewer latents than texts.
    """
    if not source.is_file():
        found = "a folder" if source.is_dir() else "no such file"
        raise UserError(f"the texts of --latents in one file at {source}", found, "check the path")
    latents, latents_per_text = _read_latents(latents_path, latents_field)
    corpus = open_corpus(source, text_field)
    check_text_field(text_field, [corpus])
    own: Counter = Counter()
    samples = [
        # Every record is counted before its text comes, so that the count is the row behind it.
        LatentRow(text, own["read"] - 1, latents)
        for unit in corpus.units
        for text in unit.read(own)
    ]
    if own["read"] != len(latents):
        raise UserError(
            f"one latent for each of the {own['read']:,} texts in {source}, in their order",
            f"{len(latents):,} latents in {latents_path}",
            "write one row for every text; blank lines are no texts",
        )
    dropped = {key: count for key, count in own.items() if key.startswith("drop_")}
    counts.update({"read": sum(dropped.values()), **dropped})
    counts["files"] = len({source, latents_path})
    return samples, latents_per_text


def _read_latents(
    path: Path, field: str | None
) -> tuple[Sequence[np.ndarray | None] | np.ndarray, int]:
    """Return the latents by row, mapped or in memory, and their number per text."""
    suffix = path.suffix.lower()
    if field is not None and suffix == ".npy":
        fix = "leave --latents-field out"
        raise UserError("a .npz or parquet file, for --latents-field", str(path), fix)
    try:
        if suffix == ".parquet":
            return read_vectors(path, field), 1
        if suffix not in (".npy", ".npz"):
            raise UserError(f"{_FORMS}, for --latents", str(path), "convert it to one of these")
        values = map_array(path) if suffix == ".npy" else read_npz_array(path, field)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        found = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"{_FORMS}, at {path}", found, "check the file") from error
    if values.dtype.kind != "f" or values.ndim not in (2, 3):
        raise UserError(
            f"latents of float numbers [N, D], or [N, K, D] for K of every text, in {path}",
            f"{values.dtype} {list(values.shape)}",
            "save them as one array of float32, a row for every text",
        )
    return values, 1 if values.ndim == 2 else values.shape[1]
