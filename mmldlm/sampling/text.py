"""Text by masked diffusion: from all [MASK] to tokens, given a latent or unconditionally."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.diffusion import GaussianProcess, MaskedDiffusion
from mmldlm.errors import UserError
from mmldlm.models.base import EncodedLatent, LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.decoding import (
    DecodingState,
    most_probable_lengths,
    predict_lengths,
)
from mmldlm.sampling.model import Model, device_of, rows_of_latents
from mmldlm.sampling.records import Recorder, TextSamples, finished_part, keeping_finished
from mmldlm.sampling.settings import STRATEGY_OPTIONS, DrawSettings
from mmldlm.sampling.strategies import STRATEGIES, Observer, TextStrategy
from mmldlm.utils.counter_rng import Stream, normals, uniforms


class Denoiser:
    """Logits of a batch of texts.

    Args:
        latents: Latents in the encoder's space, [B, D] or [B, M, D]; None: the null condition.
        times: Timesteps of latents that are noised already and in model space, [B]; None: clean
            latents.

    Attributes:
        encoded: Encoded latents; None: the null condition.
        num_rows: Texts computed so far, summed over the passes.
        num_scored: Positions whose logits were computed.
    """

    def __init__(self, model: Model, latents: Tensor | None, times: Tensor | None = None):
        self.model, self.num_rows, self.num_scored = model, 0, 0
        self.encoded: EncodedLatent | None = None
        if latents is not None and times is not None:
            self.encoded = model.encode_latents(LatentInputs(latents, times), caches=True)
        elif latents is not None:
            scaled = model.scale_latents(latents.to(device_of(model)))
            self.encoded = model.encode_latents(LatentInputs(scaled), caches=True)

    def __call__(
        self, state: DecodingState, timesteps: Tensor, positions: Tensor, *, null: bool = False
    ) -> Tensor:
        """Return logits [M, V] at positions [M] of B * S.

        Args:
            timesteps: Timesteps of the texts. [B] fp32
            null: Whether to leave the condition out.
        """
        width = state.tokens.shape[1]
        rows, row_index = torch.unique(positions // width, return_inverse=True)
        everything = len(rows) == len(state.tokens)
        self.num_rows += len(rows)
        self.num_scored += len(positions)

        def select(values: Tensor) -> Tensor:
            return values if everything else values[rows]

        if null or self.encoded is None:
            encoded = self.model.encode_latents(None, batch=len(rows))
        else:
            encoded = self.encoded if everything else self.encoded.select(rows)
        text = TextInputs(select(state.tokens), select(timesteps), select(state.real))
        query = TokenQuery(row_index * width + positions % width)
        return self.model(text, encoded, query).text.logits


def start_decoding(
    name: str,
    model: Model,
    lengths: Tensor,
    indices: Sequence[int],
    *,
    diffusion: MaskedDiffusion,
    draw: DrawSettings,
    seed: int,
    options: Mapping[str, Any] | None = None,
    drafts: Tensor | None = None,
    shared_schedule: bool = False,
) -> TextStrategy:
    """Return the strategy `name` with a fresh state for one batch.

    Args:
        lengths: Lengths of the texts, EOS counted. [B] int64
        indices: Indices of the samples, on which their draws depend.
        options: Options of the strategy (`TextStrategy.settings_class`).
        drafts: Tokens that stand from the start, [MASK] elsewhere; None: all [MASK]. [B, >= S]
            int64
        shared_schedule: Whether all texts take all steps.

    Raises:
        UserError: an option that it does not read, or out of range.
    """
    config, device = model.config, device_of(model)
    state = DecodingState(
        lengths.to(device),
        int(lengths.max()),
        mask_token_id=diffusion.mask_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        drafts=None if drafts is None else drafts.to(device),
    )
    return STRATEGIES[name](
        state,
        diffusion=diffusion,
        uniform=uniforms(seed, Stream.TEXT, indices, (2, config.max_seq_len)),
        draw=draw,
        options=options,
        shared_schedule=shared_schedule,
    )


@torch.inference_mode()
def sample_text(
    model: Model,
    latents: Tensor | None,
    *,
    diffusion: MaskedDiffusion,
    steps: int | None = None,
    num_samples: int | None = None,
    lengths: Tensor | None = None,
    drafts: Tensor | None = None,
    sampler: str = "confidence",
    sampler_options: Mapping[str, Any] | None = None,
    temperature: float | None = None,
    top_p: float = 1.0,
    guidance: float = 1.0,
    presence_penalty: float = 0.0,
    latent_diffusion: GaussianProcess | None = None,
    condition_timestep: float = 0.0,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] | None = None,
    recorder: Recorder | None = None,
    with_log_probabilities: bool = False,
) -> TextSamples:
    """Sample one text per latent, or num_samples texts unconditionally.

    Args:
        latents: Latents in the encoder's space, [N, D] or [N, M, D]; None: no condition.
        diffusion: Masking process of training.
        steps: Number of steps, the sampler's option num_steps; None: its default.
        lengths: Lengths with EOS, [N] int64; None predicts them with the model's length head.
        drafts: Tokens that stand from the start, [MASK] where one is to be written; only with
            lengths. [N, >= longest] int64
        sampler: Name of a strategy.
        sampler_options: Options of the sampler (`TextStrategy.settings_class`).
        temperature, top_p, presence_penalty: Options of the draws (`DrawSettings`).
        guidance: Scale g of classifier-free guidance, null + g (conditional - null). Positions are
            chosen without it.
        latent_diffusion: Noise process of the latents, needed for condition_timestep above 0.
        condition_timestep: Timestep that the latents are noised to, which the model is told: for
            latents that no encoder made (conditioning augmentation, arXiv 2106.15282). The length
            is predicted from the clean ones.
        seed: Seed of the draws; those of a sample depend on it and on the sample's index only.
        indices: Indices of the N samples; None: 0 .. N - 1.
        batch_tokens: Maximum of padded positions per pass.
        progress: Callback after every pass, with the number of tokens written and in total.
        recorder: Callback after every pass, with what it wrote.
        with_log_probabilities: Whether to return the log-probabilities of the tokens.

    Returns:
        TextSamples; no text contains [MASK], [PAD] or an EOS before its end.

    Raises:
        MmldlmError: NaN logits.
        SamplingInterrupted: an interrupt after the first batch.
        UserError: an option that the sampler does not read, or out of range; distinct under
            guidance.
    """
    options = {**(sampler_options or {}), **({} if steps is None else {"num_steps": steps})}
    if guidance != 1 and latents is not None and options.get("distinct"):
        raise UserError(
            "--distinct with --guidance 1: positions are chosen without guidance, hence not by the"
            " tokens that it draws",
            f"--guidance {guidance:g}",
            "omit one of them",
        )
    if lengths is None:
        lengths = predict_lengths(model, latents, num_samples, seed)
    samples = TextSamples([[] for _ in lengths], lengths, 0, torch.zeros_like(lengths))
    if with_log_probabilities:
        samples.log_probabilities = [torch.empty(0) for _ in lengths]
    draw = DrawSettings(temperature, top_p, presence_penalty)
    written, total = 0, int((lengths - 1).sum())
    with keeping_finished(samples) as finished:
        num_rows = lengths + (0 if latents is None else rows_of_latents(model.config))
        for batch in token_budget_batches(num_rows.tolist(), batch_tokens):
            index = torch.from_numpy(batch.copy())
            sample_indices = [
                row if indices is None else int(indices[row]) for row in batch.tolist()
            ]
            strategy = start_decoding(
                sampler,
                model,
                lengths[index],
                sample_indices,
                diffusion=diffusion,
                draw=draw,
                seed=seed,
                options=options,
                drafts=None if drafts is None else drafts[index],
            )
            denoiser = _denoiser(
                model,
                None if latents is None else latents[index],
                sample_indices,
                condition_timestep,
                latent_diffusion,
                seed,
            )
            observer = (
                Observer(strategy.state, sample_indices, recorder)
                if recorder or with_log_probabilities
                else None
            )
            while len(positions := strategy.positions()):
                take_pass(denoiser, strategy, positions, guidance, observer)
                if progress is not None:
                    progress(written + strategy.state.num_written(), total)
            written += strategy.state.num_written()
            _collect(samples, index, strategy, denoiser, observer)
            finished += batch.tolist()
    return samples


def _denoiser(
    model: Model,
    latents: Tensor | None,
    indices: Sequence[int],
    timestep: float,
    diffusion: GaussianProcess | None,
    seed: int,
) -> Denoiser:
    """Return the denoiser of a batch, its latents noised to a timestep; the noise belongs to the
    index of a sample.
    """
    if latents is None or timestep == 0:
        return Denoiser(model, latents)
    assert diffusion is not None
    scaled = model.scale_latents(latents.to(device_of(model)))
    times = torch.full((len(scaled),), timestep, device=scaled.device)
    noise = normals(seed, Stream.CONDITION, indices, tuple(scaled.shape[1:])).to(scaled.device)
    return Denoiser(model, diffusion.add_noise(scaled, noise, times), times)


def take_pass(
    denoiser: Denoiser,
    strategy: TextStrategy,
    positions: Tensor,
    guidance: float = 1.0,
    observer: Observer | None = None,
) -> None:
    """Take one pass over the texts that need it.

    Args:
        positions: Result of `strategy.positions()`, not empty.
    """
    state, timesteps = strategy.state, strategy.timesteps()
    logits = denoiser(state, timesteps, positions)
    strategy.prepare(positions, logits)
    chosen = strategy.choose(positions, logits)
    if len(chosen) < len(positions):
        positions, logits = positions[chosen], logits[chosen]
    guided = None
    if guidance != 1.0 and denoiser.encoded is not None:
        null = denoiser(state, timesteps, positions, null=True)
        strategy.prepare(positions, null)
        guided = null + guidance * (logits - null)
        # Logits that were -inf in both became NaN.
        state.exclude_special_tokens(guided)
    strategy.write(positions, logits, observer, guided)


def _collect(
    samples: TextSamples,
    index: Tensor,
    strategy: TextStrategy,
    denoiser: Denoiser,
    observer: Observer | None,
) -> None:
    """Fill the texts of a batch into the result."""
    samples.num_rows += denoiser.num_rows
    samples.num_scored += denoiser.num_scored
    samples.passes[index] = strategy.passes.cpu()
    for row, text in zip(index.tolist(), strategy.state.texts()):
        samples.tokens[row] = text
    if samples.log_probabilities is not None:
        assert observer is not None
        for row, values, length in zip(
            index.tolist(), observer.log_probabilities.cpu(), strategy.state.lengths.tolist()
        ):
            samples.log_probabilities[row] = values[: length - 1].clone()


def sample_masked(
    model: Model,
    latents: Tensor | None,
    *,
    diffusion: MaskedDiffusion,
    num_steps: int | None = None,
    num_lengths: int | None = None,
    **options: Any,
) -> TextSamples:
    """`sample_text` with the options that `TextTask.write_texts` takes; one that is None has its
    default.

    Args:
        num_lengths: The texts are those of `sample_lengths`; None: of one length each.
        options: Options of `sample_text`, and those of the sampler by their names.
    """
    set_options = {key: value for key, value in options.items() if value is not None}
    sampler_options = {key: set_options.pop(key) for key in STRATEGY_OPTIONS & set_options.keys()}
    set_options |= {"diffusion": diffusion, "steps": num_steps, "sampler_options": sampler_options}
    if num_lengths is None:
        return sample_text(model, latents, **set_options)
    assert latents is not None, "num_lengths needs latents"
    return sample_lengths(model, latents, num_lengths, **set_options)


def sample_lengths(model: Model, latents: Tensor, num_lengths: int, **options: Any) -> TextSamples:
    """Write each text in its most probable lengths and keep the most probable.

    The score of a text is log p(L | z) plus the sum of the log-probabilities of its tokens when
    they were written; for a sampler in `BY_CERTAINTY` that is its log-likelihood. Their mean
    would prefer short texts.

    Args:
        num_lengths: Number of lengths per text, the most probable first.
        options: Options of `sample_text`; the candidates of a text have the same draws.

    Returns:
        The best texts; `passes`: the most of the candidates of a text, which are written side by
        side.

    Raises:
        SamplingInterrupted: an interrupt after the first text of which all candidates are written.
        The rest as in `sample_text`.
    """
    count = len(latents)
    lengths, length_scores = most_probable_lengths(model, latents, num_lengths)
    num_candidates = lengths.shape[1]
    write = partial(
        sample_text,
        model,
        latents.repeat_interleave(num_candidates, 0),
        lengths=lengths.flatten(),
        with_log_probabilities=True,
        indices=torch.arange(count).repeat_interleave(num_candidates).tolist(),
        **options,
    )
    candidates, written = finished_part(write)
    assert candidates.log_probabilities is not None
    scores = torch.stack([values.double().sum() for values in candidates.log_probabilities]).view(
        count, num_candidates
    )
    best = (scores + length_scores).argmax(1)
    rows = (torch.arange(count) * num_candidates + best).tolist()
    samples = TextSamples(
        [candidates.tokens[row] for row in rows],
        candidates.lengths[rows],
        candidates.num_rows,
        candidates.passes.view(count, -1).amax(1),
        num_scored=candidates.num_scored,
        log_probabilities=[candidates.log_probabilities[row] for row in rows],
    )
    if written is None:
        return samples
    with keeping_finished(samples) as finished:
        num_written = Counter(row // num_candidates for row in written)
        finished += [row for row, number in num_written.items() if number == num_candidates]
        raise KeyboardInterrupt
