"""Which texts become samples, and in which split: functions of content hashes over the whole corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmldlm.data.prepare import tokenize_stage
from mmldlm.data.prepare.read_stage import TextShards

_FIELDS = ("shards", "pieces", "rows", "hashes", "lengths")


@dataclass
class Samples:
    """Pieces of texts in corpus order, by place in the shards of the tokenizing stage.

    Attributes:
        paths: the shards. shards, pieces: [N] where each sample lies. rows: [N] its text's row in the corpus.
        hashes: [N] uint64 of its own content. lengths: [N] tokens.
    """

    paths: list[Path]
    shards: np.ndarray
    pieces: np.ndarray
    rows: np.ndarray
    hashes: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: np.ndarray) -> Samples:
        """The samples at some places, or where a mask is true."""
        return Samples(self.paths, *(getattr(self, name)[chosen] for name in _FIELDS))

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """For a .npz file."""
        return {f"{prefix}_{name}": getattr(self, name) for name in _FIELDS}

    def read(self, texts: TextShards, start: int, end: int) -> tuple[list[str], list[np.ndarray]]:
        """Texts and token ids of a range of samples."""
        found_texts, found_ids = [], []
        for shard_number, piece, row in zip(
            self.shards[start:end].tolist(), self.pieces[start:end].tolist(), self.rows[start:end].tolist()
        ):
            shard = tokenize_stage.read_shard(self.paths[shard_number])
            first, last = shard["offsets"][piece : piece + 2]
            found_ids.append(shard["ids"][first:last])
            first, last = shard["text_offsets"][piece : piece + 2]
            own = shard["text"][first:last].tobytes().decode("utf-8")
            found_texts.append(own or texts.get([row])[0])
        return found_texts, found_ids


def mix64(values: Sequence[int] | np.ndarray, salt: int) -> np.ndarray:
    """uint64 keys that order texts at random, as a function of content and salt (the SplitMix64 finaliser)."""
    key = np.asarray(values, dtype=np.uint64) + np.uint64((salt * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


def split_keys(hashes: np.ndarray, seed: int) -> np.ndarray:
    """The texts with the smallest of these keys become validation."""
    return mix64(hashes, 2 * seed)


def sample_keys(hashes: np.ndarray, seed: int) -> np.ndarray:
    """With --max-samples, texts are taken in the order of these keys."""
    return mix64(hashes, 2 * seed + 1)


def first_occurrences(hashes: np.ndarray) -> np.ndarray:
    """Places of the first text of each content, rising."""
    return np.sort(np.unique(hashes, return_index=True)[1])


def deduplicate(texts: TextShards, held_out: np.ndarray, keep_duplicates: bool, counts: Counter) -> np.ndarray:
    """Rows that may become samples: different ones (unless duplicates are kept) that are not held out."""
    rows = np.arange(len(texts)) if keep_duplicates else first_occurrences(texts.hashes)
    counts["drop_duplicate"] += len(texts) - len(rows)
    kept = rows[~np.isin(texts.hashes[rows], held_out)]
    counts["drop_in_validation_corpus"] += len(rows) - len(kept)
    return kept


def num_validation(num_texts: int, wanted: int | None) -> int:
    """Samples of the validation split: as wanted, else a twentieth and at most 1,000."""
    return max(2, min(1000, num_texts // 20)) if wanted is None else wanted


class SelectionRounds:
    """The candidates in the order in which they are tokenized: all of them, or wave by wave until there are enough.

    A wave holds the candidates with the next sample keys, in corpus order, so that the samples are those with the
    smallest keys of an allowed length, whatever the waves are.
    """

    def __init__(self, rows: np.ndarray, hashes: np.ndarray, limit: int | None, seed: int):
        self.rows, self.limit = rows, limit
        keys = sample_keys(hashes[rows], seed)
        self.order = np.argsort(keys, kind="stable") if limit is not None else np.arange(len(rows))
        self._end = 0

    def next(self, num_kept: int) -> np.ndarray | None:
        """Rows of the next wave, rising; None when there are enough samples or no more candidates."""
        total = len(self.order)
        if self._end >= total or (self.limit is not None and num_kept >= self.limit):
            return None
        start = self._end
        if self.limit is None:
            self._end = total
        elif start == 0:
            self._end = min(total, self.limit + self.limit // 20 + 64)
        else:
            needed = (self.limit - num_kept) * start // max(num_kept, 1)
            self._end = min(total, start + needed + needed // 5 + tokenize_stage.SHARD)
        return np.sort(self.rows[self.order[start : self._end]])


def collect_samples(
    texts: TextShards,
    waves: SelectionRounds,
    shard_rows: list[np.ndarray],
    paths: list[Path],
    keep_duplicates: bool,
    counts: Counter,
    seed: int,
) -> Samples:
    """All that tokenizing made, as samples in corpus order, what became of every candidate counted."""
    parts: list[list[np.ndarray]] = [[] for _ in _FIELDS]
    statuses, num_short = [], []
    for number, (rows, path) in enumerate(zip(shard_rows, paths, strict=True)):
        shard = tokenize_stage.read_shard(path)
        statuses.append(shard["status"])
        num_short.append(shard.get("num_short", np.zeros(len(rows), np.int32)))
        num = len(shard["places"])
        columns = (
            np.full(num, number, np.int32),
            np.arange(num, dtype=np.int32),
            rows[shard["places"]],
            shard["hashes"],
            shard["lengths"],
        )
        for part, column in zip(parts, columns):
            part.append(column)
    samples = Samples(list(paths), *map(np.concatenate, parts))
    all_seen, status, shorts = np.concatenate(shard_rows), np.concatenate(statuses), np.concatenate(num_short)
    seen = all_seen
    if waves.limit is not None:
        samples, seen, status = _first_by_key(texts, samples, seen, status, waves.limit, seed)
    counts["drop_too_short"] += int((status == tokenize_stage.TOO_SHORT).sum())
    counts["drop_too_long"] += int((status == tokenize_stage.TOO_LONG).sum())
    counts["truncated"] += int((status == tokenize_stage.TRUNCATED).sum())
    counts["drop_not_sampled"] += len(waves.rows) - len(seen)
    num_chunked = int((status == tokenize_stage.CHUNKED).sum())
    if num_chunked:
        counts["chunked"] += num_chunked
        counts["chunks"] += int(np.isin(samples.rows, seen[status == tokenize_stage.CHUNKED]).sum())
        dropped = int(shorts[np.isin(all_seen, seen)].sum())
        counts["chunks"] += dropped
        counts["drop_piece_too_short"] += dropped
    samples = samples.take(np.lexsort((samples.pieces, samples.shards, samples.rows)))
    if not keep_duplicates and (counts["truncated"] or num_chunked):
        first = first_occurrences(samples.hashes)  # texts that only differed after the cut are one text now
        counts["drop_duplicate"] += len(samples) - len(first)
        samples = samples.take(first)
    return samples


def _first_by_key(texts: TextShards, samples: Samples, seen: np.ndarray, status: np.ndarray, limit: int, seed: int):
    """The first ``limit`` samples in the order of their texts' sample keys, and the texts looked at to find them."""
    text_keys = sample_keys(texts.hashes[seen], seed)
    text_order = np.lexsort((seen, text_keys))
    rank = np.empty(len(seen), np.int64)
    rank[text_order] = np.arange(len(seen))
    by_row = np.argsort(seen)
    ranks = rank[by_row[np.searchsorted(seen[by_row], samples.rows)]]
    order = np.lexsort((samples.pieces, samples.shards, ranks))[:limit]
    if len(order) < limit:
        return samples, seen, status
    looked_at = text_order[: int(ranks[order[-1]]) + 1]
    return samples.take(order), seen[looked_at], status[looked_at]


def split_validation(samples: Samples, wanted: int | None, seed: int) -> dict[str, Samples]:
    """The smallest split keys are validation; equal texts have equal keys, so they never part."""
    keys = split_keys(samples.hashes, seed)
    number = num_validation(len(keys), wanted)
    if number > len(keys):
        inside = np.ones(len(keys), dtype=bool)
    else:
        inside = keys <= np.partition(keys, number - 1)[number - 1]
    return {"train": samples.take(~inside), "validation": samples.take(inside)}
