"""Select samples and assign their splits: texts by the hashes of the complete corpus, images in
whole groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmldlm.data.prepare import tokenize
from mmldlm.data.prepare.read import TextShards
from mmldlm.data.sentences import hash64
from mmldlm.utils.counter_rng import mix64

_FIELDS = ("shards", "pieces", "rows", "hashes", "lengths", "unknown")


@dataclass
class Samples:
    """References to samples in the shards of the tokenizing stage, in corpus order.

    Attributes:
        paths: Files of the shards.
        shards, pieces: [N] shard and position in it of each sample.
        rows: [N] row of its text in the corpus.
        hashes: [N] uint64 hash of its own content.
        lengths: [N] tokens.
        unknown: [N] tokens that the tokenizer does not know.
    """

    paths: list[Path]
    shards: np.ndarray
    pieces: np.ndarray
    rows: np.ndarray
    hashes: np.ndarray
    lengths: np.ndarray
    unknown: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: np.ndarray) -> Samples:
        """Select samples by position or by mask."""
        return Samples(self.paths, *(getattr(self, name)[chosen] for name in _FIELDS))

    def read(self, texts: TextShards, start: int, end: int) -> tuple[list[str], list[np.ndarray]]:
        """Return the texts and token ids of a range of samples."""
        read_texts, token_ids = [], []
        for shard_index, piece, row in zip(
            self.shards[start:end].tolist(),
            self.pieces[start:end].tolist(),
            self.rows[start:end].tolist(),
        ):
            shard = tokenize.read_shard(self.paths[shard_index])
            first, last = shard["offsets"][piece : piece + 2]
            token_ids.append(shard["ids"][first:last])
            first, last = shard["text_offsets"][piece : piece + 2]
            text = shard["text"][first:last].tobytes().decode("utf-8")
            # A sample that is a whole text has no text of its own in the shard.
            read_texts.append(text or texts.get([row])[0])
        return read_texts, token_ids


def _random_keys(hashes: np.ndarray, salt: int) -> np.ndarray:
    """Return uint64 keys that order texts at random, as a function of content and salt."""
    offset = np.uint64((salt * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    return mix64(np.asarray(hashes, dtype=np.uint64) + offset)


def split_keys(hashes: np.ndarray, seed: int) -> np.ndarray:
    """Return the keys of the split: the texts with the smallest keys become validation."""
    return _random_keys(hashes, 2 * seed)


def sample_keys(hashes: np.ndarray, seed: int) -> np.ndarray:
    """Return the keys of the order in which --max-samples takes texts."""
    return _random_keys(hashes, 2 * seed + 1)


def first_occurrences(hashes: np.ndarray) -> np.ndarray:
    """Return the ascending positions of the first text of each content."""
    return np.sort(np.unique(hashes, return_index=True)[1])


def num_validation(num_texts: int, requested: int | None) -> int:
    """Return the size of the validation split: as requested, else a twentieth and at most
    1,000.
    """
    return max(2, min(1000, num_texts // 20)) if requested is None else requested


class Selection:
    """The candidates in the order of tokenizing, all at once, or in rounds until there are enough
    samples; and the samples that tokenizing makes of them.

    A round holds the candidates with the next sample keys, in corpus order. So the samples are
    those with the smallest keys of an allowed length, independent of the sizes of the rounds.

    Args:
        rows: Ascending rows of the candidates.
        hashes: [N] content hashes of all texts.
        limit: Number of samples; None: all.
        seed: Seed of the sample keys.

    Attributes:
        num_rounds: Number of rounds that were tokenized.
    """

    def __init__(self, rows: np.ndarray, hashes: np.ndarray, limit: int | None, seed: int):
        self._rows, self._limit = rows, limit
        keys = sample_keys(hashes[rows], seed)
        self._order = np.arange(len(rows)) if limit is None else np.argsort(keys, kind="stable")
        self._end = self._num_kept = self.num_rounds = 0
        self._shard_rows: list[np.ndarray] = []
        self._paths: list[Path] = []

    def next_round(self) -> list[np.ndarray]:
        """Return the ascending rows of the next round, one array per shard; none with enough
        samples or no more candidates.
        """
        start, total, limit = self._end, len(self._order), self._limit
        if limit is None:
            self._end = total
        elif start == 0:
            self._end = min(total, limit + limit // 20 + 64)
        elif self._num_kept < limit:
            needed = (limit - self._num_kept) * start // max(self._num_kept, 1)
            self._end = min(total, start + needed + needed // 5 + tokenize.TEXTS_PER_SHARD)
        chosen, size = (
            np.sort(self._rows[self._order[start : self._end]]),
            tokenize.TEXTS_PER_SHARD,
        )
        return [chosen[first : first + size] for first in range(0, len(chosen), size)]

    def add(self, shard_rows: list[np.ndarray], paths: list[Path]) -> None:
        """Add the shards of a round."""
        self._shard_rows += shard_rows
        self._paths += paths
        self._num_kept += sum(len(tokenize.read_shard(path)["places"]) for path in paths)
        self.num_rounds += 1

    def collect(self, keep_duplicates: bool, counts: Counter, unk_token_id: int | None) -> Samples:
        """Return the samples in corpus order, and count the outcome of every candidate."""
        samples, status, num_short = self._read_shards(unk_token_id)
        seen = np.concatenate(self._shard_rows)
        if self._limit is not None and len(samples) >= self._limit:
            ranks = np.empty(len(self._rows), np.int64)
            ranks[self._order] = np.arange(len(self._rows))
            sample_ranks = ranks[np.searchsorted(self._rows, samples.rows)]
            order = np.lexsort((samples.pieces, samples.shards, sample_ranks))[: self._limit]
            samples = samples.take(order)
            # Candidates behind the last sample are not sampled, tokenized or not.
            is_used = ranks[np.searchsorted(self._rows, seen)] <= sample_ranks[order[-1]]
            seen, status, num_short = seen[is_used], status[is_used], num_short[is_used]
        is_chunked = status == tokenize.CHUNKED
        num_dropped, num_chunked = int(num_short.sum()), int(is_chunked.sum())
        counts["drop_too_short"] += int((status == tokenize.TOO_SHORT).sum())
        counts["drop_too_long"] += int((status == tokenize.TOO_LONG).sum())
        counts["truncated"] += int((status == tokenize.TRUNCATED).sum())
        counts["drop_not_sampled"] += len(self._rows) - len(seen)
        counts["chunked"] += num_chunked
        counts["chunks"] += int(np.isin(samples.rows, seen[is_chunked]).sum()) + num_dropped
        counts["drop_piece_too_short"] += num_dropped
        samples = samples.take(np.lexsort((samples.pieces, samples.shards, samples.rows)))
        if not keep_duplicates and (counts["truncated"] or num_chunked):
            # Texts that differed only after the cut are equal now.
            first = first_occurrences(samples.hashes)
            counts["drop_duplicate"] += len(samples) - len(first)
            samples = samples.take(first)
        return samples

    def _read_shards(self, unk_token_id: int | None) -> tuple[Samples, np.ndarray, np.ndarray]:
        """Return all samples of the shards, and per text its status and its number of pieces that
        are too short.
        """
        columns = []
        statuses, num_short = [], []
        for index, (rows, path) in enumerate(zip(self._shard_rows, self._paths, strict=True)):
            shard = tokenize.read_shard(path)
            statuses.append(shard["status"])
            num_short.append(shard.get("num_short", np.zeros(len(rows), np.int32)))
            num = len(shard["places"])
            unknown_before = np.concatenate([[0], np.cumsum(shard["ids"] == unk_token_id)])
            columns.append(
                (
                    np.full(num, index, np.int32),
                    np.arange(num, dtype=np.int32),
                    rows[shard["places"]],
                    shard["hashes"],
                    shard["lengths"],
                    np.diff(unknown_before[shard["offsets"]]).astype(np.int32),
                )
            )
        samples = Samples(self._paths, *map(np.concatenate, zip(*columns)))
        return samples, np.concatenate(statuses), np.concatenate(num_short)


def last_reserved_key(
    hashes: np.ndarray, requested: int | None, limit: int | None, seed: int
) -> np.uint64:
    """Return the largest split key of the texts that a tokenizer is not trained on, among which
    validation is chosen.

    It has to be known before any text has tokens, and thus before the samples are. The texts with
    smaller keys are a tenth of all and at least twice the share that validation will have.

    Args:
        hashes: [N] hashes of the candidates.
        requested: Number of validation samples.
        limit: Number of samples that are taken of the candidates; None: all.
        seed: Seed of the split keys.
    """
    num_kept = min(len(hashes), len(hashes) if limit is None else limit)
    count = min(num_validation(num_kept, requested), num_kept)
    share = max(min(2 * count, (count + num_kept) // 2) / num_kept, 0.1)
    last = math.ceil(share * len(hashes)) - 1
    return np.partition(split_keys(hashes, seed), last)[last]


def in_validation(
    hashes: np.ndarray, requested: int | None, seed: int, last_key: np.uint64 | None = None
) -> np.ndarray:
    """Return [N] bools, whether a sample is in the validation split: those with the smallest split
    keys are, so that samples of one hash stay together.

    Args:
        hashes: [N] hashes of the texts that the samples are or are pieces of.
        requested: Number of validation samples, at least; fewer only if `last_key` ends them.
        seed: Seed of the split keys.
        last_key: Largest key of a validation sample; None: any.
    """
    keys = split_keys(hashes, seed)
    count = min(num_validation(len(keys), requested), len(keys))
    if count == 0:
        return np.zeros(len(keys), dtype=bool)
    inside = keys <= np.partition(keys, count - 1)[count - 1]
    return inside if last_key is None else inside & (keys <= last_key)


def caption_hashes(captions: Sequence[str]) -> np.ndarray:
    """Return [N] uint64 hashes of captions, exact: case and marks count."""
    return np.array([hash64(caption.encode()) for caption in captions], np.uint64)


def order_hashes(captions: Sequence[str], hashes: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return [N] uint64 hashes that order samples: of the caption, and of the image's name too
    where captions repeat.

    So images of one caption, as in a folder with class names, are spread over the splits.
    """
    num = Counter(captions)
    repeated = [row for row, caption in enumerate(captions) if num[caption] > 1]
    unique_hashes = hashes.copy()
    unique_hashes[repeated] = caption_hashes(
        [f"{captions[row]}\n{names[row]}" for row in repeated]
    )
    return unique_hashes


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
        groups, order_hashes: [N] groups and hashes of the samples.
        requested: Number of validation samples (at most; groups that would exceed it are passed
            over).
        share: Fraction of the eligible samples, where no number is requested; None: 1,000 or 5 %.
        seed: Seed of the order.
        words: Words of every caption; a group is passed over if a word of it would be missing from
            training.
        eligible: [N] bool, whether a sample may be in validation; a group is passed over if one of
            it may not.

    Returns:
        [N] bool, whether a sample is in validation.
    """
    num_eligible = len(groups) if eligible is None else int(eligible.sum())
    by_fraction = None if share is None else max(2, round(share * num_eligible))
    target = num_validation(len(groups), requested if requested is not None else by_fraction)
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    members = np.split(order, starts[1:])
    # A group's key is that of its sample with the smallest hash, whatever their order.
    keys = split_keys(np.array([order_hashes[rows].min() for rows in members], np.uint64), seed)
    left = Counter(word for rows in words or () for word in rows)
    inside, count = np.zeros(len(groups), dtype=bool), 0
    for index in np.argsort(keys, kind="stable"):
        rows = members[index]
        if count + len(rows) > target or (eligible is not None and not eligible[rows].all()):
            continue
        needed = Counter(word for position in rows for word in words[position]) if words else {}
        if all(left[word] > needed[word] for word in needed):
            inside[rows] = True
            count += len(rows)
            left.subtract(needed)
        if count == target:
            break
    return inside
