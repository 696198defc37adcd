"""Stage 2: drop repeated pairs, join samples into groups, and assign whole groups to the
splits.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mmldlm.data.prepare.select_stage import num_validation, split_keys


def caption_hashes(captions: Sequence[str]) -> np.ndarray:
    """Return [N] uint64 hashes (BLAKE2) of captions, exact: case and marks count."""
    digests = (hashlib.blake2b(caption.encode(), digest_size=8).digest() for caption in captions)
    return np.array([int.from_bytes(digest, "big") for digest in digests], np.uint64)


def order_hashes(captions: Sequence[str], hashes: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return [N] uint64 hashes that order samples: of the caption, and of the image's name too
    where captions repeat.

    So images of one caption, as in a folder with class names, are spread over the splits.
    """
    num = Counter(captions)
    repeated = [place for place, caption in enumerate(captions) if num[caption] > 1]
    found = hashes.copy()
    found[repeated] = caption_hashes([f"{captions[place]}\n{names[place]}" for place in repeated])
    return found


def first_pairs(pixel_hashes: np.ndarray, caption_hashes: np.ndarray) -> np.ndarray:
    """Return the ascending positions of the first sample of every (pixels, caption)."""
    pairs = np.stack([pixel_hashes, caption_hashes], axis=1)
    return np.sort(np.unique(pairs, axis=0, return_index=True)[1])


def join_groups(*columns: Sequence) -> np.ndarray:
    """Return [N] int64 groups: samples that are equal in any column are of one group, directly or
    through others.

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
    order_hashes: np.ndarray,
    requested: int | None,
    share: float | None,
    seed: int,
    words: Sequence[Sequence[str]] | None = None,
    eligible: np.ndarray | None = None,
) -> np.ndarray:
    """Choose whole groups for validation, in the order of the hashes of their samples.

    Args:
        groups, order_hashes: [N] of every sample.
        requested: number of validation samples (at most; groups that would exceed it are passed
            over).
        share: of the eligible samples, where no number is requested; None: 1,000 or 5 %.
        seed: of the order.
        words: of every caption; a group is passed over if a word of it would be missing from
            training.
        eligible: [N] bool, whether a sample may be in validation; a group is passed over if one of
            it may not.

    Returns:
        [N] bool, whether a sample is in validation.
    """
    num_eligible = len(groups) if eligible is None else int(eligible.sum())
    by_share = None if share is None else max(2, round(share * num_eligible))
    number = num_validation(len(groups), requested if requested is not None else by_share)
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    members = np.split(order, starts[1:])
    # A group's key is that of its sample with the smallest hash, whatever their order.
    keys = split_keys(np.array([order_hashes[own].min() for own in members], np.uint64), seed)
    left = Counter(word for own in words or () for word in own)
    inside, count = np.zeros(len(groups), dtype=bool), 0
    for index in np.argsort(keys, kind="stable"):
        own = members[index]
        if count + len(own) > number or (eligible is not None and not eligible[own].all()):
            continue
        needed = Counter(word for position in own for word in words[position]) if words else {}
        if all(left[word] > needed[word] for word in needed):
            inside[own] = True
            count += len(own)
            left.subtract(needed)
        if count == number:
            break
    return inside
