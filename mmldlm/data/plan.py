"""The batch plan: which samples make up the global batch of a step. A pure function of (seed, lengths, batch size,
step)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_U64 = np.uint64


def _mix(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014): uint64 -> uint64, wraps by design."""
    with np.errstate(over="ignore"):
        x = x + key * _U64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
        return x ^ (x >> _U64(31))


def permute(positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Ids at some positions of a pseudo-random permutation of range(count), without making the whole of it.

    A four-round Feistel network on the next even number of bits, walked until it lands below count, so that ten million
    samples are shuffled in the memory of the positions asked for.

    Args:
        positions: [P] int64 in [0, count). count: samples. seed, epoch: key of the permutation.

    Returns:
        [P] int64 ids; over all positions every id appears once.
    """
    half_bits = _U64(max(1, (max(count - 1, 1).bit_length() + 1) // 2))
    low_mask = (_U64(1) << half_bits) - _U64(1)
    base = np.array([(seed * 0x2545F4914F6CDD1D + epoch * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF], dtype=_U64)
    keys = [_mix(base, _U64(i + 1))[0] for i in range(4)]
    ids = positions.astype(_U64)
    todo = np.arange(len(ids))
    while len(todo):
        x = ids[todo]
        left, right = x >> half_bits, x & low_mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & low_mask)
        x = (left << half_bits) | right
        ids[todo] = x
        todo = todo[x >= count]
    return ids.astype(np.int64)


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step over all ranks and micro-batches.

    Attributes:
        step: 0-based step. epoch, index: epoch and place in it.
        ids: [n] int64 sample ids sorted by length; n is the global batch size, less at an epoch's end.
        size: the configured global batch size.
    """

    step: int
    epoch: int
    index: int
    ids: np.ndarray
    size: int


class BatchPlan:
    """Length-bucketed shuffled batches, the same on every rank and for every world size.

    An epoch is cut into windows of `bucket_batches` global batches in shuffled order; a window is sorted by length, cut
    into batches, and those are shuffled, so that one batch holds texts of nearly one length. The last batch of an epoch
    may be smaller: no sample is dropped or repeated.

    Args:
        lengths: [N] token counts.
        global_batch: samples of one optimizer step over all ranks.
        seed: of the order. bucket_batches: global batches in a window.
        shuffle: False keeps the stored order before sorting (evaluation).
    """

    def __init__(
        self, lengths: np.ndarray, global_batch: int, seed: int, bucket_batches: int = 64, shuffle: bool = True
    ):
        assert len(lengths) > 0 and global_batch > 0
        self.lengths, self.global_batch, self.seed = lengths, global_batch, seed
        self.bucket_batches, self.shuffle = bucket_batches, shuffle
        self.batches_per_epoch = -(-len(lengths) // global_batch)
        self._window_key: tuple[int, int] | None = None
        self._window: list[np.ndarray] = []

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of a 0-based step, in time independent of the step."""
        epoch, index = divmod(step, self.batches_per_epoch)
        window, place = divmod(index, self.bucket_batches)
        if self._window_key != (epoch, window):
            self._window, self._window_key = self._make_window(epoch, window), (epoch, window)
        return GlobalBatch(step, epoch, index, self._window[place], self.global_batch)

    def _make_window(self, epoch: int, window: int) -> list[np.ndarray]:
        span = self.global_batch * self.bucket_batches
        positions = np.arange(window * span, min((window + 1) * span, len(self.lengths)))
        ids = permute(positions, len(self.lengths), self.seed, epoch) if self.shuffle else positions
        ids = ids[np.lexsort((ids, self.lengths[ids]))]
        batches = [ids[start : start + self.global_batch] for start in range(0, len(ids), self.global_batch)]
        if not self.shuffle or len(batches) == 1:
            return batches
        # A short batch stays last, so that every other step of the epoch has the full batch size.
        short = batches.pop() if len(batches[-1]) < self.global_batch else None
        order = permute(np.arange(len(batches)), len(batches), self.seed + 0x5EED, epoch * 1_000_003 + window)
        return [batches[i] for i in order] + ([short] if short is not None else [])


def local_slots(global_batch: int, world_size: int, accum: int, rank: int, micro: int) -> np.ndarray:
    """Places in the global batch that one rank computes in one micro-batch (contiguous, so of nearly one length)."""
    size = global_batch // (world_size * accum)
    start = (micro * world_size + rank) * size
    return np.arange(start, start + size)
