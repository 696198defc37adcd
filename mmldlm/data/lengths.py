"""The tokens of every sample, of which the batch plan asks for a window at a time.

A store keeps them in two bytes a sample, in a file whose pages the ranks of a node share: as an
array of its own, each rank would hold four bytes a sample, 32 GB per node of eight at a billion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_BLOCK = 1 << 20  # samples


class Lengths:
    """A read-only array [N] int32 of tokens per sample.

    Indexing and reductions are those of numpy; a slice reads nothing.

    Args:
        parts: Stored tokens per sample, arrays of any integer type that follow each other.
        limit: Number of tokens to which longer texts are cut.
        extra: Number of tokens that every sample has in addition (EOS).
    """

    ndim, dtype = 1, np.dtype(np.int32)

    def __init__(self, parts: Sequence[np.ndarray], limit: int | None = None, extra: int = 0):
        self._parts, self._limit, self._extra = parts, limit, extra
        self._starts = np.cumsum([0, *map(len, parts)])

    @classmethod
    def joined(cls, lengths: Sequence[Lengths]) -> Lengths:
        """Return the lengths of several stores with one limit, one after another."""
        first = lengths[0]
        return cls([p for one in lengths for p in one._parts], first._limit, first._extra)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1, "a part of the samples in their order"
            bounds = zip(self._parts, self._starts.tolist())
            parts = [p[max(start - at, 0) : max(stop - at, 0)] for p, at in bounds]
            return Lengths(parts, self._limit, self._extra)
        if len(self._parts) == 1:
            return self._as_used(self._parts[0][index])
        ids = np.asarray(index)
        if ids.size and not 0 <= ids.min() <= ids.max() < len(self):
            raise IndexError(f"samples {ids.min()}..{ids.max()} of {len(self)}")
        stored = np.empty(ids.shape, np.int32)
        of_part = np.searchsorted(self._starts, ids, side="right") - 1
        for number, part in enumerate(self._parts):
            chosen = of_part == number
            stored[chosen] = part[ids[chosen] - self._starts[number]]
        return self._as_used(stored)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        blocks = [block.astype(dtype or self.dtype) for block in self.blocks()]
        return np.concatenate(blocks) if blocks else np.empty(0, dtype or self.dtype)

    def __add__(self, extra: int) -> Lengths:
        return Lengths(self._parts, self._limit, self._extra + extra)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all lengths in order, int32 [at most 2**20] at a time."""
        return (self._as_used(stored) for stored in self._stored_blocks())

    def max(self) -> int:
        """Return the largest length; of no sample there is none."""
        return self._of_stored(max(stored.max() for stored in self._stored_blocks()))

    def min(self) -> int:
        """Return the smallest length."""
        return self._of_stored(min(stored.min() for stored in self._stored_blocks()))

    def sum(self) -> int:
        """Return the number of tokens of all samples."""
        return sum(int(block.sum(dtype=np.int64)) for block in self.blocks())

    def num_cut(self) -> int:
        """Return the number of texts that are longer than the limit."""
        if self._limit is None:
            return 0
        return sum(int(np.count_nonzero(s > self._limit)) for s in self._stored_blocks())

    def _stored_blocks(self) -> Iterator[np.ndarray]:
        for part in self._parts:
            for start in range(0, len(part), _BLOCK):
                yield part[start : start + _BLOCK]

    def _of_stored(self, length: np.integer) -> int:
        """Return the length as used of a stored one: neither a cut nor EOS changes an order."""
        return int(self._as_used(np.asarray(length)))

    def _as_used(self, stored: np.ndarray) -> np.ndarray:
        lengths = stored.astype(np.int32)
        if self._limit is not None:
            lengths = np.minimum(lengths, self._limit)
        return lengths + np.int32(self._extra)


AnyLengths = np.ndarray | Lengths
"""Tokens per sample as a batch plan and a collator read them. [N] int32"""
