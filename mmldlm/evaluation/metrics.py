"""Figures of written strings under published definitions: BLEU, F1 over words, exact match,
repetition, diversity.

BLEU is sacrebleu's (Post, WMT 2018; extra `eval`), so that it compares with
publications. Words of the other figures are runs of letters, digits and _, or single other
characters; case is kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mmldlm.errors import UserError
from mmldlm.evaluation.statistics import Estimate, mean, ratio
from mmldlm.utils.counter_rng import Stream, generator

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

POINTS = "points"
_WORD = re.compile(r"\w+|[^\w\s]")
_RESAMPLES = 400


def words(text: str) -> list[str]:
    """Split into runs of letters, digits and _, and single other characters."""
    return _WORD.findall(text)


@dataclass(frozen=True)
class Overlap:
    """Scores of N strings against their references; see `compare`.

    Attributes:
        word_set_f1: [N] F1 of the sets of words, 0 .. 1.
        word_f1: [N] F1 of the multisets of words, 0 .. 1.
        exact_match: [N] bool.
        bleu: [N, 10] int64, of `bleu_counts`; None where sacrebleu was not wanted.
        length_exact: [N] bool, the number of tokens is right; None: not known from strings.
    """

    word_set_f1: np.ndarray
    word_f1: np.ndarray
    exact_match: np.ndarray
    bleu: np.ndarray | None = None
    length_exact: np.ndarray | None = None

    def rows(self, keep: np.ndarray) -> Overlap:
        """Return the scores of some rows: [N] bool or an index."""
        scores = {name: values for name, values in vars(self).items() if values is not None}
        return Overlap(**{name: values[keep] for name, values in scores.items()})

    def estimates(self, seed: int = 0) -> dict[str, Estimate]:
        """Return every figure in points; the seed is that of corpus BLEU's bootstrap error."""
        found = {}
        if self.bleu is not None:
            found["sentence_bleu"] = mean(sentence_bleu(self.bleu), POINTS)
            found["sentence_bleu_effective_order"] = mean(
                sentence_bleu(self.bleu, effective_order=True), POINTS
            )
            found["corpus_bleu"] = corpus_bleu(self.bleu, seed)
        found["word_f1"] = mean(self.word_f1, POINTS, 100)
        found["word_set_f1"] = mean(self.word_set_f1, POINTS, 100)
        found["exact_match"] = mean(self.exact_match, POINTS, 100)
        if self.length_exact is not None:
            found["length_exact"] = mean(self.length_exact, POINTS, 100)
        return found


def compare(written: Sequence[str], references: Sequence[str], with_bleu: bool = True) -> Overlap:
    """Score each string against its reference.

    Word-set F1 is vec2text's "token F1" (arXiv 2310.06816) up to the split into words, which is
    NLTK's there. Exact match is equality of the strings, case kept.

    Raises:
        UserError: with_bleu, and sacrebleu is not installed.
    """
    assert len(written) == len(references)
    bags = [
        (Counter(words(text)), Counter(words(reference)))
        for text, reference in zip(written, references)
    ]
    return Overlap(
        np.array([_f1(Counter(set(text)), Counter(set(reference))) for text, reference in bags]),
        np.array([_f1(text, reference) for text, reference in bags]),
        np.array([text == reference for text, reference in zip(written, references)]),
        bleu_counts(written, references) if with_bleu else None,
    )


def _f1(text: Counter, reference: Counter) -> float:
    common = (text & reference).total()
    return 2 * common / (text.total() + reference.total()) if common else 0.0


def load_sacrebleu() -> type[BLEU]:
    """Return sacrebleu's class BLEU.

    Raises:
        UserError: sacrebleu is not installed. Nothing takes its place: its tokens and smoothing
            are the definition.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise UserError(
            "sacrebleu, for BLEU", "it is not installed", "pip install 'mmldlm[eval]'"
        ) from None
    return BLEU


def bleu_counts(written: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Return sacrebleu's counts of each pair, [N, 10] int64, from which sentence and corpus BLEU
    follow.

    The columns are the words of text and reference (13a, case kept), matching n-grams and n-grams
    for n = 1 .. 4.

    Raises:
        UserError: sacrebleu is not installed.
    """
    scorer = load_sacrebleu()(effective_order=True)
    scores = [
        scorer.sentence_score(text, [reference]) for text, reference in zip(written, references)
    ]
    rows = [[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores]
    return np.array(rows, dtype=np.int64).reshape(-1, 10)


def _bleu(row: np.ndarray, effective_order: bool = False) -> float:
    length, reference, *counts = row.tolist()
    score = load_sacrebleu().compute_bleu(
        counts[:4],
        counts[4:],
        length,
        reference,
        smooth_method="exp",
        effective_order=effective_order,
    )
    return score.score


def sentence_bleu(counts: np.ndarray, effective_order: bool = False) -> np.ndarray:
    """Return [N] BLEU of single sentences in points, exp smoothing; counts are those of
    `bleu_counts`.

    vec2text reports the mean of these without effective order: a text of fewer than 4 words scores
    0 even if it is right. With effective order BLEU stops at the longest n-gram that the text has.
    """
    return np.array([_bleu(row, effective_order) for row in counts])


def corpus_bleu(counts: np.ndarray, seed: int = 0) -> Estimate:
    """Return sacrebleu's corpus BLEU in points, with a bootstrap standard error over sentences."""
    choose, total = generator(seed, Stream.BLEU_BOOTSTRAP), len(counts)
    samples = [_bleu(counts[choose.integers(0, total, total)].sum(0)) for _ in range(_RESAMPLES)]
    return Estimate(_bleu(counts.sum(0)), float(np.std(samples, ddof=1)), POINTS, total)


def bleu_signatures() -> dict[str, str]:
    """Return sacrebleu's signatures of sentence and corpus BLEU, and of BLEU with effective order.

    Raises:
        UserError: sacrebleu is not installed.
    """
    found = {}
    for name, effective_order in (("bleu", False), ("bleu_effective_order", True)):
        scorer = load_sacrebleu()(effective_order=effective_order)
        # It does not know the number of references before it scores.
        scorer.corpus_score(["a"], [["a"]])
        found[name] = str(scorer.get_signature())
    return found


def set_figures(texts: Sequence[str]) -> dict[str, Estimate]:
    """Return figures of a set of texts that need no reference.

    All but the first two depend on the number of texts: compare only sets of the same number.

    - adjacent_repeats: share of words that repeat the word before.
    - repeated_bigrams: 1 - different bigrams / bigrams of a text, mean over texts (seq-rep-2,
      arXiv 1908.04319).
    - distinct_2: different bigrams of the whole set / its bigrams (arXiv 1510.03055).
    - unigram_entropy: of the words of the whole set, in nats a word, without correction for the
      bias of few words.
    - words_per_text.
    """
    split = [words(text) for text in texts]
    bigrams = [list(pairwise(text)) for text in split]
    repeats = np.array([sum(a == b for a, b in text) for text in bigrams])
    found = {
        "adjacent_repeats": ratio(
            repeats, np.array([len(text) for text in bigrams]), "share of words"
        )
    }
    within = [1 - len(set(text)) / len(text) if text else 0.0 for text in bigrams]
    found["repeated_bigrams"] = mean(np.array(within), "share of bigrams")
    found["distinct_2"] = _jackknife(bigrams, _distinct, "share of bigrams")
    found["unigram_entropy"] = _jackknife(split, _entropy, "nats/word")
    found["words_per_text"] = mean(np.array([len(text) for text in split]), "words")
    return found


def _jackknife(
    texts: Sequence[Sequence], figure: Callable[[np.ndarray], float], unit: str
) -> Estimate:
    """Return a figure of how often the items of a whole set of texts occur, and its jackknife
    error: a bootstrap would repeat texts, hence their words.
    """
    numbers: dict[Any, int] = {}
    coded = [
        np.array([numbers.setdefault(item, len(numbers)) for item in text], dtype=np.int64)
        for text in texts
    ]
    total = np.bincount(np.concatenate(coded), minlength=len(numbers))
    left_out = [figure(total - np.bincount(text, minlength=len(numbers))) for text in coded]
    error = float(np.std(left_out) * np.sqrt(len(texts) - 1))
    return Estimate(figure(total), error, unit, len(texts))


def _distinct(counts: np.ndarray) -> float:
    """Return the different items over all items."""
    return float((counts > 0).sum() / max(counts.sum(), 1))


def _entropy(counts: np.ndarray) -> float:
    """Return the entropy of items in nats: log n - sum c log c / n."""
    size, present = counts.sum(), counts[counts > 0]
    return float(np.log(size) - (present * np.log(present)).sum() / size) if size else 0.0


def token_f1(written: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> np.ndarray:
    """Return [N] F1 scores in 0 .. 1 between the sets of token ids of each pair (without EOS)."""
    pairs = zip(written, references)
    return np.array([_f1(Counter(set(text)), Counter(set(other))) for text, other in pairs])


def exact_match(
    written: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return [N] bool: the same ids in the same order."""
    return np.array(
        [list(text) == list(reference) for text, reference in zip(written, references)]
    )


_BLOCK = 1024


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Scale [..., D] to norm 1; a zero vector stays zero (its cosine with any vector is 0)."""
    vectors = np.asarray(vectors, dtype=np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def cosine_similarity(predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return [N] cosines of the rows of two [N, D]; for [N, M, D], means over the M latents of a
    text.
    """
    return mean_over_latents((normalize(predictions) * normalize(targets)).sum(-1))


def mean_over_latents(values: np.ndarray) -> np.ndarray:
    """Return [N] unchanged; for [N, M], the means over the latents of a text."""
    return values if values.ndim == 1 else values.mean(1)


def pool_latents(latents: np.ndarray) -> np.ndarray:
    """Return one vector per text, [N, D]; for [N, M, D], the means over the latents of a text."""
    return latents if latents.ndim == 2 else latents.mean(1)


def ranks(
    predictions: np.ndarray,
    gallery: np.ndarray,
    target_index: np.ndarray,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Return how many vectors of other groups are as near to a query by cosine as the nearest of
    its target's group, or nearer, [Q] int64.

    A tie counts against the query, so identical vectors retrieve nothing.

    Args:
        predictions: [Q, D] queries.
        gallery: [N, D].
        target_index: [Q] rows of the gallery.
        groups: [N]; without them each vector is a group of its own, and its rank is returned.
    """
    groups = np.arange(len(gallery)) if groups is None else groups
    gallery = normalize(gallery)
    result = np.empty(len(predictions), dtype=np.int64)
    for start in range(0, len(predictions), _BLOCK):
        rows = slice(start, start + _BLOCK)
        similarity = normalize(predictions[rows]) @ gallery.T
        is_hit = groups[target_index[rows], None] == groups[None]
        best = np.where(is_hit, similarity, -np.inf).max(1, keepdims=True)
        result[rows] = ((similarity >= best - 1e-12) & ~is_hit).sum(1)
    return result
