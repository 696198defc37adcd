"""Edits of a text that the model finds likely given its latent, and the change of embedding that
it expects of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.inference.judges import estimate_embeddings, estimates_embeddings
from mmldlm.models.base import EncodedLatent, LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.decoding import check_finite
from mmldlm.sampling.judge import SamplingCost, cosines
from mmldlm.sampling.latents import pad_texts, steps_given_text
from mmldlm.sampling.model import device_of
from mmldlm.tasks.text_task import Pretrained

SUBSTITUTE, INSERT, DELETE = range(3)
# Tokens that are tried at each position and in each gap.
TOKENS_A_POSITION = 16
# What a cosine of 1 is worth beside the model's log-probability, in nats. With far more, edits are
# chosen that the encoder likes and the model does not; without, fewer come nearer (measured in
# docs/sampling.md).
COSINE_NATS = 100.0

Text = tuple[int, ...]


@dataclass
class Edits:
    """Edits of one text.

    Attributes:
        kinds: SUBSTITUTE, INSERT or DELETE. [K] int64
        positions: Position in the text; an insertion is in front of it. [K] int64
        tokens: New token; -1 for a deletion. [K] int64
        log_ratios: Log p(new text) - log p(text) by the model, in nats, of the token alone: what
            another length changes at the other tokens is not in it. [K] fp64
        shifts: Expected change of the embedding, [K, M, D] fp32; None for a model that estimates
            no embeddings.
    """

    kinds: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    log_ratios: np.ndarray
    shifts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.kinds)

    def scores(self, embedding: np.ndarray, target: np.ndarray) -> np.ndarray:
        """How promising each edit is, in nats: its log-ratio, and COSINE_NATS times the cosine
        expected after it.

        The expected embedding is the text's true one plus the shift: the error of the estimate at
        the text cancels.

        Args:
            embedding: Embedding of the text by the judge. [M, D]
            target: The latent. [M, D]

        Returns:
            [K] fp64.
        """
        expected = np.broadcast_to(embedding, (len(self), *embedding.shape))
        if self.shifts is not None:
            expected = expected + self.shifts
        return self.log_ratios + COSINE_NATS * cosines(
            expected, np.broadcast_to(target, expected.shape)
        )

    def apply(self, text: Text, row: int) -> Text:
        """The text after one edit."""
        return _edit(text, int(self.kinds[row]), int(self.positions[row]), int(self.tokens[row]))


class Question(NamedTuple):
    """A row that the model reads.

    Attributes:
        source: Index of the text.
        kind: SUBSTITUTE or INSERT.
        words: Ids of the text, with [MASK] or a hole where the model is asked.
        places: Positions in `words` that the model is asked about.
        old: Tokens that stand there; -1 for none.
    """

    source: int
    kind: int
    words: Text
    places: Sequence[int]
    old: Sequence[int]


class Editor:
    """Proposes edits of texts, by the model's own probabilities at one masked position at a time.

    Args:
        pretrained: A model of a task of masked diffusion.
        latents: Latents in the encoder's space. [N, D] or [N, M, D]
        cost: Cost to which passes of the model are added.
        batch_tokens: Maximum of padded positions per pass.

    Attributes:
        most: Number of edits of each kind that are looked at, the likeliest.
    """

    most: ClassVar[dict[int, int]] = {SUBSTITUTE: 40, INSERT: 16, DELETE: 8}

    def __init__(
        self, pretrained: Pretrained, latents: Tensor, cost: SamplingCost, batch_tokens: int = 4096
    ):
        self._pretrained, self._cost, self._batch_tokens = pretrained, cost, batch_tokens
        model = pretrained.model
        with torch.inference_mode():
            points = model.scale_latents(latents.to(device_of(model)))
            self._encoded = model.encode_latents(LatentInputs(points))
        self.estimates_shifts = estimates_embeddings(pretrained)
        self._special = [
            model.config.mask_token_id,
            model.config.pad_token_id,
            model.config.eos_token_id,
        ]

    @property
    def depth(self) -> int:
        """Passes of `propose` one after the other."""
        return 1 + (
            steps_given_text(self._pretrained.latent_diffusion) if self.estimates_shifts else 0
        )

    def propose(
        self, texts: Sequence[Text], owners: Sequence[int], embedded: np.ndarray | None = None
    ) -> list[Edits]:
        """Return the edits of each text, likeliest first within a kind; texts that they lead to
        are distinct.

        Args:
            texts: Ids without EOS.
            owners: Index of each text's latent.
            embedded: Embeddings of the texts by the judge, which a subclass may read. [T, M, D]

        Raises:
            MmldlmError: NaN logits or estimates.
        """
        if not texts:
            return []
        answers_by_text: list[list[Answer]] = [[] for _ in texts]
        with torch.inference_mode():
            for question, answer in self._answers(texts, owners, embedded):
                answers_by_text[question.source].append(answer)
        edits = [_edits(text, answers, self.most) for text, answers in zip(texts, answers_by_text)]
        if self.estimates_shifts:
            self._estimate_shifts(texts, edits)
        return edits

    def _answers(
        self, texts: Sequence[Text], owners: Sequence[int], embedded: np.ndarray | None
    ) -> Iterator[tuple[Question, Answer]]:
        """What the model predicts at each position and gap of each text."""
        encoded = self._encode(owners)
        mask = self._pretrained.model.config.mask_token_id
        for questions, log_probs in self._log_probs(
            [*self._substitutions(texts), *self._gaps(texts, mask)], encoded
        ):
            yield from self._likeliest(questions, log_probs)

    def _encode(self, owners: Sequence[int]) -> EncodedLatent:
        """The latents of the texts, as the model's blocks read them."""
        return self._encoded.select(torch.tensor(owners, device=device_of(self._pretrained.model)))

    def _substitutions(self, texts: Sequence[Text]) -> list[Question]:
        """A row with one [MASK] for each position of each text."""
        mask = self._pretrained.model.config.mask_token_id
        return [
            Question(
                source, SUBSTITUTE, _edit(text, SUBSTITUTE, position, mask), (position,), (old,)
            )
            for source, text in enumerate(texts)
            for position, old in enumerate(text)
        ]

    def _gaps(self, texts: Sequence[Text], token: int) -> list[Question]:
        """A row with a token in each gap of each text that is not as long as it can be."""
        # EOS needs a position.
        longest = self._pretrained.model.config.max_seq_len - 1
        return [
            Question(source, INSERT, _edit(text, INSERT, position, token), (position,), (-1,))
            for source, text in enumerate(texts)
            if len(text) < longest
            for position in range(len(text) + 1)
        ]

    def _log_probs(
        self,
        questions: list[Question],
        encoded: EncodedLatent,
        read: Callable[..., Tensor] | None = None,
    ) -> Iterator[tuple[list[Question], Tensor]]:
        """Log-probabilities [P, V] at the P places of a batch of rows, one row after the other;
        all batches.

        Args:
            read: Function that returns their logits; None: `_logits`.
        """
        config, device = self._pretrained.model.config, device_of(self._pretrained.model)
        lengths = [len(question.words) + 1 for question in questions]
        for scored in {len(one.places) for one in questions}:
            self._count(
                [n for n, one in zip(lengths, questions) if len(one.places) == scored], scored
            )
        for batch in token_budget_batches(lengths, self._batch_tokens):
            asked = [questions[row] for row in batch.tolist()]
            ids, real = pad_texts(
                [one.words for one in asked], config.eos_token_id, config.pad_token_id, device
            )
            places = [
                i * ids.shape[1] + position
                for i, one in enumerate(asked)
                for position in one.places
            ]
            sources = torch.tensor([one.source for one in asked], device=device)
            logits = (read or self._logits)(
                ids, real, torch.tensor(places, device=device), encoded.select(sources)
            )
            logits[:, self._special] = float("-inf")
            yield asked, logits.log_softmax(-1)

    def _likeliest(
        self, questions: list[Question], log_probs: Tensor
    ) -> Iterator[tuple[Question, Answer]]:
        """The likeliest tokens at each position of the questions, from log_probs [P, V]; NaN is an
        error.
        """
        values, index = log_probs.topk(
            min(TOKENS_A_POSITION, log_probs.shape[-1] - len(self._special))
        )
        check_finite(values)
        old = torch.tensor(
            [max(token, 0) for question in questions for token in question.old],
            device=log_probs.device,
        )
        answers = zip(
            index.tolist(), values.tolist(), log_probs.gather(1, old[:, None])[:, 0].tolist()
        )
        for question in questions:
            for position in question.places:
                yield question, Answer(question.kind, position, *next(answers))

    def _logits(self, ids: Tensor, real: Tensor, places: Tensor, encoded: EncodedLatent) -> Tensor:
        """Logits [P, V] at places [P] of B * S, of rows [B, S] with one [MASK] each."""
        t = self._pretrained.text_diffusion.timestep_of(
            1 / real.sum(1, dtype=torch.float64)
        ).float()
        out = self._pretrained.model(TextInputs(ids, t, real), encoded, TokenQuery(places))
        return out.text.logits

    def _estimate_shifts(self, texts: Sequence[Text], found: list[Edits]) -> None:
        """Fill in `shifts`: embeddings after an edit minus those before, both estimated by the
        model.
        """
        changed = [
            edits.apply(text, row)
            for text, edits in zip(texts, found)
            for row in range(len(edits))
        ]
        embedded = estimate_embeddings(self._pretrained, [*texts, *changed], self._batch_tokens)
        embedded = embedded.reshape(len(embedded), -1, embedded.shape[-1])
        start = len(texts)
        for before, edits in zip(embedded, found):
            edits.shifts = embedded[start : start + len(edits)] - before
            start += len(edits)
        self._count(
            [len(text) + 1 for text in (*texts, *changed)], scored=0, passes=self.depth - 1
        )

    def _count(self, lengths: Sequence[int], scored: int, passes: int = 1) -> None:
        # A task of masked diffusion, which has `pass_flops`.
        task: Any = self._pretrained.task
        config = self._pretrained.model.config
        counts = np.bincount(lengths)
        flops = sum(
            counts[n] * task.pass_flops(config, n, scored) for n in np.flatnonzero(counts).tolist()
        )
        self._cost.add_rows(passes * len(lengths), passes * sum(lengths), passes * float(flops))


class Answer(NamedTuple):
    """What the model predicts at a position: the likeliest tokens, their log-probabilities, and
    that of the old token.
    """

    kind: int
    place: int
    tokens: list[int]
    log_probs: list[float]
    old_log_prob: float


def _edit(text: Text, kind: int, position: int, token: int) -> Text:
    new = () if kind == DELETE else (token,)
    return text[:position] + new + text[position + (kind != INSERT) :]


def _edits(text: Text, answers: list[Answer], most: dict[int, int]) -> Edits:
    """The likeliest edits of one text, from what the model predicts at its positions and gaps."""
    options: dict[int, list[tuple[float, int, int]]] = {SUBSTITUTE: [], INSERT: [], DELETE: []}
    for kind, position, tokens, log_probs, old in answers:
        less = old if kind == SUBSTITUTE else 0.0
        options[kind] += [(gain - less, position, token) for gain, token in zip(log_probs, tokens)]
        if kind == SUBSTITUTE and len(text) > 1:
            options[DELETE].append((-old, position, -1))
    chosen, seen = [], {text}
    for kind, candidates in options.items():
        num_chosen = 0
        for gain, position, token in sorted(
            candidates, key=lambda option: (-option[0], option[1], option[2])
        ):
            changed = _edit(text, kind, position, token)
            if changed not in seen:
                seen.add(changed)
                chosen.append((kind, position, token, gain))
                num_chosen += 1
            if num_chosen == most[kind]:
                break
    columns = list(zip(*chosen)) or [(), (), (), ()]
    return Edits(
        kinds=np.array(columns[0], dtype=np.int64),
        positions=np.array(columns[1], dtype=np.int64),
        tokens=np.array(columns[2], dtype=np.int64),
        log_ratios=np.array(columns[3], dtype=np.float64),
    )
