"""Text by masked diffusion: from all [MASK] to tokens, given a latent or unconditionally."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.diffusion import MaskedDiffusion
from mmldlm.diffusion.process import LatentProcess
from mmldlm.sampling.device import device_of
from mmldlm.sampling.text.draw import DrawSettings
from mmldlm.sampling.text.length_rule import predict_lengths
from mmldlm.sampling.text.state import DecodingState
from mmldlm.sampling.text.strategies import TextStrategy, strategy_class
from mmldlm.utils.counter_rng import Stream, normals, uniforms

if TYPE_CHECKING:
    from mmldlm.models.plain.encoders import EncodedLatent
    from mmldlm.sampling.pretrained import Pretrained


@dataclass
class TextSamples:
    """Sampled texts in the order of the latents.

    Attributes:
        tokens: ids of each text without its EOS.
        lengths: [N] int64 lengths that were filled, EOS counted.
        num_rows: forward passes times samples in them (guidance counts twice): the cost of all texts.
    """

    tokens: list[list[int]]
    lengths: Tensor
    num_rows: int


def start_decoding(
    name: str,
    model: nn.Module,
    lengths: Tensor,
    rows: list[int],
    *,
    diffusion: MaskedDiffusion,
    steps: int,
    draw: DrawSettings,
    seed: int,
    shared_schedule: bool = False,
) -> TextStrategy:
    """Return the strategy `name` with a fresh state for one batch.

    Args:
        lengths: [B] int64, EOS counted.
        rows: indices of the samples, on which their draws depend.
        shared_schedule: all texts take all steps.

    Raises:
        ValueError: unknown strategy.
    """
    config = model.config
    state = DecodingState(
        lengths.to(device_of(model)),
        int(lengths.max()),
        mask_token_id=diffusion.mask_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
    )
    return strategy_class(name)(
        state,
        diffusion=diffusion,
        steps=steps,
        uniform=uniforms(seed, Stream.TEXT, rows, (2, config.max_seq_len)),
        draw=draw,
        shared_schedule=shared_schedule,
    )


@torch.inference_mode()
def sample_text(
    model: nn.Module,
    latents: Tensor | None,
    *,
    diffusion: MaskedDiffusion,
    steps: int = 16,
    num_samples: int | None = None,
    lengths: Tensor | None = None,
    length_rule: str | None = None,
    sampler: str = "confidence",
    temperature: float | None = None,
    top_p: float = 1.0,
    guidance: float = 1.0,
    presence_penalty: float = 0.0,
    latent_diffusion: LatentProcess | None = None,
    condition_timestep: float = 0.0,
    seed: int = 0,
    batch_tokens: int = 1536,
    progress: Callable[[int, int], None] | None = None,
) -> TextSamples:
    """Sample one text per latent, or num_samples texts unconditionally.

    Args:
        model: with the forward contract of MultimodalMMDiT.
        latents: [N, D] (or [N, M, D]) in the encoder's space, or None.
        diffusion: masking process of training.
        steps: maximum number of passes (a text of n tokens needs at most n confidence steps).
        lengths: [N] with EOS; None predicts them with the model's length head.
        length_rule: see `predict_lengths`.
        sampler: a name of STRATEGIES: confidence (best for a given latent) or ancestral (exact).
        temperature: of the draws; None is 0 for confidence and 1 for ancestral.
        top_p: nucleus of the draws.
        guidance: classifier-free guidance, null + g (given - null).
        presence_penalty: nats subtracted from the logit of every token that the text already contains. A greedy
            parallel decoder repeats tokens, because positions decided together do not condition on each other.
        latent_diffusion: noise process of the latents, needed for condition_timestep above 0.
        condition_timestep: noise the given latents to this timestep and say so to the model: for latents that no
            encoder made (conditioning augmentation, arXiv 2106.15282). The length is predicted without.
        seed: the draws of a sample depend on the seed and its index only.
        batch_tokens: maximum padded positions per pass.
        progress: called after every pass with the number of passes done and in total, over all texts.

    Returns:
        TextSamples; no text contains [MASK], [PAD] or an EOS before its end.

    Raises:
        MmldlmError: NaN logits.
        ValueError: unknown sampler or length rule.
    """
    count = len(latents) if latents is not None else num_samples
    assert count is not None, "num_samples is needed without latents"
    if lengths is None:
        lengths = predict_lengths(model, latents, count, length_rule, seed)
    texts: list[list[int]] = [[] for _ in range(count)]
    draw = DrawSettings(temperature, top_p, presence_penalty)
    passes = strategy_class(sampler).num_passes(lengths, steps)
    num_rows, done, total = 0, 0, int(passes.sum())
    for batch in token_budget_batches(lengths.tolist(), batch_tokens):
        rows, index = batch.tolist(), torch.from_numpy(batch.copy())
        strategy = start_decoding(
            sampler, model, lengths[index], rows, diffusion=diffusion, steps=steps, draw=draw, seed=seed
        )
        given, times = _encode(model, None if latents is None else latents[index]), None
        if isinstance(given, Tensor) and latent_diffusion is not None and condition_timestep > 0:
            times = torch.full((len(rows),), condition_timestep, device=given.device)
            noise = normals(seed, Stream.CONDITION, rows, tuple(given.shape[1:])).to(given.device)
            given = latent_diffusion.add_noise(given, noise, times)
        for k in range(steps):
            num_rows += _take_step(model, strategy, k, given, times, guidance)
            done += int((passes[index] > k).sum())
            if progress is not None:
                progress(done, total)
        for row, text in zip(rows, strategy.state.texts()):
            texts[row] = text
    return TextSamples(texts, lengths, num_rows)


def sample_masked(
    pretrained: Pretrained, latents: Tensor | None, num_steps: int | None = None, **options
) -> TextSamples:
    """`sample_text` for tasks of masked diffusion (`TextTask.write_texts`); an option that is None has its default."""
    if num_steps is not None:
        options["steps"] = num_steps
    given = {key: value for key, value in options.items() if value is not None}
    if given.get("condition_timestep"):
        given["latent_diffusion"] = pretrained.latent_diffusion
    return sample_text(pretrained.model, latents, diffusion=pretrained.text_diffusion, **given)


def _encode(model: nn.Module, latents: Tensor | None) -> Tensor | EncodedLatent | None:
    """The latents of a batch in model space, or what a model that can encode them apart makes of them, once."""
    if latents is None:
        return None
    given = model.scale_latents(latents.to(device_of(model)))
    return model.encode_latents(given, caches=True) if hasattr(model, "encode_latents") else given


def _take_step(
    model: nn.Module,
    strategy: TextStrategy,
    k: int,
    given: Tensor | EncodedLatent | None,
    times: Tensor | None,
    guidance: float,
) -> int:
    """Take one step on the texts that need it; return the number of rows the model computed."""
    state, positions = strategy.state, strategy.positions(k)
    if len(positions) == 0:
        strategy.update(k, positions, None)
        return 0
    width = state.tokens.shape[1]
    # Texts without an active position are left out of the pass.
    rows, row_index = torch.unique(positions // width, return_inverse=True)
    tokens, real, t = state.tokens[rows], state.real[rows], strategy.timesteps(k)[rows]
    active = row_index * width + positions % width
    if given is None or isinstance(given, Tensor):
        latents = None if given is None else given[rows]
        latent_t = None if times is None else times[rows]
        logits = model(tokens, latents, t, latent_t, real, text_positions=active)["text_logits"]
    else:
        logits = model(tokens, None, t, None, real, text_positions=active, encoded=given.select(rows))["text_logits"]
    passes = 1
    if guidance != 1.0 and given is not None:
        null = model(tokens, None, t, None, real, text_positions=active)["text_logits"]
        # Excluded tokens are -inf in both and become NaN here; update() excludes them before reading.
        logits, passes = null + guidance * (logits - null), 2
    strategy.update(k, positions, logits)
    return passes * len(rows)
