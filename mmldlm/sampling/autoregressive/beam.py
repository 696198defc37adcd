"""Beam search, length-normalized or plain."""

from __future__ import annotations

import torch
from torch import Tensor

from mmldlm.models.plain import PlainTransformer, TextCache, next_logits
from mmldlm.sampling.autoregressive.draw import LEAVE_SHARE, WrittenTexts, without_pad
from mmldlm.sampling.text.draw import check_finite


class _Beams:
    """The state of T unfinished texts of W beams, and the best finished text of all B.

    A beam that ends leaves its place empty until the others fill it; with one beam the search is
    then greedy.
    """

    def __init__(
        self, batch: int, beams: int, limit: int, eos: int, device: torch.device, exponent: float
    ):
        self.beams, self.limit, self.eos, self.exponent = beams, limit, eos, exponent
        self.rows = torch.arange(batch, device=device)
        self.scores = torch.full((batch, beams), float("-inf"), dtype=torch.float64, device=device)
        self.scores[:, 0] = 0.0
        self.history = torch.full((batch, beams, limit), eos, device=device)
        self.best = torch.full((batch,), float("-inf"), dtype=torch.float64, device=device)
        self.best_log_probs = self.best.clone()
        self.best_tokens = torch.full((batch, limit), eos, device=device)
        self.lengths = torch.full((batch,), limit, device=device)

    def advance(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Extend the beams by logits [T * W, V]; return the row of each new beam in T * W, and its
        token [T * W].
        """
        log_probs = logits.double().log_softmax(-1).unflatten(0, (-1, self.beams))
        if step + 1 == self.limit:
            only = torch.full_like(log_probs, float("-inf"))
            only[..., self.eos] = log_probs[..., self.eos]
            log_probs = only
        width = min(self.beams, log_probs.shape[-1])
        own, tokens = log_probs.topk(width, dim=-1)
        scores, place = (self.scores[..., None] + own).flatten(1).topk(self.beams, dim=-1)
        parent, tokens = place // width, tokens.flatten(1).gather(1, place)
        self.history = self.history.gather(1, parent[..., None].expand(-1, -1, self.limit))
        self.history[..., step] = tokens
        ends = tokens == self.eos
        self._finish(torch.where(ends, scores, float("-inf")), step + 1)
        self.scores = torch.where(ends, float("-inf"), scores)
        base = torch.arange(len(parent), device=parent.device)[:, None] * self.beams
        return (base + parent).flatten(), tokens.flatten()

    def _finish(self, log_probs: Tensor, length: int) -> None:
        """Keep the best of the beams that ended ([T, W], -inf for others) if it is better than the
        best before.
        """
        found, place = log_probs.max(1)
        score = found / length**self.exponent
        better = score > self.best[self.rows]
        rows, place = self.rows[better], place[better]
        self.best[rows], self.best_log_probs[rows], self.lengths[rows] = (
            score[better],
            found[better],
            length,
        )
        self.best_tokens[rows] = self.history[better, place]

    def may_improve(self) -> Tensor:
        """Texts [T] whose beams can still beat their best: tokens to come cost nothing at best."""
        return self.scores.amax(1) / self.limit**self.exponent > self.best[self.rows]

    def select(self, kept: Tensor) -> None:
        """Keep the texts [T'] of the unfinished."""
        self.rows, self.scores, self.history = (
            self.rows[kept],
            self.scores[kept],
            self.history[kept],
        )


def search(model: PlainTransformer, cache: TextCache, beams: int, exponent: float) -> WrittenTexts:
    """Write the texts of an empty cache by beam search; a text's score is log p / length^exponent.

    Exponent 0 is plain (it prefers short texts), 1 the mean over the tokens. The search of a text
    ends when no beam can still beat its best finished text.

    Args:
        cache: of B * beams empty texts, those of a text side by side; used up.
        beams: W.
        exponent: of the length.

    Raises:
        MmldlmError: NaN logits.
    """
    config = model.config
    state = _Beams(
        cache.batch // beams,
        beams,
        config.max_seq_len,
        config.eos_token_id,
        model.start_token.device,
        exponent,
    )
    last, num_rows, passes = None, 0, torch.ones_like(state.lengths)
    for step in range(config.max_seq_len):
        logits = next_logits(model, cache, last)
        num_rows += cache.batch
        check_finite(logits.amax(-1))
        parents, last = state.advance(without_pad(model, logits), step)
        going = state.may_improve()
        passes[state.rows[going]] = step + 2
        number = int(going.sum())
        if number == 0:
            break
        if number <= (1 - LEAVE_SHARE) * len(going):
            state.select(going)
            alive = going.repeat_interleave(beams)
            parents, last = parents[alive], last[alive]
        cache.select(parents)
    tokens = state.best_tokens[:, : int(state.lengths.max())]
    return WrittenTexts(tokens, state.lengths, state.best_log_probs, num_rows, passes)
