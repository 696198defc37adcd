"""Rounds of a corrector (model.corrector): it reads the nearest text so far and its embedding, and writes it again.

As in vec2text (arXiv 2310.06816), but by masked diffusion and without ever getting worse: the judge keeps the nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmldlm.errors import UserError
from mmldlm.models.mmdit.hypothesis import Hypotheses
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.sampling.search.accounting import SamplingCost
from mmldlm.sampling.search.best_of import LENGTHS, FoundTexts, write_candidate
from mmldlm.sampling.search.judge import Judge, cosines
from mmldlm.sampling.text.length_rule import most_probable_lengths

# Candidates of `best_of.candidate`: of the first texts; of a round that reads a hypothesis for the first time (greedy
# in the two most probable lengths, a draw); and of one that reads it again (draws).
FIRST, FRESH, AGAIN = (0, 2), (1, 2, 4), (4, 5, 7)
# A latent is finished after PATIENCE rounds in which its cosine rose by less than MIN_GAIN.
MIN_GAIN, PATIENCE = 1e-4, 2


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
    """Write texts and correct them; the cosine of a text with its latent never falls. References are never read.

    Args:
        latents: [N, D] (or [N, M, D]) in the encoder's space.
        judge: used for this call alone, so that its counts are those of this search; embeds the hypotheses.
        rounds: most rounds of correction; 0: the nearer of two first texts.
        seed: the draws of a latent depend on the seed, its index and the round only.
        progress: called after every round with those done and in total.
        options: of `TextTask.write_texts`, the same for all texts.

    Raises:
        UserError: a model that was not trained to correct.
        MmldlmError: NaN logits or embeddings.
    """
    check_corrector(pretrained)
    search = _Correction(pretrained, latents, judge, seed, options)
    search.write(FIRST, list(range(len(latents))), 0)
    for number in range(1, rounds + 1):
        active = [row for row in range(len(latents)) if search.stale[row] < PATIENCE]
        if not active:
            break
        before = search.cosine.copy()
        fresh = [row for row in active if search.stale[row] == 0]
        again = [row for row in active if search.stale[row] > 0]
        depth = max(search.write(k, rows, number) for k, rows in ((FRESH, fresh), (AGAIN, again)))
        search.cost.depth += depth
        search.stale = np.where(search.cosine > before + MIN_GAIN, 0, search.stale + 1)
        if progress is not None:
            progress(number, rounds)
    search.cost.add_judge(judge)
    return FoundTexts(search.texts, search.cosine, search.calls, search.cost)


def check_corrector(pretrained: Pretrained) -> None:
    """Raise a UserError for a model without a corrector."""
    kind = getattr(pretrained.model.config, "corrector", "none")
    if kind == "none":
        raise UserError(
            "a model that was trained to correct texts, for --correct",
            f"{pretrained.folder or 'a model'} of model.corrector=none",
            "use --search local, which needs no training, or train one: `mmldlm hypotheses`, then "
            "model.corrector=feedback data.hypotheses=DIR training.init_from=CHECKPOINT",
        )


class _Correction:
    """The state of all latents.

    Attributes:
        texts: the nearest text so far. N lists of ids
        embedded: its embedding. [N, D] (or [N, M, D])
        cosine, calls: of `FoundTexts`. [N]
        stale: rounds without a gain. [N]
    """

    def __init__(self, pretrained: Pretrained, latents: Tensor, judge: Judge, seed: int, options: dict[str, Any]):
        self.pretrained, self.latents, self.judge, self.seed, self.options = pretrained, latents, judge, seed, options
        count = len(latents)
        self.targets = latents.cpu().numpy()
        self.texts: list[list[int]] = [[] for _ in range(count)]
        self.embedded = np.zeros(self.targets.shape, np.float32)
        self.cosine, self.calls = np.full(count, -np.inf), np.zeros(count, np.int64)
        self.stale, self.cost = np.zeros(count, np.int64), SamplingCost(count)
        self.seen: list[set[str]] = [set() for _ in range(count)]

    def write(self, candidates: tuple[int, ...], rows: list[int], number: int) -> int:
        """Write and judge texts for some latents, after round 0 from their hypotheses; return the passes in sequence.

        Args:
            candidates: of `best_of.candidate`.
            rows: of the latents.
            number: of the round.
        """
        if not rows:
            return 0
        pretrained, latents = self.pretrained, self.latents[rows]
        more: dict[str, Any] = {"indices": rows}
        if number > 0:
            more["hypotheses"] = self._hypotheses(rows)
        lengths, _ = most_probable_lengths(pretrained.model, latents, LENGTHS, hypotheses=more.get("hypotheses"))
        written, passes = [], 0
        for k in candidates:  # side by side: none reads another
            seed = self.seed + (number << 32)
            samples = write_candidate(pretrained, latents, k, lengths, seed, {**self.options, **more})
            self.cost.add_texts(pretrained.task, pretrained.model.config, samples)
            written.append(samples.tokens)
            passes = max(passes, int(samples.passes.max()))
        self._judge(rows, written)
        if number == 0:
            self.cost.depth = passes + 1
        return passes + 1

    def _hypotheses(self, rows: list[int]) -> Hypotheses:
        config = self.pretrained.model.config
        longest = max(len(self.texts[row]) for row in rows) + 1
        tokens = torch.full((len(rows), longest), config.pad_token_id)
        for i, row in enumerate(rows):
            text = [*self.texts[row], config.eos_token_id]
            tokens[i, : len(text)] = torch.tensor(text)
        given = torch.from_numpy(np.isfinite(self.cosine[rows]))
        return Hypotheses(tokens, torch.from_numpy(self.embedded[rows]), given)

    def _judge(self, rows: list[int], written: list[list[list[int]]]) -> None:
        """Embed the texts that were not seen yet and keep the nearest of each latent."""
        chosen: list[tuple[int, list[int]]] = []
        for texts in written:
            for row, text, string in zip(rows, texts, self.judge.strings(texts)):
                if string not in self.seen[row]:
                    self.seen[row].add(string)
                    chosen.append((row, text))
        if not chosen:
            return
        embedded = self.judge.embed([text for _, text in chosen])
        values = cosines(embedded, self.targets[[row for row, _ in chosen]])
        for (row, text), embedding, value in zip(chosen, embedded, values.tolist()):
            self.calls[row] += 1
            if value > self.cosine[row]:
                self.cosine[row], self.texts[row], self.embedded[row] = value, text, embedding
