"""Strings written from latents, beside what reaches such figures without the model: floors and
known sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mmldlm.data.store import Store
from mmldlm.errors import UserError
from mmldlm.evaluation import metrics
from mmldlm.evaluation.sentences import Log, Sentences, spread
from mmldlm.evaluation.statistics import Difference, Estimate, mean, paired_bootstrap
from mmldlm.sampling.judge import strings_of
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.counter_rng import Stream, generator

Arms = dict[str, dict[str, Estimate]]
_APART = "_without_near_duplicates"


@dataclass
class TextArms:
    """Figures of several ways to a text for each latent.

    Attributes:
        arms: Name -> figures of `strings`, for the model and the floors.
        differences: Name -> figure -> paired difference.
        conditions: Conditions for the report.
        notes: What is missing, and why.
    """

    arms: Arms = field(default_factory=dict)
    differences: dict[str, dict[str, Difference]] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def decode(pretrained: Pretrained, tokens: Sequence[Sequence[int]]) -> list[str]:
    """Return ids as strings, without special tokens and white space at the ends."""
    return strings_of(pretrained.tokenizer, tokens)


def written_records(
    pretrained: Pretrained, sentences: Sentences, written: list[list[int]], rows: list[int]
) -> list[dict[str, Any]]:
    """Return the texts that were written for some sentences, with their set-F1, for a report."""
    own = [written[row] for row in rows]
    scores = metrics.token_f1(own, [sentences.tokens[row] for row in rows])
    return [
        {"written": text, "set_f1": round(float(score), 3)}
        for text, score in zip(decode(pretrained, own), scores)
    ]


class Scorer:
    """Scores texts against the sentences, as the tokenizer writes these (vec2text decodes its
    references, too).

    Args:
        pretrained: Model whose tokenizer decodes.
        sentences: References.
        with_bleu: False without sacrebleu.
        seed: Seed of the bootstrap.
    """

    def __init__(self, pretrained: Pretrained, sentences: Sentences, with_bleu: bool, seed: int):
        self.pretrained, self.sentences = pretrained, sentences
        self.with_bleu, self.seed = with_bleu, seed
        self.references = decode(pretrained, sentences.tokens)
        self.lengths = np.array([len(text) for text in sentences.tokens])

    def overlap(self, tokens: Sequence[Sequence[int]]) -> metrics.Overlap:
        """Score N texts of ids."""
        found = metrics.compare(decode(self.pretrained, tokens), self.references, self.with_bleu)
        return replace(found, length_exact=np.array(list(map(len, tokens))) == self.lengths)

    def estimates(self, scores: metrics.Overlap) -> dict[str, Estimate]:
        """Return the figures of scores."""
        return scores.estimates(self.seed)


def measure_text_arms(
    pretrained: Pretrained,
    store: Store,
    sentences: Sentences,
    written: list[list[int]],
    seed: int,
    log: Log,
) -> TextArms:
    """Score the written texts and the floors.

    Arms: `model`; `nearest_training_sentence` (of the largest cosine); `shuffled` (the text
    written from another sentence's latent); `unigram_draws`, `most_frequent_tokens`
    (`unigram_texts`); `sentences` (figures of the references themselves as a set). The first two
    come a second time without the sentences that have a training neighbor of a cosine above
    NEAR_DUPLICATE.

    Args:
        store: Store whose training split gives the floors.
        written: N lists of ids, one for each sentence.
    """
    found = TextArms()
    scorer = Scorer(pretrained, sentences, _has_bleu(found), seed)
    has_train = "train" in store.manifest["splits"]
    progress = log(f"figures of the written strings{' and of floors' * has_train}") or (
        lambda done, total: None
    )
    total = 3 if has_train else 1
    scores = scorer.overlap(written)
    found.arms["model"] = scorer.estimates(scores) | _against_originals(scorer, written, found)
    found.arms["shuffled"] = scorer.estimates(
        scorer.overlap([written[row] for row in sentences.shuffled_index])
    )
    for name, texts in (("model", written), ("sentences", sentences.tokens)):
        found.arms.setdefault(name, {}).update(metrics.set_figures(decode(pretrained, texts)))
    progress(1, total)
    if not has_train:
        found.notes.append(
            "the store has no training split: no floors from training sentences, no"
            " near-duplicates"
        )
        return found
    train = Store(store.root, "train")
    drawn, frequent = unigram_texts(train, len(sentences), seed)
    found.arms["unigram_draws"] = scorer.estimates(scorer.overlap(drawn))
    found.arms["most_frequent_tokens"] = scorer.estimates(
        scorer.overlap([frequent] * len(sentences))
    )
    progress(2, total)
    _add_nearest(
        found, scorer, scores, train, nearest_training_sentences(train, sentences.latents)
    )
    progress(3, total)
    return found


def measure_set(
    pretrained: Pretrained, sentences: Sentences, written: list[list[int]]
) -> TextArms:
    """Figures of texts that were written without a latent, beside those of as many sentences."""
    texts = {"model": written, "sentences": sentences.tokens}
    return TextArms(
        {name: metrics.set_figures(decode(pretrained, tokens)) for name, tokens in texts.items()}
    )


def _has_bleu(found: TextArms) -> bool:
    try:
        found.conditions["bleu"] = metrics.bleu_signatures()
    except UserError as error:
        found.notes.append(f"no BLEU: {error.expected} {error.found}; {error.fix}")
        return False
    return True


def _against_originals(
    scorer: Scorer, written: list[list[int]], found: TextArms
) -> dict[str, Estimate]:
    """Figures against the sentences before they were tokenized; a note if the tokenizer changes
    them.
    """
    originals = [text.strip() for text in scorer.sentences.texts]
    changed = sum(a != b for a, b in zip(scorer.references, originals))
    found.conditions["sentences_changed_by_tokenizer"] = changed
    if changed:
        found.notes.append(
            f"the tokenizer changes {changed} of the {len(originals)} sentences (case, spaces):"
            " figures of strings compare with sentences as it writes them, those that end in"
            " _original with the text before it"
        )
    overlap = metrics.compare(decode(scorer.pretrained, written), originals, scorer.with_bleu)
    estimates = overlap.estimates(scorer.seed)
    return {
        f"{key}_original": estimates[key]
        for key in ("sentence_bleu", "exact_match")
        if key in estimates
    }


def _add_nearest(
    found: TextArms,
    scorer: Scorer,
    scores: metrics.Overlap,
    train: Store,
    neighbors: Neighbors,
) -> None:
    """Add the nearest training sentences, the near-duplicate split and the model's differences to
    this floor.
    """
    copies = [row.tolist() for row in train.tokens(neighbors.rows)]
    floor, keep = scorer.overlap(copies), neighbors.cosines <= NEAR_DUPLICATE
    name, cosine = "nearest_training_sentence", "reencoded_cosine"
    found.arms[name] = scorer.estimates(floor) | {cosine: mean(neighbors.cosines, "cosine")}
    found.conditions["near_duplicates"] = {
        "cosine_above": NEAR_DUPLICATE,
        "count": int((~keep).sum()),
        "training_sentences_compared": neighbors.num_compared,
        "training_sentences": len(train),
    }
    found.differences[f"model_minus_{name}"] = differences(scores, floor, scorer.seed)
    if 2 <= keep.sum() < len(keep):
        rest = {cosine: mean(neighbors.cosines[keep], "cosine")}
        scores, floor = scores.rows(keep), floor.rows(keep)
        found.arms["model" + _APART] = scorer.estimates(scores)
        found.arms[name + _APART] = scorer.estimates(floor) | rest
        apart = differences(scores, floor, scorer.seed)
        found.differences[f"model_minus_{name}{_APART}"] = apart


def differences(
    first: metrics.Overlap, second: metrics.Overlap, seed: int
) -> dict[str, Difference]:
    """Return first - second of two arms on the same sentences in points, with 95 % intervals
    (`paired_bootstrap`).
    """
    found = {}
    if first.bleu is not None and second.bleu is not None:
        pairs = metrics.sentence_bleu(first.bleu), metrics.sentence_bleu(second.bleu)
        found["sentence_bleu"] = paired_bootstrap(*pairs, seed, unit=metrics.POINTS)
    for name in ("word_f1", "exact_match"):
        values = 100.0 * getattr(first, name), 100.0 * getattr(second, name)
        found[name] = paired_bootstrap(*values, seed, unit=metrics.POINTS)
    return found


# A sentence with a training neighbor of a higher cosine is a near-duplicate: a look-up would
# answer it, too.
NEAR_DUPLICATE = 0.95
# Training sentences compared, spread over the split; it bounds the time, blocks bound the memory.
MAX_COMPARED = 1_000_000
MAX_COUNTED = 65_536  # training texts whose tokens are counted, spread over the split
_BLOCK = 1 << 22  # cosines in memory at once: 16 MB


@dataclass(frozen=True)
class Neighbors:
    """The training sentence nearest to each of N latents.

    Attributes:
        rows: [N] int64 rows of the training split.
        cosines: [N] fp32.
        num_compared: Training sentences that were compared; fewer than the split has if it is
            larger than MAX_COMPARED.
    """

    rows: np.ndarray
    cosines: np.ndarray
    num_compared: int


def nearest_training_sentences(train: Store, latents: np.ndarray) -> Neighbors:
    """Find the training sentence of the largest cosine for each latent, in blocks of bounded
    memory.

    Args:
        train: Training split; of a large one about MAX_COMPARED sentences are compared.
        latents: [N, D], or [N, M, D]: the mean of a text's latents is compared.
    """
    queries = _units(latents)
    best = np.full(len(queries), -np.inf, dtype=np.float32)
    rows, num_compared = np.zeros(len(queries), dtype=np.int64), 0
    size = max(1, _BLOCK // len(queries))
    for first, block in train.latent_blocks(MAX_COMPARED):
        num_compared += len(block)
        for start in range(0, len(block), size):
            cosines = queries @ _units(block[start : start + size]).T
            largest = cosines.max(1)
            rows = np.where(largest > best, first + start + cosines.argmax(1), rows)
            best = np.maximum(best, largest)
    return Neighbors(rows, best, num_compared)


def _units(latents: np.ndarray) -> np.ndarray:
    return metrics.normalize(metrics.pool_latents(latents)).astype(np.float32)


def unigram_texts(train: Store, count: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Return texts of tokens drawn by their frequency in training, and the text of the most
    frequent tokens.

    Lengths are drawn from those of training texts; the second text has their median length and
    holds each token once, which is the constant text of about the best set-F1.
    """
    tokens = train.get(spread(len(train), MAX_COUNTED)).tokens
    frequency = np.bincount(np.concatenate(tokens))
    lengths = np.array([len(text) for text in tokens])
    draw = generator(seed, Stream.UNIGRAM_FLOOR)
    own = draw.choice(lengths, count)
    flat = draw.choice(len(frequency), int(own.sum()), p=frequency / frequency.sum())
    drawn = [part.tolist() for part in np.split(flat, np.cumsum(own)[:-1])]
    order = np.argsort(-frequency, kind="stable")[: int(np.median(lengths))]
    return drawn, order[frequency[order] > 0].tolist()
