"""Codebooks of patches: an image as ids of its nearest codes (Van den Oord et al., arXiv
1711.00937), without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mmldlm.data.arrays import read_array
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import sha256_of
from mmldlm.utils.formatting import join_some

# Ids are stored as uint16.
MAX_CODES = 1 << 16
# Levels per component of `codes:fsq`.
FSQ_LEVELS = (8, 5, 5, 5)
# Upper bound of the distances held in memory at once.
_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Codebook:
    """Codes of patches. Their values are whole gray levels, so distances are exact and ids the
    same everywhere.

    Attributes:
        kind: `kmeans` or `fsq`.
        values: Codes, uint8 [Q, D] with the D values of a patch.
        file: File of the codes, if it was read or written.
    """

    kind: str
    values: np.ndarray
    file: Path | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def name(self) -> str:
        """`codes:kmeans:Q` or `codes:fsq`."""
        return f"codes:kmeans:{len(self)}" if self.kind == "kmeans" else f"codes:{self.kind}"

    @property
    def identity(self) -> dict[str, Any]:
        """JSON-ready identity; together with `codebook.npy` it is all that `read` needs."""
        sha256 = None if self.file is None else sha256_of(self.file)
        return {"codes": len(self), "codebook": self.kind, "codebook_sha256": sha256}

    @classmethod
    def read(cls, path: Path, identity: dict[str, Any], values: int) -> Codebook:
        """Read `codebook.npy`, float32 [Q, D] of values in -1 .. 1.

        Args:
            identity: Identity of the codebook.
            values: Number of values D of a patch.

        Raises:
            UserError: the file is missing, damaged or another one.
        """
        shape = (identity["codes"], values)
        codes = read_codec_file(path, shape, identity["codebook_sha256"])
        return cls(identity["codebook"], np.rint((codes + 1) * 127.5).astype(np.uint8), path)

    def as_float32(self) -> np.ndarray:
        """Return the codes as float32 [Q, D], u / 127.5 - 1."""
        return (self.values / 127.5 - 1).astype(np.float32)

    def encode(self, patches: np.ndarray) -> np.ndarray:
        """Return the ids int64 [B, N] of the nearest codes of patches uint8 [B, N, D]; of equal
        ones the first.
        """
        return nearest_codes(patches.reshape(-1, patches.shape[-1]), self.values)[0].reshape(
            patches.shape[:2]
        )

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """Return patches uint8 [B, N, D] of ids [B, N].

        Raises:
            UserError: an id outside 0 .. Q - 1.
        """
        check_ids(ids, len(self))
        return self.values[ids.astype(np.int64)]


def read_codec_file(path: Path, shape: tuple[int, ...], sha256: str | None) -> np.ndarray:
    """Read a file that belongs to an image codec, float32 of a shape.

    Raises:
        UserError: it is missing, damaged, or not the one with the SHA-256 of the codec.
    """
    fix = f"copy {path.name} again from the store or the checkpoint that the latents belong to"
    expected = f"float32 {list(shape)} with the SHA-256 of its codec in {path}"
    try:
        table = read_array(path)
    except (OSError, ValueError) as error:
        raise UserError(expected, str(error), fix) from None
    if table.shape != shape or table.dtype != np.float32:
        raise UserError(expected, f"{table.dtype} {list(table.shape)}", fix)
    if sha256_of(path) != sha256:
        raise UserError(expected, "other content", fix)
    return table


def check_ids(ids: np.ndarray, codes: int, where: str = "the latents", first_row: int = 0) -> None:
    """Check ids of codes [B, ...].

    Args:
        codes: Number of codes Q.
        where: File of the ids, for the error.
        first_row: Row of the first of these ids in `where`.

    Raises:
        UserError: an id outside 0 .. Q - 1; names the rows.
    """
    wrong = (ids < 0) | (ids >= codes) | (ids != np.trunc(ids))
    if not wrong.any():
        return
    rows = first_row + np.flatnonzero(wrong.reshape(len(ids), -1).any(1))
    raise UserError(
        f"ids of codes from 0 to {codes - 1} in {where}",
        f"{ids[wrong].flat[0]:g} and others" if wrong.sum() > 1 else f"{ids[wrong].flat[0]:g}",
        f"the damaged rows are {join_some(rows, limit=10)}: prepare the images again",
    )


def exact_dtype(width: int) -> DTypeLike:
    """Return the type in which squared distances of patches of `width` gray levels are exact, in
    any order of sums.
    """
    return np.float32 if 2 * width * 255**2 < 1 << 24 else np.float64


def nearest_codes(patches: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest code of each patch int64 [M] and the squared distance to it int64 [M], in
    gray levels.

    Args:
        patches: Patches, uint8 [M, D].
        codes: Codes, uint8 [Q, D].
    """
    exact = exact_dtype(patches.shape[1])
    table = codes.astype(exact)
    lengths = np.square(table).sum(1)
    ids, distances = np.empty(len(patches), np.int64), np.empty(len(patches), np.int64)
    rows = max(_BLOCK_ELEMENTS // len(codes), 1)
    for start in range(0, len(patches), rows):
        block = patches[start : start + rows].astype(exact)
        partial = lengths - 2 * block @ table.T
        best = partial.argmin(1)
        ids[start : start + len(block)] = best
        nearest = partial[np.arange(len(block)), best]
        distances[start : start + len(block)] = nearest.astype(np.int64) + np.square(block).sum(
            1
        ).astype(np.int64)
    return ids, distances


def psnr(squared_error: float, count: int) -> float | None:
    """Return the peak signal-to-noise ratio in dB of a sum of squared errors in gray levels; None:
    no error.
    """
    return (
        round(float(10 * np.log10(255**2 * count / squared_error)), 4) if squared_error else None
    )


class CodeStatistics:
    """Statistics of a codebook over a split: reconstruction error, and use of the codes."""

    def __init__(self, codebook: Codebook):
        self._codebook, self._counts = codebook, np.zeros(len(codebook), np.int64)
        self._squared_error, self._num_values = 0, 0

    def add(self, ids: np.ndarray, patches: np.ndarray) -> None:
        """Add ids [B, N] and the patches uint8 [B, N, D] that they stand for."""
        gaps = self._codebook.values[ids].astype(np.int64) - patches
        self._counts += np.bincount(ids.ravel(), minlength=len(self._counts))
        self._squared_error += int(np.square(gaps).sum())
        self._num_values += gaps.size

    def result(self) -> dict[str, Any]:
        """Return psnr in dB (None: exact), used_codes, and entropy_bits, the unigram entropy."""
        frequencies = self._counts[self._counts > 0] / self._counts.sum()
        return {
            "psnr": psnr(self._squared_error, self._num_values),
            "used_codes": len(frequencies),
            "entropy_bits": round(float(-(frequencies * np.log2(frequencies)).sum()), 4),
        }
