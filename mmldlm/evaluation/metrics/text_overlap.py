"""Overlap of the ids of sampled texts with their references: set-F1, exact match, BLEU; `strings`
has that of words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mmldlm.evaluation.statistics import Estimate
from mmldlm.utils.counter_rng import Stream, generator

_ORDERS = 4
_RESAMPLES = 200


def token_f1(written: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> np.ndarray:
    """Return [N] F1 scores in 0 .. 1 between the sets of token ids of each pair (without EOS)."""
    scores = np.zeros(len(written))
    for i, (text, reference) in enumerate(zip(written, references)):
        text, reference = set(text), set(reference)
        common = len(text & reference)
        if common:
            scores[i] = 2 * common / (len(text) + len(reference))
    return scores


def exact_match(
    written: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return [N] bool: the same ids in the same order."""
    return np.array(
        [list(text) == list(reference) for text, reference in zip(written, references)]
    )


def piece_bleu(
    written: Sequence[Sequence[int]], references: Sequence[Sequence[int]], seed: int = 0
) -> Estimate:
    """Return the corpus BLEU-4 over token ids, unsmoothed, in points, with a bootstrap standard
    error.

    As Papineni et al. (ACL 2002), but over word pieces instead of words: not comparable with BLEU
    in publications, nor between tokenizers.
    """
    counts = np.array(
        [_counts(text, reference) for text, reference in zip(written, references)],
        dtype=np.float64,
    )
    draws = generator(seed, Stream.BLEU_BOOTSTRAP).integers(
        0, len(counts), (_RESAMPLES, len(counts))
    )
    samples = np.array([_score(counts[draw].sum(0)) for draw in draws])
    return Estimate(_score(counts.sum(0)), float(samples.std(ddof=1)), "points", len(counts))


def _counts(text: Sequence[int], reference: Sequence[int]) -> list[int]:
    row = [len(text), len(reference)]
    for order in range(1, _ORDERS + 1):
        grams = [
            Counter(tuple(ids[i : i + order]) for i in range(len(ids) - order + 1))
            for ids in (text, reference)
        ]
        row += [sum((grams[0] & grams[1]).values()), sum(grams[0].values())]
    return row


def _score(total: np.ndarray) -> float:
    matched, possible = total[2::2], total[3::2]
    if (matched == 0).any():
        return 0.0
    brevity = min(0.0, 1.0 - total[1] / total[0])
    return float(100 * np.exp(brevity + np.log(matched / possible).mean()))
