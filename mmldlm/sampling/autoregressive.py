"""Text from a causal model: greedy, ancestral, and by beam search, with a cache of keys and
values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmldlm.errors import UserError
from mmldlm.models.plain import PlainTransformer, TextCache, next_logits, start_text
from mmldlm.sampling.decoding import check_finite, draw_tokens
from mmldlm.sampling.model import device_of
from mmldlm.sampling.records import Recorder, TextSamples, keeping_finished
from mmldlm.sampling.settings import BeamSettings
from mmldlm.utils.counter_rng import Stream, uniforms
from mmldlm.utils.validation import not_none

# Texts leave the batch once this share of it is finished: each departure copies the cache.
LEAVE_SHARE = 0.25


@dataclass
class WrittenTexts:
    """Texts of a batch of B.

    Attributes:
        tokens: Ids, EOS written, then padded with EOS. [B, S] int64
        lengths: Lengths, EOS counted. [B] int64
        log_probs: Log p(text) under the model, whatever temperature and nucleus drew it. [B] fp64
        num_rows: Rows that the model computed.
        passes: Passes of each text, one after the other. [B] int64
    """

    tokens: Tensor
    lengths: Tensor
    log_probs: Tensor
    num_rows: int
    passes: Tensor


def without_pad(model: PlainTransformer, scores: Tensor) -> Tensor:
    """Logits or log-probabilities [C, V] with -inf for [PAD], which the model never saw."""
    config = model.config
    if config.pad_token_id == config.eos_token_id:
        return scores
    return scores.index_fill(
        1, torch.tensor([config.pad_token_id], device=scores.device), float("-inf")
    )


def draw_texts(
    model: PlainTransformer,
    cache: TextCache,
    uniform: Tensor,
    temperature: float,
    top_p: float = 1.0,
    recorder: Recorder | None = None,
    samples: Sequence[int] = (),
) -> WrittenTexts:
    """Write the texts of an empty cache, each until its EOS; at max_seq_len EOS is written without
    a draw.

    Args:
        cache: Cache of B empty texts; used up.
        uniform: Numbers in [0, 1), one per token. [B, max_seq_len] fp64
        temperature: Temperature of the draws; 0 takes the most probable token.
        top_p: Nucleus of the draws.
        recorder: Callback after every token, but not for EOS.
        samples: Indices of the texts, for the recorder.

    Raises:
        MmldlmError: NaN logits.
    """
    batch, device, limit = cache.batch, uniform.device, model.config.max_seq_len
    eos = not_none(model.config.eos_token_id)
    tokens = torch.full((batch, limit), eos, device=device)
    lengths = torch.full((batch,), limit, device=device)
    log_probs = torch.zeros(batch, dtype=torch.float64, device=device)
    rows = torch.arange(batch, device=device)
    active = torch.ones(batch, dtype=torch.bool, device=device)
    last, num_rows = None, 0
    for step in range(limit):
        logits = next_logits(model, cache, last)
        num_rows += cache.batch
        last = torch.full_like(rows, eos)
        if step + 1 < limit:
            last = draw_tokens(without_pad(model, logits), uniform[rows, step], temperature, top_p)
        added = logits.double().log_softmax(-1).gather(1, last[:, None])[:, 0]
        log_probs[rows] += torch.where(active, added, 0.0)
        before = None if recorder is None else tokens.clone()
        tokens[rows[active], step] = last[active]
        if before is not None and recorder is not None:
            recorder.add(samples, before, tokens, rows[active] * limit + step, logits[active])
        ends = active & (last == eos)
        lengths[rows[ends]] = step + 1
        active = active & ~ends
        num_active = int(active.sum())
        if num_active == 0:
            break
        if num_active <= (1 - LEAVE_SHARE) * len(rows):
            remaining = active.nonzero()[:, 0]
            cache.select(remaining)
            rows, last, active = rows[remaining], last[remaining], active[remaining]
    return WrittenTexts(tokens[:, : int(lengths.max())], lengths, log_probs, num_rows, lengths)


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

    def advance(self, log_probs: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Extend the beams by log-probabilities [T * W, V] fp64 of the next token; return the row
        of each new beam in T * W, and its token [T * W].
        """
        log_probs = log_probs.unflatten(0, (-1, self.beams))
        if step + 1 == self.limit:
            only = torch.full_like(log_probs, float("-inf"))
            only[..., self.eos] = log_probs[..., self.eos]
            log_probs = only
        width = min(self.beams, log_probs.shape[-1])
        token_log_probs, tokens = log_probs.topk(width, dim=-1)
        scores, index = (
            (self.scores[..., None] + token_log_probs).flatten(1).topk(self.beams, dim=-1)
        )
        parent, tokens = index // width, tokens.flatten(1).gather(1, index)
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
        best_log_probs, beam = log_probs.max(1)
        score = best_log_probs / length**self.exponent
        better = score > self.best[self.rows]
        rows, beam = self.rows[better], beam[better]
        self.best[rows] = score[better]
        self.best_log_probs[rows] = best_log_probs[better]
        self.lengths[rows] = length
        self.best_tokens[rows] = self.history[better, beam]

    def may_improve(self) -> Tensor:
        """Texts [T] whose beams can still beat their best: tokens to come cost nothing at best."""
        return self.scores.amax(1) / self.limit**self.exponent > self.best[self.rows]

    def select(self, kept: Tensor) -> None:
        """Keep the texts [T'] of the unfinished."""
        self.rows = self.rows[kept]
        self.scores = self.scores[kept]
        self.history = self.history[kept]


def search(model: PlainTransformer, cache: TextCache, beams: int, exponent: float) -> WrittenTexts:
    """Write the texts of an empty cache by beam search; a text's score is log p / length^exponent.

    Exponent 0 is plain (it prefers short texts), 1 the mean over the tokens. The search of a text
    ends when no beam can still beat its best finished text.

    Args:
        cache: Cache of B * beams empty texts, those of a text side by side; used up.
        beams: Number of beams W.
        exponent: Exponent of the length.

    Raises:
        MmldlmError: NaN logits.
    """
    config = model.config
    state = _Beams(
        cache.batch // beams,
        beams,
        config.max_seq_len,
        not_none(config.eos_token_id),
        device_of(model),
        exponent,
    )
    last, num_rows, passes = None, 0, torch.ones_like(state.lengths)
    for step in range(config.max_seq_len):
        logits = next_logits(model, cache, last)
        num_rows += cache.batch
        check_finite(logits.amax(-1))
        # [PAD] keeps its share, as in `draw_texts`: the scores of both are compared.
        log_probs = without_pad(model, logits.double().log_softmax(-1))
        parents, last = state.advance(log_probs, step)
        going = state.may_improve()
        passes[state.rows[going]] = step + 2
        num_active = int(going.sum())
        if num_active == 0:
            break
        if num_active <= (1 - LEAVE_SHARE) * len(going):
            state.select(going)
            alive = going.repeat_interleave(beams)
            parents, last = parents[alive], last[alive]
        cache.select(parents)
    tokens = state.best_tokens[:, : int(state.lengths.max())]
    return WrittenTexts(tokens, state.lengths, state.best_log_probs, num_rows, passes)


EXPONENTS = {"beam": 1.0, "beam_sum": 0.0}
"""Samplers by beam search, and the power of the length by which they divide log p."""
BATCH_TOKENS = 8192


@dataclass
class ScoredTexts(TextSamples):
    """Written texts with their log-likelihoods under the model, [N] fp64."""

    log_probs: Tensor


@torch.inference_mode()
def write_texts(
    model: PlainTransformer,
    latents: Tensor | None,
    *,
    num_samples: int | None = None,
    sampler: str = "greedy",
    temperature: float | None = None,
    top_p: float = 1.0,
    num_beams: int | None = None,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    recorder: Recorder | None = None,
) -> ScoredTexts:
    """Write one text per latent, or num_samples texts without a latent.

    Args:
        model: A causal model.
        latents: Latents in the encoder's space, [N, D] or [N, M, D]; None: no condition.
        sampler: One of greedy (the most probable token), ancestral (draws), beam (beam search by
            the mean log-likelihood of a token), and beam_sum (by that of the text).
        temperature, top_p: Options of ancestral (default 1 and 1).
        num_beams: Number of beams of a beam search (default 4).
        seed: Seed of the draws; those of a text depend on it and on the text's index only.
        batch_tokens: Cached positions of one batch; None: 8,192.
        progress: Callback after every batch, with the texts done and in total.
        recorder: Callback after every token, of samplers without beams.

    Raises:
        UserError: options of draws or of beams with a sampler that has none.
        MmldlmError: NaN logits.
        SamplingInterrupted: an interrupt after the first batch.
    """
    if sampler != "ancestral" and (temperature not in (None, 0) or top_p != 1.0):
        raise UserError(
            f"no --temperature or --top-p with --sampler {sampler}, which draws nothing",
            f"temperature {temperature}, top_p {top_p}",
            "add --sampler ancestral (several texts for one embedding need draws), or omit them",
        )
    if num_beams is not None and sampler not in EXPONENTS:
        raise UserError(
            f"no --num-beams with --sampler {sampler}",
            str(num_beams),
            f"add --sampler {' or '.join(EXPONENTS)}",
        )
    assert recorder is None or sampler not in EXPONENTS, "a beam search has no one text that grows"
    count = len(latents) if latents is not None else num_samples
    assert count is not None, "num_samples is needed without latents"
    beams = (num_beams or BeamSettings.num_beams) if sampler in EXPONENTS else 1
    size = max((batch_tokens or BATCH_TOKENS) // (model.config.max_seq_len * beams), 1)
    drawn = temperature if sampler == "ancestral" else 0.0
    drawn = 1.0 if drawn is None else drawn
    lengths, passes = torch.zeros(2, count, dtype=torch.int64)
    log_probs = torch.zeros(count, dtype=torch.float64)
    samples = ScoredTexts([[] for _ in range(count)], lengths, 0, passes, log_probs)
    with keeping_finished(samples) as finished:
        for first in range(0, count, size):
            rows = list(range(first, min(first + size, count)))
            points = (
                None
                if latents is None
                else model.scale_latents(latents[first : first + size].to(device_of(model)))
            )
            part = _write_batch(model, points, rows, sampler, drawn, top_p, beams, seed, recorder)
            samples.num_rows += part.num_rows
            lengths[rows], passes[rows] = part.lengths.cpu(), part.passes.cpu()
            log_probs[rows] = part.log_probs.cpu()
            for row, tokens in zip(rows, part.tokens.tolist()):
                samples.tokens[row] = tokens[: int(lengths[row]) - 1]
            finished += rows
            if progress is not None:
                progress(rows[-1] + 1, count)
    return samples


def _write_batch(
    model: PlainTransformer,
    scaled_latents: Tensor | None,
    rows: list[int],
    sampler: str,
    temperature: float,
    top_p: float,
    beams: int,
    seed: int,
    recorder: Recorder | None,
) -> WrittenTexts:
    uniform = uniforms(seed, Stream.TEXT, rows, (model.config.max_seq_len,)).to(device_of(model))
    texts = draw_texts(
        model,
        start_text(model, scaled_latents, len(rows)),
        uniform,
        temperature,
        top_p,
        recorder,
        rows,
    )
    if sampler not in EXPONENTS:
        return texts
    repeated = None if scaled_latents is None else scaled_latents.repeat_interleave(beams, dim=0)
    beam_texts = search(
        model, start_text(model, repeated, len(rows) * beams), beams, EXPONENTS[sampler]
    )
    # A beam may drop the greedy text, which then can be the better one.
    exponent = EXPONENTS[sampler]
    scores = [part.log_probs / part.lengths.double() ** exponent for part in (texts, beam_texts)]
    keeps_greedy = scores[0] > scores[1]
    width = max(texts.tokens.shape[1], beam_texts.tokens.shape[1])
    greedy, searched = (
        torch.nn.functional.pad(
            part.tokens, (0, width - part.tokens.shape[1]), value=model.config.eos_token_id
        )
        for part in (texts, beam_texts)
    )
    return WrittenTexts(
        torch.where(keeps_greedy[:, None], greedy, searched),
        torch.where(keeps_greedy, texts.lengths, beam_texts.lengths),
        torch.where(keeps_greedy, texts.log_probs, beam_texts.log_probs),
        texts.num_rows + beam_texts.num_rows,
        texts.passes + beam_texts.passes,
    )
