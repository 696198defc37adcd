"""Stage 2: drop repeated pairs, join samples into groups, and assign whole groups to the splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mmldlm.data.prepare.select_stage import num_validation, split_keys


def first_pairs(pixel_hashes: np.ndarray, caption_hashes: np.ndarray) -> np.ndarray:
    """Return the ascending positions of the first sample of every (pixels, caption)."""
    pairs = np.stack([pixel_hashes, caption_hashes], axis=1)
    return np.sort(np.unique(pairs, axis=0, return_index=True)[1])


def join_groups(*columns: Sequence) -> np.ndarray:
    """Return [N] int64 groups: samples that are equal in any column are of one group, directly or through others.

    A value of None joins nothing. Groups are numbered by their first sample.
    """
    parents = list(range(len(columns[0])))

    def find(node: int) -> int:
        while parents[node] != node:
            parents[node] = node = parents[parents[node]]
        return node

    for column in columns:
        first: dict = {}
        for position, value in enumerate(column):
            if value is not None:
                one, other = find(first.setdefault(value, position)), find(position)
                parents[max(one, other)] = min(one, other)
    roots = np.array([find(position) for position in range(len(parents))], np.int64)
    return np.unique(roots, return_inverse=True)[1].astype(np.int64)


def split_groups(
    groups: np.ndarray,
    caption_hashes: np.ndarray,
    requested: int | None,
    share: float | None,
    seed: int,
    words: Sequence[Sequence[str]] | None = None,
) -> np.ndarray:
    """Choose whole groups for validation, in the order of a hash of their captions.

    Args:
        groups, caption_hashes: [N] of every sample.
        requested: number of validation samples (at most; groups that would exceed it are passed over).
        share: of the validation samples where no number is requested; None: 1,000 or 5 %.
        seed: of the order.
        words: of every caption; a group is passed over if a word of it would be missing from training.

    Returns:
        [N] bool, whether a sample is in validation.
    """
    by_share = None if share is None else max(2, round(share * len(groups)))
    number = num_validation(len(groups), requested if requested is not None else by_share)
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    members = np.split(order, starts[1:])
    # A group's key is that of its caption with the smallest hash, so it depends on content alone.
    keys = split_keys(np.array([caption_hashes[own].min() for own in members], np.uint64), seed)
    left = Counter(word for own in words or () for word in own)
    inside, count = np.zeros(len(groups), dtype=bool), 0
    for index in np.argsort(keys, kind="stable"):
        own = members[index]
        if count + len(own) > number:
            continue
        needed = Counter(word for position in own for word in words[position]) if words else {}
        if all(left[word] > needed[word] for word in needed):
            inside[own] = True
            count += len(own)
            left.subtract(needed)
        if count == number:
            break
    return inside
