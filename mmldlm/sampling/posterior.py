"""Text by steps from the exact posterior of a process whose tokens may change again (GIDD) or have
levels (HDLM).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.diffusion.gidd import self_correct
from mmldlm.diffusion.process import DivergenceProcess
from mmldlm.models.base import EncodedLatent, LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.decoding import DecodingState, check_finite, outside_nucleus, predict_lengths
from mmldlm.sampling.model import Model, device_of
from mmldlm.sampling.records import Recorder, TextSamples, keeping_finished
from mmldlm.sampling.settings import check_nucleus
from mmldlm.utils.counter_rng import Stream, uniforms

# Self-correction (GIDD, section 4.3): its time, most rounds, and rounds without a higher accuracy
# after which it ends.
CORRECTION_TIME, CORRECTION_ROUNDS, CORRECTION_PATIENCE = 0.01, 128, 32
# Rows whose posterior is computed at once, in fp64.
_ROWS = 256


@dataclass
class _Denoiser:
    """Logits of x_0 for a batch of texts.

    Attributes:
        model: A PlainTransformer.
        state: State of the batch; its tokens are not read.
        condition: Encoded latents; None: no condition.
        guidance: Scale g of null + g (conditional - null).
        num_calls: Number of calls so far.
        recorder: Callback after every pass.
        samples: Indices of the texts, for the recorder.
        recorded: Logits of the last call before guidance, kept for the recorder alone.
    """

    model: Model
    state: DecodingState
    condition: EncodedLatent | None
    guidance: float
    num_calls: int = 0
    recorder: Recorder | None = None
    samples: Sequence[int] = ()
    recorded: Tensor | None = None

    @property
    def cost(self) -> int:
        """Rows of one call."""
        return len(self.state.tokens) * (2 if self._is_guided else 1)

    @property
    def _is_guided(self) -> bool:
        return self.condition is not None and self.guidance != 1.0

    def __call__(self, tokens: Tensor, t: float, positions: Tensor) -> Tensor:
        """[M, V] logits at positions [M] of B * S; -inf for what cannot stand there: EOS stands at
        the end alone.
        """
        state = self.state
        self.num_calls += 1
        times = torch.full((len(tokens),), t, device=tokens.device)
        text, query = TextInputs(tokens, times, state.real), TokenQuery(positions)
        logits = self.model(text, self.condition, query).text.logits
        if self.recorder is not None:
            self.recorded = logits.clone()
        if self._is_guided:
            null = self.model(text, None, query).text.logits
            logits = null + self.guidance * (logits - null)
        is_last = state.is_last.flatten()[positions]
        state.exclude_special_tokens(logits)
        logits.masked_fill_(is_last[:, None], float("-inf"))
        logits[:, state.eos_token_id].masked_fill_(is_last, 0.0)
        check_finite(logits.amax(-1))
        return logits

    def report(
        self, before: Tensor, after: Tensor, positions: Tensor, chosen: Tensor | None = None
    ) -> None:
        """Report what the last call led to: tokens [B, S]; `chosen` are the reported ones of its
        positions.
        """
        if self.recorder is not None:
            assert self.recorded is not None
            logits = self.recorded if chosen is None else self.recorded[chosen]
            places = positions if chosen is None else positions[chosen]
            self.recorder.add(self.samples, before, after, places, logits)


def _shaped(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Logits of the distribution that is drawn from."""
    if temperature == 0:
        best = torch.zeros_like(logits, dtype=torch.bool).scatter_(
            1, logits.argmax(-1, keepdim=True), True
        )
        return logits.masked_fill(~best, float("-inf"))
    logits = logits / temperature
    if top_p < 1.0:
        logits = logits.masked_fill(outside_nucleus(logits.softmax(-1), top_p), float("-inf"))
    return logits


@torch.inference_mode()
def sample_by_posterior(
    model: Model,
    latents: Tensor | None,
    process: DivergenceProcess,
    *,
    num_steps: int = 64,
    num_samples: int | None = None,
    lengths: Tensor | None = None,
    corrects: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    guidance: float = 1.0,
    seed: int = 0,
    batch_tokens: int = 1536,
    progress: Callable[[int, int], None] | None = None,
    recorder: Recorder | None = None,
) -> TextSamples:
    """Sample one text per latent, or num_samples texts without one: `num_steps` steps from t = 1
    to 0.

    Args:
        model: A PlainTransformer.
        latents: Latents in the encoder's space, [N, D] or [N, M, D]; None: no condition.
        process: Process of training.
        num_steps: Number of forward passes.
        lengths: Lengths with EOS, [N] int64; None predicts them with the model's length head.
        corrects: Whether to replace single tokens of the finished text until the model agrees with
            it (`self_correct`).
        temperature: Temperature of x_hat; the posterior's own probabilities do not change.
        top_p: Nucleus of x_hat.
        guidance: Scale g of classifier-free guidance, null + g (conditional - null).
        seed: Seed of the draws; those of a sample depend on it and on the sample's index only.
        batch_tokens: Maximum of padded positions per pass.
        progress: Callback after every step, with the number of steps done and in total over all
            batches.
        recorder: Callback after every pass.

    Returns:
        TextSamples; no text contains [MASK], [PAD] or an EOS before its end.

    Raises:
        MmldlmError: NaN logits.
        SamplingInterrupted: an interrupt after the first batch.
        UserError: a nucleus at temperature 0.
    """
    check_nucleus(temperature, top_p)
    count = len(latents) if latents is not None else num_samples
    assert count is not None, "num_samples is needed without latents"
    if lengths is None:
        lengths = predict_lengths(model, latents, count, seed)
    batches = list(token_budget_batches(lengths.tolist(), batch_tokens))
    samples = TextSamples([[] for _ in range(count)], lengths, 0, torch.zeros_like(lengths))
    with keeping_finished(samples) as finished:
        for batch_number, batch in enumerate(batches):
            rows, index = batch.tolist(), torch.from_numpy(batch.copy())
            denoise = _start(
                model, lengths[index], None if latents is None else latents[index], guidance
            )
            denoise.recorder, denoise.samples = recorder, rows
            uniform = uniforms(seed, Stream.TEXT, rows, (num_steps, 2, model.config.max_seq_len))
            tokens = denoise.state.tokens
            for k, (t, s) in enumerate(pairwise(process.sampling_times(num_steps).tolist())):
                tokens, cost = _step_back(
                    denoise, process, tokens, t, s, uniform[:, k], temperature, top_p
                )
                samples.num_rows += cost
                if progress is not None:
                    progress(batch_number * num_steps + k + 1, len(batches) * num_steps)
            if corrects:
                tokens, cost = _correct(denoise, tokens, rows, seed)
                samples.num_rows += cost
            # All texts of a batch take its passes.
            samples.passes[index] = denoise.num_calls
            for row, text in zip(rows, tokens.tolist()):
                samples.tokens[row] = text[: int(lengths[row]) - 1]
            finished += rows
    return samples


def _start(model: Model, lengths: Tensor, latents: Tensor | None, guidance: float) -> _Denoiser:
    config, device, condition = model.config, device_of(model), None
    state = DecodingState(
        lengths.to(device),
        int(lengths.max()),
        mask_token_id=config.mask_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
    )
    # Also the EOS of a text without words is masked: it is a token like others.
    state.tokens[state.real] = config.mask_token_id
    if latents is not None:
        points = model.scale_latents(latents.to(device))
        condition = model.encode_latents(LatentInputs(points), caches=True)
    return _Denoiser(model, state, condition, guidance)


def _step_back(
    denoise: _Denoiser,
    process: DivergenceProcess,
    tokens: Tensor,
    t: float,
    s: float,
    uniform: Tensor,
    temperature: float,
    top_p: float,
) -> tuple[Tensor, int]:
    """Tokens at s from tokens at t, and the rows computed; uniform [B, 2, max_seq_len]."""
    positions = (denoise.state.real & process.is_open(tokens)).flatten().nonzero()[:, 0]
    if len(positions) == 0:
        return tokens, 0
    logits = denoise(tokens, t, positions)
    draws = (
        uniform[..., : tokens.shape[1]].transpose(0, 1).flatten(1).to(tokens.device)[:, positions]
    )
    earlier, tokens = tokens, tokens.clone()
    flat = tokens.view(-1)
    for part, part_positions, numbers in zip(
        logits.split(_ROWS), positions.split(_ROWS), draws.split(_ROWS, dim=1)
    ):
        before, after = (
            torch.full((len(part_positions),), time, dtype=torch.float64, device=tokens.device)
            for time in (t, s)
        )
        present = flat[part_positions]
        words = _shaped(process.possible_words(present, part), temperature, top_p)
        drawn = process.reverse(
            present[:, None], words[:, None], before, after, numbers[..., None]
        )
        flat[part_positions] = drawn[:, 0]
    denoise.report(earlier, tokens, positions)
    return tokens, denoise.cost


def _correct(denoise: _Denoiser, tokens: Tensor, rows: list[int], seed: int) -> tuple[Tensor, int]:
    """Correct one token of every text per round, until it agrees with the model; also returns the
    rows computed.
    """
    state, width = denoise.state, tokens.shape[1]
    uniform = uniforms(
        seed, Stream.SELF_CORRECTION, rows, (CORRECTION_ROUNDS, denoise.model.config.max_seq_len)
    )
    positions = state.real.flatten().nonzero()[:, 0]
    logits = torch.zeros(*tokens.shape, denoise.model.config.vocab_size, device=tokens.device)
    goes_on = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    best = torch.zeros_like(goes_on, dtype=torch.float64)
    stale = torch.zeros_like(tokens[:, 0])
    num_rows = 0
    for k in range(CORRECTION_ROUNDS):
        found = denoise(tokens, CORRECTION_TIME, positions)
        logits.view(-1, logits.shape[-1])[positions] = found.float()
        num_rows += denoise.cost
        numbers = uniform[:, k, :width].to(tokens.device)
        corrected, changed, agreement = self_correct(
            tokens, logits, numbers, state.real & ~state.is_last
        )
        stale = torch.where(agreement > best, 0, stale + 1)
        best = torch.maximum(best, agreement.double())
        reads, earlier = goes_on[positions // width], tokens
        goes_on &= changed & (stale < CORRECTION_PATIENCE)
        tokens = torch.where(goes_on[:, None], corrected, tokens)
        denoise.report(earlier, tokens, positions, reads)
        if not bool(goes_on.any()):
            break
    return tokens, num_rows
