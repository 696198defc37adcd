"""Rounds of correction (`mmldlm sample l2t --correct`): a local search whose edits the model
proposes from a text and its embedding.

As vec2text (arXiv 2310.06816) the model reads a text, z and z - ẑ. It does not write the text
again: one pass predicts the word at every position, and so shows which words are doubtful; an
encoder then judges one edit at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from mmldlm.inference.edits import (
    DELETE,
    INSERT,
    SUBSTITUTE,
    Answer,
    Editor,
    Question,
    Text,
)
from mmldlm.inference.local_search import LocalSearchSettings, local_search
from mmldlm.models.base import LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.judge import FoundTexts, Judge, SamplingCost
from mmldlm.sampling.model import device_of
from mmldlm.tasks.corrector.model import Hypotheses
from mmldlm.tasks.text_task import MaskedTextTask, Pretrained

if TYPE_CHECKING:
    from mmldlm.models.base import EncodedLatent

STARTS, CORRECTIONS = 4, 16
"""First texts of a latent, and edits that are judged in a round.

The passes over a text name more edits that are worth a judge than local search's 8 (measured in
studies/inversion).
"""
NATS_A_COSINE = 400.0
"""What a cosine of 1 is worth beside the edits' log-ratios, in nats, when judged texts are
compared.

By the cosine alone, edits are kept that the encoder likes and the model does not (measured in
studies/inversion).
"""


def correct(
    pretrained: Pretrained,
    latents: Tensor,
    judge: Judge,
    *,
    rounds: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> FoundTexts:
    """Write texts and correct them; references are never read.

    The score of a text never falls: its cosine with its latent, plus the log-ratios of its edits
    over NATS_A_COSINE.

    Args:
        latents: Latents in the encoder's space, [N, D] (or [N, M, D]).
        judge: Judge used for this call alone, so that its counts are those of this search; it
            embeds the texts.
        rounds: Number of rounds, each of CORRECTIONS judged edits of each latent; 0: the nearest
            of STARTS first texts.
        seed, progress, options: Arguments of `local_search`.

    Raises:
        MmldlmError: NaN logits or embeddings.
    """
    settings = LocalSearchSettings(
        STARTS + rounds * CORRECTIONS,
        STARTS,
        calls_a_round=CORRECTIONS,
        cosine_a_nat=1 / NATS_A_COSINE,
    )
    return local_search(
        pretrained,
        latents,
        judge,
        settings=settings,
        editor_class=CorrectingEditor,
        seed=seed,
        progress=progress,
        **options,
    )


class CorrectingEditor(Editor):
    """Proposes edits from a text and its embedding.

    A wholly masked row beside the text predicts the word at every position, and one with a hole
    for each gap predicts what is missing. Such a row reads the words around a position as a
    hypothesis only. So the model is also asked without the hypothesis, with one [MASK] among the
    words of the text, and the mean of both log-probabilities counts. By the first alone, texts
    come as near with words that fit less (studies/inversion).
    """

    # More bring hardly nearer texts, and every one costs a pass of t2l (docs/sampling.md).
    most: ClassVar[dict[int, int]] = {SUBSTITUTE: 20, INSERT: 8, DELETE: 4}

    def __init__(
        self, pretrained: Pretrained, latents: Tensor, cost: SamplingCost, batch_tokens: int = 4096
    ):
        super().__init__(pretrained, latents, cost, batch_tokens)
        self._points = pretrained.model.scale_latents(latents.to(device_of(pretrained.model)))

    def _answers(
        self, texts: Sequence[Text], owners: Sequence[int], embedded: np.ndarray | None
    ) -> Iterator[tuple[Question, Answer]]:
        assert embedded is not None, "the embeddings of the texts"
        feedback = self._encode_feedback(owners, embedded)
        hole = self._pretrained.model.config.pad_token_id
        whole = [
            Question(i, SUBSTITUTE, text, range(len(text)), text)
            for i, text in enumerate(texts)
            if text
        ]
        corrected: dict[int, Tensor] = {}
        for questions, log_probs in self._log_probs(whole, feedback, self._logits_beside):
            parts = log_probs.split([len(one.places) for one in questions])
            corrected |= {one.source: part for one, part in zip(questions, parts)}
        for questions, log_probs in self._log_probs(
            self._substitutions(texts), self._encode(owners)
        ):
            beside = torch.stack([corrected[one.source][one.places[0]] for one in questions])
            yield from self._likeliest(questions, (log_probs + beside) / 2)
        for questions, log_probs in self._log_probs(
            self._gaps(texts, hole), feedback, self._logits_beside
        ):
            yield from self._likeliest(questions, log_probs)

    def _encode_feedback(self, owners: Sequence[int], embedded: np.ndarray) -> EncodedLatent:
        """The latents of the texts, and how far the texts' embeddings are off."""
        model, task = self._pretrained.model, cast(MaskedTextTask, self._pretrained.task)
        points = self._points[torch.tensor(owners, device=self._points.device)]
        embeddings = model.scale_latents(torch.from_numpy(embedded).to(points.device)).reshape(
            points.shape
        )
        has_hypothesis = torch.ones(len(points), dtype=torch.bool, device=points.device)
        self._cost.add_rows(0, 0.0, len(points) * task.encoding_flops(model.config))
        return model.encode_latents(
            LatentInputs(points),
            side_inputs=Hypotheses(has_hypothesis[:, None], embeddings, has_hypothesis),
        )

    def _logits_beside(
        self, ids: Tensor, real: Tensor, places: Tensor, encoded: EncodedLatent
    ) -> Tensor:
        """Logits [P, V] at places [P] of B * S, of rows [B, S] that are wholly masked beside their
        texts.
        """
        config = self._pretrained.model.config
        masked = torch.where(real, config.mask_token_id, config.pad_token_id)
        has_hypothesis = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        # The embeddings of the hypotheses are in `encoded`.
        hypotheses = Hypotheses(ids, ids, has_hypothesis)
        t = torch.ones(len(ids), device=ids.device)
        out = self._pretrained.model(
            TextInputs(masked, t, real), encoded, TokenQuery(places), side_inputs=hypotheses
        )
        return out.text.logits
