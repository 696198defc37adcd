"""Images as ids of codes, by the samplers of masked diffusion at a fixed length: given captions,
or with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.diffusion import MaskedDiffusion
from mmldlm.models.base import LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.decoding import (
    DecodingState,
    predict_lengths,
)
from mmldlm.sampling.latents import check_guidance_interval, latent_shape, pad_texts
from mmldlm.sampling.model import Model, device_of
from mmldlm.sampling.records import Recorder, TextSamples, keeping_finished
from mmldlm.sampling.settings import DrawSettings
from mmldlm.sampling.strategies import STRATEGIES, Observer, TextStrategy
from mmldlm.sampling.text import start_decoding
from mmldlm.tasks.image_codes.config import CODE_SAMPLERS, CODE_STEPS
from mmldlm.utils.counter_rng import Stream, uniforms

# Number of ids after the codes: [MASK], and those that a state of texts needs for padding and end.
_SPECIAL = 3


class CodeState(DecodingState):
    """N ids of an image between all [MASK] and complete: a text of N + 1 tokens whose last one is
    never read.
    """

    def __init__(self, batch: int, count: int, num_codes: int, device: torch.device):
        lengths = torch.full((batch,), count + 1, device=device)
        super().__init__(
            lengths,
            count + 1,
            mask_token_id=num_codes,
            pad_token_id=num_codes + 1,
            eos_token_id=num_codes + 2,
        )
        self.count = count

    @property
    def ids(self) -> Tensor:
        """[B, N, 1] int64 with [MASK], as the model reads them."""
        return self.tokens[:, : self.count, None]

    def masked_share(self) -> Tensor:
        """Return the fraction of masked ids of each image, as in training: [B] fp64."""
        return (self.ids[..., 0] == self.mask_token_id).sum(1) / float(self.count)

    def targets(self, positions: Tensor) -> TokenQuery:
        """Return what to ask the model for logits at positions [M] of B * (N + 1)."""
        width = self.count + 1
        return TokenQuery(positions // width * self.count + positions % width)


def code_state(strategy: TextStrategy) -> CodeState:
    """The state of a strategy that `start_codes` made."""
    return cast(CodeState, strategy.state)


def start_codes(
    name: str,
    model: Model,
    indices: Sequence[int],
    *,
    draw: DrawSettings,
    seed: int,
    steps: int,
    shared_schedule: bool = False,
) -> TextStrategy:
    """Return the strategy `name` with images of [MASK] alone, one for each of the sample
    indices.
    """
    config = model.config
    count = config.num_latents
    state = CodeState(len(indices), count, config.num_codes, device_of(model))
    return STRATEGIES[name](
        state,
        diffusion=MaskedDiffusion(config.num_codes, eps=0.0),
        uniform=uniforms(seed, Stream.CODES, indices, (2, count + 1)),
        draw=draw,
        options={"num_steps": steps},
        shared_schedule=shared_schedule,
    )


@torch.inference_mode()
def sample_codes(
    model: Model,
    texts: Sequence[Sequence[int]] | None,
    *,
    steps: int = CODE_STEPS,
    num_samples: int | None = None,
    sampler: str = CODE_SAMPLERS[0],
    temperature: float | None = None,
    top_p: float = 1.0,
    guidance: float = 1.0,
    guidance_interval: Sequence[float] | None = None,
    seed: int = 0,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Sample the ids of one image per text, or num_samples images without a text (the learned
    null).

    Args:
        model: A CodesMMDiT.
        texts: N lists of ids without EOS, or None.
        steps: Number of passes; at most the number of codes of an image are needed.
        sampler: One of CODE_SAMPLERS. Those by certainty choose which codes to fill without
            guidance.
        temperature, top_p: Options of the draws; None: the sampler's default.
        guidance: Scale g of classifier-free guidance of the logits, null + g (conditional - null).
        guidance_interval: Masked fractions of the codes, ends included, at which there is
            guidance; None: all.
        seed: Seed of the draws; those of a sample depend on it and on the sample's index only.
        batch_tokens: Maximum of padded positions per pass, codes counted.
        progress: Callback after every pass, with the number of codes written and in total.

    Returns:
        [N, L, 1] int64 on the CPU (of one code an image [N, 1]).

    Raises:
        MmldlmError: NaN logits.
        SamplingInterrupted: an interrupt after the first batch.
        UserError: a guidance_interval that `check_guidance_interval` refuses.
    """
    count = len(texts) if texts is not None else num_samples
    assert count is not None, "num_samples is needed without texts"
    config, device = model.config, device_of(model)
    codes_per_image = config.num_latents
    check_guidance_interval(guidance, guidance_interval, 1 - torch.arange(steps) / steps)
    ids = torch.zeros(count, codes_per_image, dtype=torch.int64)
    result = ids.view(count, *latent_shape(config))
    lengths = (
        [len(text) + 1 + codes_per_image for text in texts]
        if texts is not None
        else [1 + codes_per_image] * count
    )
    done = 0
    with keeping_finished(result) as finished:
        for rows in token_budget_batches(lengths, batch_tokens):
            tokens = real = None
            if texts is not None:
                tokens, real = pad_texts(
                    [texts[row] for row in rows], config.eos_token_id, config.pad_token_id, device
                )
            strategy = start_codes(
                sampler,
                model,
                rows.tolist(),
                draw=DrawSettings(temperature, top_p),
                seed=seed,
                steps=steps,
            )
            while len(positions := strategy.positions()):
                _take_pass(
                    model,
                    tokens,
                    real,
                    strategy,
                    positions,
                    guidance,
                    guidance_interval or (0.0, 1.0),
                )
                if progress is not None:
                    open_codes = int(strategy.state.undecided.sum())
                    progress(
                        done + len(rows) * codes_per_image - open_codes, count * codes_per_image
                    )
            ids[torch.from_numpy(rows.copy())] = code_state(strategy).ids[..., 0].cpu()
            done += len(rows) * codes_per_image
            finished += rows.tolist()
    return result


def _take_pass(
    model: Model,
    tokens: Tensor | None,
    real: Tensor | None,
    strategy: TextStrategy,
    positions: Tensor,
    guidance: float,
    interval: Sequence[float],
) -> None:
    """Choose, draw and write codes at some of positions [M]."""
    state, times = code_state(strategy), strategy.timesteps()
    logits = code_logits(model, tokens, real, state, times, positions)
    strategy.prepare(positions, logits)
    chosen = strategy.choose(positions, logits)
    positions, logits = positions[chosen], logits[chosen]
    guided = None
    if guidance != 1 and tokens is not None:
        null = code_logits(model, None, None, state, times, positions)
        code_times = times[positions // (state.count + 1)]
        scale = torch.where(
            (interval[0] <= code_times) & (code_times <= interval[1]), guidance, 1.0
        )[:, None]
        guided = null + scale * (logits - null)
        # Logits that were -inf in both became NaN.
        state.exclude_special_tokens(guided)
    strategy.write(positions, logits, None, guided)


def code_logits(
    model: Model,
    tokens: Tensor | None,
    real: Tensor | None,
    state: CodeState,
    times: Tensor,
    positions: Tensor,
) -> Tensor:
    """Return logits [M, Q + 3] fp32 at positions [M] of B * (N + 1): -inf for [MASK] and what is
    not a code.
    """
    nothing = torch.empty(0, dtype=torch.int64, device=times.device)
    query = state.targets(positions)
    text = None if tokens is None else TextInputs(tokens, attention_mask=real)
    latents = LatentInputs(state.ids, times)
    out = model(text, latents, TokenQuery(nothing), latent_query=query)
    return pad_logits(out.latent.logits)


def pad_logits(logits: Tensor) -> Tensor:
    """[M, Q] -> [M, Q + 3], -inf for the ids of a state that are no codes."""
    return F.pad(logits, (0, _SPECIAL), value=float("-inf"))


@torch.inference_mode()
def sample_codes_and_texts(
    model: Model,
    num_samples: int,
    *,
    text_diffusion: MaskedDiffusion,
    steps: int = 64,
    sampler: str = "ancestral",
    temperature: float | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
    recorder: Recorder | None = None,
) -> tuple[TextSamples, Tensor]:
    """Fill the masks of captions and images together, both from all [MASK] to none in the same
    number of passes.

    Args:
        model: Model trained in mode unconditional.
        The rest as in `sample_joint`; the sampler is that of both streams.

    Returns:
        The texts, and ids as `sample_codes` returns them. Lengths are drawn from p(length).
    """
    config = model.config
    lengths = predict_lengths(model, None, num_samples, seed)
    texts: list[list[int]] = [[] for _ in range(num_samples)]
    ids = torch.zeros(num_samples, config.num_latents, dtype=torch.int64)
    passes = torch.full((num_samples,), steps)
    samples = TextSamples(texts, lengths, num_samples * steps, passes)
    result = samples, ids.view(num_samples, *latent_shape(config))
    draw, done = DrawSettings(temperature, top_p), 0
    with keeping_finished(result) as finished:
        for index in torch.argsort(lengths, stable=True).split(batch_size):
            rows = index.tolist()
            shared = {"draw": draw, "seed": seed, "shared_schedule": True}
            options = {"num_steps": steps}
            words = start_decoding(
                sampler,
                model,
                lengths[index],
                rows,
                diffusion=text_diffusion,
                options=options,
                **shared,
            )
            codes = start_codes(sampler, model, rows, steps=steps, **shared)
            observer = None if recorder is None else Observer(words.state, rows, recorder)
            for _ in range(steps):
                places, positions = words.positions(), codes.positions()
                out = model(
                    TextInputs(words.state.tokens, words.timesteps(), words.state.real),
                    LatentInputs(code_state(codes).ids, codes.timesteps()),
                    TokenQuery(places),
                    latent_query=code_state(codes).targets(positions),
                )
                words.fill(places, out.text.logits, observer if len(places) else None)
                codes.fill(positions, pad_logits(out.latent.logits))
                done += len(rows)
                if progress is not None:
                    progress(done, num_samples * steps)
            for row, text in zip(rows, words.state.texts()):
                texts[row] = text
            assert not bool(codes.state.undecided.any())
            ids[index] = code_state(codes).ids[..., 0].cpu()
            finished += rows
    return result
