"""Floors of text from latents: what a look-up in the training split and word frequencies reach
without the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmldlm.data.store import Store
from mmldlm.evaluation.metrics import retrieval
from mmldlm.utils.counter_rng import Stream, generator

# A sentence with a training neighbor of a higher cosine is a near-duplicate: a look-up would
# answer it, too.
NEAR_DUPLICATE = 0.95
# Training sentences compared, spread over the split; it bounds the time, blocks bound the memory.
MAX_COMPARED = 1_000_000
MAX_COUNTED = 65_536  # training texts whose tokens are counted, spread over the split
_QUERIES, _ROWS = 1024, 4096  # a block of cosines has 16 MB


@dataclass(frozen=True)
class Neighbors:
    """The training sentence nearest to each of N latents.

    Attributes:
        rows: [N] int64 rows of the training split.
        cosines: [N] fp32.
        num_compared: training sentences that were compared; fewer than the split has if it is
            larger than MAX_COMPARED.
    """

    rows: np.ndarray
    cosines: np.ndarray
    num_compared: int


def nearest_training_sentences(
    train: Store, latents: np.ndarray, limit: int = MAX_COMPARED
) -> Neighbors:
    """Find the training sentence of the largest cosine for each latent, in blocks of bounded
    memory.

    Args:
        train: training split.
        latents: [N, D], or [N, M, D]: the mean of a text's latents is compared.
        limit: compare about this many, spread evenly over the split.
    """
    queries = _units(latents)
    best = np.full(len(queries), -np.inf, dtype=np.float32)
    rows, num_compared = np.zeros(len(queries), dtype=np.int64), 0
    for first, block in train.latent_blocks(limit):
        num_compared += len(block)
        for start in range(0, len(block), _ROWS):
            keys = _units(block[start : start + _ROWS]).T
            for query in range(0, len(queries), _QUERIES):
                part = slice(query, query + _QUERIES)
                cosines = queries[part] @ keys
                nearest = cosines.argmax(1)
                value = cosines[np.arange(len(cosines)), nearest]
                is_better = value > best[part]
                best[part] = np.where(is_better, value, best[part])
                rows[part] = np.where(is_better, first + start + nearest, rows[part])
    return Neighbors(rows, best, num_compared)


def _units(latents: np.ndarray) -> np.ndarray:
    return retrieval.normalize(retrieval.pool_latents(latents)).astype(np.float32)


def unigram_texts(train: Store, count: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Return texts of tokens drawn by their frequency in training, and the text of the most
    frequent tokens.

    Lengths are drawn from those of training texts; the second text has their median length and
    holds each token once, which is the constant text of about the best set-F1.
    """
    spread = np.unique(
        np.linspace(0, len(train) - 1, min(len(train), MAX_COUNTED)).astype(np.int64)
    )
    tokens = train.get(spread).tokens
    frequency = np.bincount(np.concatenate(tokens))
    lengths = np.array([len(text) for text in tokens])
    draw = generator(seed, Stream.UNIGRAM_FLOOR)
    own = draw.choice(lengths, count)
    flat = draw.choice(len(frequency), int(own.sum()), p=frequency / frequency.sum())
    drawn = [part.tolist() for part in np.split(flat, np.cumsum(own)[:-1])]
    order = np.argsort(-frequency, kind="stable")[: int(np.median(lengths))]
    return drawn, order[frequency[order] > 0].tolist()
