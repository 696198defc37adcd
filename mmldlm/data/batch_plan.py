"""The batch plan: the samples of every step's global batch, a pure function of (seed, lengths,
batch size, step).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmldlm.data.lengths import AnyLengths
from mmldlm.utils.counter_rng import mix64

# Number of positions in which every store of a mixture has its exact fraction.
MIXTURE_BLOCK = 4096
_U64 = np.uint64
_GOLDEN, _LOW_64 = 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF


def permute(positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the ids at some positions of a pseudo-random permutation of range(count).

    A four-round Feistel network on the next even number of bits is iterated until it falls below
    count. Memory is that of the requested positions, so ten million samples need no shuffled
    array.

    Args:
        positions: [P] int64 in [0, count).
        count: Number of samples.
        seed, epoch: Key of the permutation.

    Returns:
        [P] int64 ids; over all positions every id appears once.
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    # Arrays: NumPy's scalars are slower, and warn when a product wraps.
    half_bits, low_mask = np.array(half, _U64), np.array((1 << half) - 1, _U64)
    base = seed * 0x2545F4914F6CDD1D + epoch * _GOLDEN
    rounds = np.array([[(base + (i + 1) * _GOLDEN) & _LOW_64] for i in range(4)], dtype=_U64)
    keys = mix64(rounds) * np.array(_GOLDEN, _U64)
    ids = positions.astype(_U64)
    todo = np.arange(len(ids))
    while len(todo):
        x = ids[todo]
        left, right = x >> half_bits, x & low_mask
        for key in keys:
            left, right = right, left ^ (mix64(right + key) & low_mask)
        x = (left << half_bits) | right
        ids[todo] = x
        todo = todo[x >= count]
    return ids.astype(np.int64)


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step over all ranks and micro-batches.

    Attributes:
        step: 0-based step.
        epoch: 0-based epoch.
        index: Position of the batch in the epoch.
        ids: [n] int64 sample ids sorted by length; n is the global batch size, less at an epoch's
            end.
        size: The configured global batch size, or that of ids under data.batching=tokens.
    """

    step: int
    epoch: int
    index: int
    ids: np.ndarray
    size: int

    def samples_at(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sample ids at some positions, and which of them are real.

        Args:
            slots: [B] positions; those past the end of the batch are placeholders and get the
                first sample's id.

        Returns:
            ([B] int64 ids, [B] bool).
        """
        real = slots < len(self.ids)
        return self.ids[np.where(real, slots, 0)], real


class Order(ABC):
    """The samples in use, and their order in each epoch before a window is sorted by length.

    Attributes:
        count: Samples of an epoch.
        name: Part of the plan's version.
    """

    count: int
    name = ""

    @abstractmethod
    def ids(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """Return the [P] ids at positions of an epoch."""

    def parts(self, ids: np.ndarray) -> list[np.ndarray]:
        """Split the ids of a window into groups that may share a batch (by default one group)."""
        return [ids]


class ShuffledOrder(Order):
    """The samples of one store, shuffled differently in every epoch."""

    def __init__(self, count: int, seed: int):
        self.count, self.seed = count, seed

    def ids(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        return permute(positions, self.count, self.seed, epoch)


class SpacedOrder(Order):
    """Samples spread evenly over a split, in the stored order and the same in every epoch
    (evaluation).

    Args:
        count: Number of samples to use.
        total: Number of samples in the split.
        first: Id of the first of them.
    """

    def __init__(self, count: int, total: int, first: int = 0):
        self.count, self.total, self.first = count, total, first

    def ids(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        return self.first + np.asarray(positions, np.int64) * self.total // self.count


class MixtureOrder(Order):
    """The samples of several stores by weight: each store has a fixed fraction of every
    MIXTURE_BLOCK positions.

    Each store has its own epochs, each in another order, and may repeat within one epoch of the
    mixture. An epoch of the mixture has as many samples as all stores together. Ids count through
    the stores in the given order.

    Args:
        counts: Number of samples per store.
        weights: Relative weight per store, numbers that `check_weights` accepts for fractions of
            at least 1 / MIXTURE_BLOCK.
        seed: Seed of the order.
        run: Number of consecutive positions that belong to one store. The global batch size for
            stores whose samples cannot share a batch: every batch of a window is then of one
            store, an epoch has full runs only, and blocks count runs instead of positions.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float], seed: int, run: int = 1):
        self.counts, self.seed = np.asarray(counts, np.int64), seed
        self.run = min(run, int(sum(counts)))
        self.count = int(sum(counts)) // self.run * self.run
        exact = np.asarray(weights, np.float64) / sum(weights) * MIXTURE_BLOCK
        shares = np.floor(exact).astype(np.int64)
        shares[np.argsort(shares - exact, kind="stable")[: MIXTURE_BLOCK - shares.sum()]] += 1
        assert shares.min() > 0, "a weight too small to be drawn"
        self.shares, self.offsets = shares, np.concatenate([[0], np.cumsum(self.counts)[:-1]])
        by_run = "" if self.run == 1 else f":by{self.run}"
        self.name = f":mixed{by_run}" + "".join(
            f":{count}x{share}" for count, share in zip(counts, shares.tolist())
        )
        # For every position of a block: its store, and its index among the positions of that
        # store.
        self._store = np.repeat(np.arange(len(shares)), shares)[
            permute(np.arange(MIXTURE_BLOCK), MIXTURE_BLOCK, seed, 0)
        ]
        self._index_in_store = np.empty(MIXTURE_BLOCK, np.int64)
        for store, share in enumerate(shares):
            self._index_in_store[self._store == store] = np.arange(share)

    def ids(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        runs, within = np.divmod(epoch * self.count + np.asarray(positions, np.int64), self.run)
        blocks, offsets = np.divmod(runs, MIXTURE_BLOCK)
        stores = self._store[offsets]
        # Draws of each store since the first epoch; a store that is drawn through starts over.
        draws = blocks * self.shares[stores] + self._index_in_store[offsets]
        draws = draws * self.run + within
        ids = np.empty(len(draws), np.int64)
        for store, count in enumerate(self.counts.tolist()):
            of_store = np.flatnonzero(stores == store)
            epochs, rows = np.divmod(draws[of_store], count)
            for own_epoch in np.unique(epochs).tolist():
                chosen = epochs == own_epoch
                ids_in_store = permute(rows[chosen], count, self.seed + 0x51ED * store, own_epoch)
                ids[of_store[chosen]] = self.offsets[store] + ids_in_store
        return ids

    def parts(self, ids: np.ndarray) -> list[np.ndarray]:
        if self.run == 1:
            return [ids]
        stores = np.searchsorted(self.offsets, ids, side="right") - 1
        return [ids[stores == store] for store in np.unique(stores)]


class BatchPlan:
    """Length-bucketed shuffled batches, the same on every rank and for every world size.

    An epoch is cut into windows of `bucket_batches` global batches in shuffled order. Each window
    is sorted by length, cut into batches, and these are shuffled, so that the texts of a batch
    have nearly equal lengths. The last batch of an epoch may be smaller: no sample is dropped or
    repeated.

    Args:
        lengths: [N] token counts.
        global_batch: Samples per optimizer step over all ranks.
        seed: Seed of the order.
        bucket_batches: Global batches per window.
        shuffle: Whether to shuffle the batches of a window (training).
        order: Samples in use, and their order before sorting (default: all of them, shuffled or
            as stored).

    Attributes:
        version: Name of the order, which seed, global batch and lengths complete; a resumed run
            must keep it.
    """

    _KIND = "samples-1"

    def __init__(
        self,
        lengths: AnyLengths,
        global_batch: int,
        seed: int,
        bucket_batches: int = 64,
        shuffle: bool = True,
        order: Order | None = None,
    ):
        assert len(lengths) > 0 and global_batch > 0
        self.lengths, self.global_batch, self.seed = lengths, global_batch, seed
        self.bucket_batches, self.shuffle = bucket_batches, shuffle
        num = len(lengths)
        self.order = order or (ShuffledOrder(num, seed) if shuffle else SpacedOrder(num, num))
        assert 0 < self.order.count <= num
        self.batches_per_epoch = -(-self.order.count // global_batch)
        self.version = f"{self._KIND}:{bucket_batches}{self.order.name}"
        self._cached: tuple[tuple[int, int] | None, list[np.ndarray]] = (None, [])

    def batch(self, step: int) -> GlobalBatch:
        """Return the global batch of a 0-based step, in time independent of the step."""
        epoch, index = divmod(step, self.batches_per_epoch)
        window, position = divmod(index, self.bucket_batches)
        # Key and batches are read as one tuple, because the prefetch thread asks for later steps
        # in the meantime.
        key, batches = self._cached
        if key != (epoch, window):
            batches = self._make_window(epoch, window)
            self._cached = ((epoch, window), batches)
        ids = batches[position]
        return GlobalBatch(step, epoch, index, ids, self._size(ids))

    def slots(
        self, batch: GlobalBatch, world_size: int, accum: int, rank: int, micro: int
    ) -> np.ndarray:
        """Return the positions in the global batch that one rank computes in one micro-batch."""
        return local_slots(self.global_batch, world_size, accum, rank, micro)

    def _size(self, ids: np.ndarray) -> int:
        return self.global_batch

    def _make_window(self, epoch: int, window: int) -> list[np.ndarray]:
        span = self.global_batch * self.bucket_batches
        positions = np.arange(window * span, min((window + 1) * span, self.order.count))
        ids = self.order.ids(positions, epoch)
        batches = []
        for part in self.order.parts(ids):
            # By length; of one length by id.
            batches += self._cut(part[np.lexsort((part, self.lengths[part]))])
        if not self.shuffle or len(batches) == 1:
            return batches
        # A short batch stays last, so that every other step of the epoch has the full batch size.
        short = batches.pop() if self._is_short(batches[-1]) else None
        order = permute(
            np.arange(len(batches)), len(batches), self.seed + 0x5EED, epoch * 1_000_003 + window
        )
        return [batches[i] for i in order] + ([short] if short is not None else [])

    def _cut(self, ids: np.ndarray) -> list[np.ndarray]:
        return [
            ids[start : start + self.global_batch]
            for start in range(0, len(ids), self.global_batch)
        ]

    def _is_short(self, batch: np.ndarray) -> bool:
        return len(batch) < self.global_batch


class TokenBatchPlan(BatchPlan):
    """A BatchPlan whose batches have equal numbers of tokens within a window, instead of samples.

    A window has the same number of batches as in BatchPlan, so a step is found in the same
    constant time. A batch has `global_batch` samples on average, and its tokens are split evenly
    among ranks and micro-batches.
    """

    _KIND = "tokens-1"

    def slots(
        self, batch: GlobalBatch, world_size: int, accum: int, rank: int, micro: int
    ) -> np.ndarray:
        bounds = _even_cuts(self.lengths[batch.ids], world_size * accum)
        part = micro * world_size + rank
        return np.arange(bounds[part], bounds[part + 1])

    def _size(self, ids: np.ndarray) -> int:
        return len(ids)

    def _cut(self, ids: np.ndarray) -> list[np.ndarray]:
        bounds = _even_cuts(self.lengths[ids], -(-len(ids) // self.global_batch))
        return [ids[start:end] for start, end in zip(bounds, bounds[1:])]

    def _is_short(self, batch: np.ndarray) -> bool:
        return False


def _even_cuts(lengths: np.ndarray, num_parts: int) -> np.ndarray:
    """Return [num_parts + 1] bounds of parts with nearly equal sums of lengths.

    Every part has at least one sample; with fewer samples than parts the last parts are out of
    range.
    """
    num = len(lengths)
    if num <= num_parts:
        return np.arange(num_parts + 1)
    ends = np.cumsum(lengths, dtype=np.int64)
    targets = ends[-1] * np.arange(1, num_parts) / num_parts
    cuts = np.searchsorted(ends, targets) + 1
    # Take the nearer of the two ends around each target.
    nearer = np.abs(ends[np.maximum(cuts - 2, 0)] - targets) < np.abs(
        ends[np.minimum(cuts - 1, num - 1)] - targets
    )
    cuts = cuts - (nearer & (cuts > 1))
    minimum = np.arange(1, num_parts)
    cuts = np.maximum.accumulate(np.maximum(cuts, minimum) - minimum) + minimum
    cuts = np.minimum(cuts, num - num_parts + minimum)
    return np.concatenate([[0], cuts, [num]])


def build_batch_plan(batching: str, *args: Any, **kwargs: Any) -> BatchPlan:
    """Build the plan that data.batching names; the other arguments are those of BatchPlan."""
    return {"samples": BatchPlan, "tokens": TokenBatchPlan}[batching](*args, **kwargs)


def local_slots(
    global_batch: int, world_size: int, accum: int, rank: int, micro: int
) -> np.ndarray:
    """Return the positions of one rank's micro-batch: a contiguous part, so its texts have nearly
    equal lengths.
    """
    size = global_batch // (world_size * accum)
    start = (micro * world_size + rank) * size
    return np.arange(start, start + size)
