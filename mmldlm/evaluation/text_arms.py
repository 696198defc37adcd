"""Strings written from latents, beside what reaches such figures without the model: floors and
known sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmldlm.data.store import Store
from mmldlm.errors import UserError
from mmldlm.evaluation.floors import (
    NEAR_DUPLICATE,
    Neighbors,
    nearest_training_sentences,
    unigram_texts,
)
from mmldlm.evaluation.metrics import strings
from mmldlm.evaluation.sentences import Sentences
from mmldlm.evaluation.statistics import Difference, Estimate, mean, paired_bootstrap
from mmldlm.evaluation.suite import Log
from mmldlm.sampling.pretrained import Pretrained

Arms = dict[str, dict[str, Estimate]]
_APART = "_without_near_duplicates"


@dataclass
class TextArms:
    """Figures of several ways to a text for each latent.

    Attributes:
        arms: name -> figures of `strings`, for the model and the floors.
        differences: name -> figure -> paired difference.
        conditions: entries of the report.
        notes: what is missing, and why.
    """

    arms: Arms = field(default_factory=dict)
    differences: dict[str, dict[str, Difference]] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def decode(pretrained: Pretrained, tokens: Sequence[Sequence[int]]) -> list[str]:
    """Return ids as strings, without special tokens and white space at the ends."""
    return [
        text.strip()
        for text in pretrained.tokenizer.batch_decode(list(tokens), skip_special_tokens=True)
    ]


class Scorer:
    """Scores texts against the sentences, as the tokenizer writes these (vec2text decodes its
    references, too).

    Args:
        pretrained: whose tokenizer decodes.
        sentences: the references.
        with_bleu: False without sacrebleu.
        seed: of the bootstrap.
    """

    def __init__(self, pretrained: Pretrained, sentences: Sentences, with_bleu: bool, seed: int):
        self.pretrained, self.sentences, self.with_bleu, self.seed = (
            pretrained,
            sentences,
            with_bleu,
            seed,
        )
        self.references = decode(pretrained, sentences.tokens)
        self.lengths = np.array([len(text) for text in sentences.tokens])

    def overlap(self, tokens: Sequence[Sequence[int]]) -> tuple[strings.Overlap, np.ndarray]:
        """Score N texts of ids; also return [N] bool: the number of tokens is right."""
        found = strings.compare(decode(self.pretrained, tokens), self.references, self.with_bleu)
        return found, np.array([len(text) for text in tokens]) == self.lengths

    def estimates(
        self, scores: tuple[strings.Overlap, np.ndarray], keep: np.ndarray | None = None
    ) -> dict:
        """Return the figures of all rows, or of those where keep [N] is True."""
        overlap, is_exact = scores
        if keep is not None:
            overlap, is_exact = overlap.rows(keep), is_exact[keep]
        return overlap.estimates(self.seed) | {"length_exact": mean(is_exact, strings.POINTS, 100)}


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
        store: whose training split gives the floors.
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
        found.arms.setdefault(name, {}).update(strings.set_figures(decode(pretrained, texts)))
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
        {name: strings.set_figures(decode(pretrained, tokens)) for name, tokens in texts.items()}
    )


def _has_bleu(found: TextArms) -> bool:
    try:
        found.conditions["bleu"] = strings.bleu_signatures()
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
    overlap = strings.compare(decode(scorer.pretrained, written), originals, scorer.with_bleu)
    estimates = overlap.estimates(scorer.seed)
    return {
        f"{key}_original": estimates[key]
        for key in ("sentence_bleu", "exact_match")
        if key in estimates
    }


def _add_nearest(
    found: TextArms,
    scorer: Scorer,
    scores: tuple[strings.Overlap, np.ndarray],
    train: Store,
    neighbors: Neighbors,
) -> None:
    """Add the nearest training sentences, the near-duplicate split and the model's differences to
    this floor.
    """
    copies = [row.tolist() for row in train.get(neighbors.rows).tokens]
    floor, keep = scorer.overlap(copies), neighbors.cosines <= NEAR_DUPLICATE
    name, cosine = "nearest_training_sentence", "reencoded_cosine"
    found.arms[name] = scorer.estimates(floor) | {cosine: mean(neighbors.cosines, "cosine")}
    found.conditions["near_duplicates"] = {
        "cosine_above": NEAR_DUPLICATE,
        "count": int((~keep).sum()),
        "training_sentences_compared": neighbors.num_compared,
        "training_sentences": len(train),
    }
    found.differences[f"model_minus_{name}"] = differences(scores[0], floor[0], scorer.seed)
    if 2 <= keep.sum() < len(keep):
        rest = {cosine: mean(neighbors.cosines[keep], "cosine")}
        found.arms["model" + _APART] = scorer.estimates(scores, keep)
        found.arms[name + _APART] = scorer.estimates(floor, keep) | rest
        apart = differences(scores[0].rows(keep), floor[0].rows(keep), scorer.seed)
        found.differences[f"model_minus_{name}{_APART}"] = apart


def differences(
    first: strings.Overlap, second: strings.Overlap, seed: int
) -> dict[str, Difference]:
    """Return first - second of two arms on the same sentences in points, with 95 % intervals
    (`paired_bootstrap`).
    """
    found = {}
    if first.bleu is not None and second.bleu is not None:
        pairs = strings.sentence_bleu(first.bleu), strings.sentence_bleu(second.bleu)
        found["sentence_bleu"] = paired_bootstrap(*pairs, seed, unit=strings.POINTS)
    for name in ("word_f1", "exact_match"):
        values = 100.0 * getattr(first, name), 100.0 * getattr(second, name)
        found[name] = paired_bootstrap(*values, seed, unit=strings.POINTS)
    return found
