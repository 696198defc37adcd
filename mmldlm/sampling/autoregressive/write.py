"""The samplers of a causal model, as `mmldlm sample` and `mmldlm evaluate` name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmldlm.errors import UserError
from mmldlm.models.plain import PlainTransformer, start_text
from mmldlm.sampling.autoregressive.beam import search
from mmldlm.sampling.autoregressive.draw import WrittenTexts, draw_texts
from mmldlm.sampling.device import device_of
from mmldlm.sampling.text.records import Recorder, TextSamples
from mmldlm.utils.counter_rng import Stream, uniforms

EXPONENTS = {"beam": 1.0, "beam_sum": 0.0}
"""Samplers by beam search, and the power of the length by which they divide log p."""
DEFAULT_BEAMS = 4
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
        model: causal.
        latents: [N, D] (or [N, M, D]) in the encoder's space, or None.
        sampler: greedy (the most probable token), ancestral (draws), beam (beam search by the mean
            log-likelihood of a token), beam_sum (by that of the text).
        temperature, top_p: of ancestral (default 1 and 1).
        num_beams: of a beam search (default 4).
        seed: the draws of a text depend on the seed and its index only.
        batch_tokens: cached positions of one batch; None: 8,192.
        progress: called after every batch with the texts done and in total.
        recorder: called after every token; of samplers without beams.

    Raises:
        UserError: an option that the sampler does not read.
        MmldlmError: NaN logits.
    """
    _check_options(sampler, temperature, top_p, num_beams)
    assert recorder is None or sampler not in EXPONENTS, "a beam search has no one text that grows"
    count = len(latents) if latents is not None else num_samples
    assert count is not None, "num_samples is needed without latents"
    beams = (num_beams or DEFAULT_BEAMS) if sampler in EXPONENTS else 1
    size = max((batch_tokens or BATCH_TOKENS) // (model.config.max_seq_len * beams), 1)
    parts: list[WrittenTexts] = []
    for first in range(0, count, size):
        rows = list(range(first, min(first + size, count)))
        given = (
            None if latents is None else model.scale_latents(latents[rows].to(device_of(model)))
        )
        drawn = temperature if sampler == "ancestral" else 0.0
        drawn = 1.0 if drawn is None else drawn
        parts.append(
            _write_batch(model, given, rows, sampler, drawn, top_p, beams, seed, recorder)
        )
        if progress is not None:
            progress(rows[-1] + 1, count)
    texts = [
        row[: length - 1]
        for part in parts
        for row, length in zip(part.tokens.tolist(), part.lengths.tolist())
    ]
    lengths = torch.cat([part.lengths for part in parts]).cpu()
    log_probs = torch.cat([part.log_probs for part in parts]).cpu()
    passes = torch.cat([part.passes for part in parts]).cpu()
    return ScoredTexts(texts, lengths, sum(part.num_rows for part in parts), passes, log_probs)


def _write_batch(
    model: PlainTransformer,
    given: Tensor | None,
    rows: list[int],
    sampler: str,
    temperature: float,
    top_p: float,
    beams: int,
    seed: int,
    recorder: Recorder | None,
) -> WrittenTexts:
    uniform = uniforms(seed, Stream.TEXT, rows, (model.config.max_seq_len,)).to(device_of(model))
    written = draw_texts(
        model, start_text(model, given, len(rows)), uniform, temperature, top_p, recorder, rows
    )
    if sampler not in EXPONENTS:
        return written
    repeated = None if given is None else given.repeat_interleave(beams, dim=0)
    found = search(
        model, start_text(model, repeated, len(rows) * beams), beams, EXPONENTS[sampler]
    )
    # A beam may drop the greedy text, which then can be the better one.
    exponent = EXPONENTS[sampler]
    scores = [part.log_probs / part.lengths.double() ** exponent for part in (written, found)]
    keeps_greedy = scores[0] > scores[1]
    width = max(written.tokens.shape[1], found.tokens.shape[1])
    greedy, searched = (
        torch.nn.functional.pad(
            part.tokens, (0, width - part.tokens.shape[1]), value=model.config.eos_token_id
        )
        for part in (written, found)
    )
    return WrittenTexts(
        torch.where(keeps_greedy[:, None], greedy, searched),
        torch.where(keeps_greedy, written.lengths, found.lengths),
        torch.where(keeps_greedy, written.log_probs, found.log_probs),
        written.num_rows + found.num_rows,
        written.passes + found.passes,
    )


def _check_options(
    sampler: str, temperature: float | None, top_p: float, num_beams: int | None
) -> None:
    draws = sampler == "ancestral"
    if not draws and (temperature not in (None, 0) or top_p != 1.0):
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
