"""Noise one rank's micro-batch of a global batch.

Modes, timesteps, masks and noise are functions, not state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.batch import Batch
from mmldlm.data.batch_plan import GlobalBatch
from mmldlm.data.lengths import AnyLengths
from mmldlm.data.store import Rows
from mmldlm.diffusion import GaussianProcess, MaskedDiffusion
from mmldlm.diffusion.timesteps import logit_normal, shift, stretch
from mmldlm.tasks.candidates import CandidateSampler
from mmldlm.tasks.collation import (
    BATCH_STREAM,
    StoreCollator,
    keyed_normals,
    mask_texts,
    noise_keys,
    slot_uniforms,
)
from mmldlm.tasks.translation.config import PURE_MODES, TranslationConfig
from mmldlm.utils.counter_rng import counter_generator
from mmldlm.utils.validation import not_none

UNCONDITIONAL, L2T, T2L = range(3)
assert PURE_MODES == ("unconditional", "l2t", "t2l")

# Noise of samples with more elements is drawn on the device; that of smaller ones stays the draws
# it always was.
MAX_HOST_NOISE = 16_384
# Last counter word; those of others are in tasks/collation.py.
_OPTION_STREAM = 4


@dataclass(kw_only=True)
class TranslationBatch(Batch):
    """One micro-batch, noised. B samples, S positions (longest text), M scored positions, D latent
    dim.

    Where a text has N latents, [B, D] below is [B, N, D]; where the model makes two predictions of
    each, latent_targets are [B, 2 * D] and latent_weights [B, 2]. Latents are in model space.

    Attributes:
        text_tokens: Noised texts, padded. [B, S] int64
        attention_mask: True for tokens and EOS. [B, S] bool
        text_timesteps: Noise levels, 0 where the text is given. [B] fp32
        text_is_null: True where the learned null stands for the text. [B] bool
        token_positions: Positions to compute, as indices into B * S: the real tokens, of a null
            text the first position. [T] int64
        text_positions: Scored positions, as indices into B * S. [M] int64
        text_targets: Clean tokens at the scored positions. [M] int64
        text_weights: NELBO weights of the scored positions. [M] fp32
        text_samples: Samples of the scored positions. [M] int64
        length_targets: Lengths - 1. [B] int64
        length_weights: 1, or 0 where the length is not scored. [B] fp32
        latents: Noised latents; None until `to` has drawn the noise. [B, D] fp32
        latent_clean: Clean latents. [B, D] fp32
        latent_targets: Targets of the prediction; None as `latents`. [B, D] fp32
        latent_timesteps: Noise levels, 0 where the latent is clean. [B] fp32
        latent_weights: Weights of the errors, 0 where the latent is not scored. [B] fp32
        latent_is_null: True where the learned null stands for the latent. [B] bool
        noise_keys: Keys of the noise that `to` draws, above MAX_HOST_NOISE elements a sample;
            None: drawn already. [B] int64
        dropout_keys: Keys of `RowDropout`; None without model.dropout. [B] int64
        text_candidates: Tokens that the text head scores; None without loss.text_candidates. [C]
            int64
        text_columns: Columns of the targets in text_candidates. [M] int64
        modes: Indices in PURE_MODES. [B]
        process: Noise process of the latents; None where `to` draws no noise.
        counts: Counts text_tokens, latents (each of the N latents of a text) and texts.
    """

    text_tokens: Tensor
    attention_mask: Tensor
    text_timesteps: Tensor
    text_is_null: Tensor
    token_positions: Tensor
    text_positions: Tensor
    text_targets: Tensor
    text_weights: Tensor
    text_samples: Tensor
    length_targets: Tensor
    length_weights: Tensor
    latents: Tensor | None = None
    latent_clean: Tensor
    latent_targets: Tensor | None = None
    latent_timesteps: Tensor
    latent_weights: Tensor | None = None
    latent_is_null: Tensor
    noise_keys: Tensor | None = None
    dropout_keys: Tensor | None = None
    text_candidates: Tensor | None = None
    text_columns: Tensor | None = None
    modes: np.ndarray
    process: GaussianProcess | None = None

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Self:
        """Move the tensors to a device, and noise there the latents that come with keys."""
        super().to(device, non_blocking)
        if self.noise_keys is not None:
            assert self.process is not None
            noise = keyed_normals(self.noise_keys, self.latent_clean.shape[1:])
            self.noise_keys = None
            self.latents, self.latent_targets = noised_latents(
                self.process, self.latent_clean, noise, self.latent_timesteps
            )
        return self


def noised_latents(
    process: GaussianProcess, clean: Tensor, noise: Tensor, timesteps: Tensor
) -> tuple[Tensor, Tensor]:
    """Noised latents, a latent at timestep 0 as it is, and the targets of their prediction."""
    noised = process.add_noise(clean, noise, timesteps)
    latents = torch.where(_expand_like(timesteps == 0, clean), clean, noised)
    return latents, process.targets(clean, noise, timesteps)


def _expand_like(rows: Tensor, like: Tensor) -> Tensor:
    """Reshape [B] to broadcast over [B, ...]."""
    return rows.reshape(rows.shape + (1,) * (like.ndim - 1))


class PaddedSamples(NamedTuple):
    """The clean samples of a micro-batch and their own draws. B samples, S positions, D latent
    dim.

    Attributes:
        tokens: Padded tokens. [B, S] int64
        attention: True for real tokens and EOS. [B, S] bool
        latents: Latents in model space. [B, D] fp32
        noise: Standard normal noise, shaped as latents; None above MAX_HOST_NOISE elements a
            sample.
        mask_uniform: Numbers in [0, 1) for the masks. [B, S] fp64
        dropout_uniform: Numbers in [0, 1) for the condition dropout. [B] fp64
        text_uniform: Numbers for text timesteps under timesteps=uniform. [B] fp64
        latent_uniform: Numbers for latent timesteps under timesteps=uniform. [B] fp64
        l2t_noise_uniform: Numbers for l2t_condition_noise: whether, and how much; zeros where it
            is off. [B, 2] fp64
    """

    tokens: Tensor
    attention: Tensor
    latents: Tensor
    noise: Tensor | None
    mask_uniform: Tensor
    dropout_uniform: Tensor
    text_uniform: Tensor
    latent_uniform: Tensor
    l2t_noise_uniform: Tensor


class Noiser(StoreCollator):
    """Collator of the translation task: draws modes, timesteps, masks and noise.

    Args:
        config: Config of the run, with the token ids that the data decides.
        latent_mean, latent_std: Scaling of the latents into model space. [D]
        mode_weights: Weights of the modes; None: those of training.
        condition_dropout: Fraction of null conditions; None: training.condition_dropout.
        in_training: Whether the options of training apply that no evaluation has
            (l2t_condition_noise, dropout).
        seed, max_norm, candidates: See `StoreCollator`.
    """

    batch_class: ClassVar[type[TranslationBatch]] = TranslationBatch

    def __init__(
        self,
        config: TranslationConfig,
        latent_mean: np.ndarray,
        latent_std: np.ndarray,
        mode_weights: dict[str, float] | None = None,
        seed: int | None = None,
        condition_dropout: float | None = None,
        max_norm: float = math.inf,
        candidates: CandidateSampler | None = None,
        in_training: bool = True,
    ):
        super().__init__(config, latent_mean, latent_std, max_norm, seed, in_training, candidates)
        text = config.text_diffusion
        self.text_process = MaskedDiffusion(
            not_none(config.model.mask_token_id), text.schedule, text.eps
        )
        self.latent_process = config.latent_diffusion.process()
        self.text_config, self.latent_config = config.text_diffusion, config.latent_diffusion
        weights = mode_weights or config.training.mode_weights()
        self.mode_edges = np.cumsum([weights[mode] for mode in PURE_MODES])
        training = config.training
        self.condition_dropout = training.condition_dropout
        if condition_dropout is not None:
            self.condition_dropout = condition_dropout
        self.condition_noise = training.l2t_condition_noise if in_training else 0.0
        self.condition_timestep = training.l2t_condition_timestep

    def modes(self, batch: GlobalBatch, slots: np.ndarray) -> np.ndarray:
        """Return the modes [B] at some slots of a global batch, as indices in PURE_MODES."""
        uniform, edges = self._uniforms(batch, slots, 0), self.mode_edges
        return np.minimum(np.searchsorted(edges, uniform * edges[-1], side="right"), 2)

    def _uniforms(self, batch: GlobalBatch, slots: np.ndarray, stream: int) -> np.ndarray:
        """Return the evenly spread numbers [B] fp64 of modes (0), text (1) or latent (2)
        timesteps.
        """
        offsets = counter_generator(self.seed, batch.epoch, batch.index, 0, BATCH_STREAM).random(3)
        return slot_uniforms(self.seed, batch, slots, stream, float(offsets[stream]))

    def _count(self, batch: GlobalBatch, lengths: AnyLengths) -> dict[str, int]:
        """Return the text tokens, texts and samples with latents (of all modes that score them) of
        a global batch.
        """
        modes = self.modes(batch, np.arange(len(batch.ids)))
        has_text = modes != T2L
        return {
            "text_tokens": int(lengths[batch.ids][has_text].sum()),
            "latents": int((modes != L2T).sum()),
            "texts": int(has_text.sum()),
        }

    def collate(
        self, batch: GlobalBatch, slots: np.ndarray, samples: Any, lengths: AnyLengths
    ) -> TranslationBatch:
        noised = super().collate(batch, slots, samples, lengths)
        noised.counts["latents"] *= math.prod(noised.latent_clean.shape[1:-1])
        return noised

    def fields(
        self,
        batch: GlobalBatch,
        ids: np.ndarray,
        slots: np.ndarray,
        rows: Rows,
        real: np.ndarray,
        bad: list[dict],
    ) -> dict[str, Any]:
        modes = self.modes(batch, slots)
        text_strata, latent_strata = (
            torch.from_numpy(self._uniforms(batch, slots, stream)) for stream in (1, 2)
        )
        padded = self._pad(batch, rows, ids, slots)
        more, repairs = self._more_tensors(batch, ids, slots, modes, real, padded)
        bad += [
            {"id": int(ids[row]), "reason": reason, "repaired": True}
            for row, reason in repairs.items()
        ]
        fields = {
            "modes": modes,
            "process": self.latent_process,
            **more,
            **self._text_tensors(padded, modes, real, text_strata, more),
            **self._latent_tensors(padded, modes, real, latent_strata),
        }
        if padded.noise is None:
            fields["noise_keys"] = noise_keys(self.seed, batch.epoch, ids, slots)
        return fields

    def _more_tensors(
        self,
        batch: GlobalBatch,
        ids: np.ndarray,
        slots: np.ndarray,
        modes: np.ndarray,
        real: np.ndarray,
        padded: PaddedSamples,
    ) -> tuple[dict[str, Any], dict[int, str]]:
        """Fields that a subclass adds to a batch, and what it left out of some of the B samples:
        position -> reason.
        """
        return {}, {}

    def _mask(
        self, padded: PaddedSamples, strata: Tensor, more: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The result of `mask_texts`; a subclass may mask other texts, by its own tensors."""
        return mask_texts(
            self.text_process,
            self.text_config,
            padded.tokens,
            strata,
            padded.mask_uniform,
            padded.attention,
        )

    def _scaled(self, latents: np.ndarray) -> np.ndarray:
        """Stored latents [..., D] -> model space, fp32."""
        latents = latents.astype(np.float32)
        if self.latent_config.l2_normalize:
            latents = latents / np.maximum(
                np.linalg.norm(latents, axis=-1, keepdims=True), np.float32(1e-12)
            )
        return (latents - self.latent_mean) / self.latent_std

    def _draws_noise(self, latents: np.ndarray) -> bool:
        """Whether the host draws the noise of latents [B, ...]."""
        return latents[0].size <= MAX_HOST_NOISE

    def _pad(
        self, batch: GlobalBatch, rows: Rows, ids: np.ndarray, slots: np.ndarray
    ) -> PaddedSamples:
        latents = self._scaled(rows.latents)
        noise = np.empty_like(latents) if self._draws_noise(latents) else None
        own, l2t_noise = np.empty((3, len(ids))), np.zeros((len(ids), 2))

        def draw(row: int, generator: np.random.Generator) -> None:
            own[:, row] = generator.random(3)
            if noise is not None:
                noise[row] = generator.standard_normal(latents.shape[1:], dtype=np.float32)

        tokens, attention, uniform = self.pad_texts(batch, ids, slots, rows.tokens, draw)
        if self.condition_noise:
            for row, (sample, slot) in enumerate(zip(ids.tolist(), slots.tolist(), strict=True)):
                generator = counter_generator(self.seed, batch.epoch, sample, slot, _OPTION_STREAM)
                # The first draw belonged to an option that is gone; without it the others would
                # change.
                l2t_noise[row] = generator.random(3)[1:]
        return PaddedSamples(
            tokens,
            attention,
            torch.from_numpy(latents),
            None if noise is None else torch.from_numpy(noise),
            uniform,
            *map(torch.from_numpy, (*own, l2t_noise)),
        )

    def _text_tensors(
        self,
        padded: PaddedSamples,
        modes: np.ndarray,
        real: np.ndarray,
        strata: Tensor,
        more: dict[str, Any],
    ) -> dict[str, Tensor]:
        """Tensors of the text, masked by uniform numbers [B] fp64 of their noise levels.

        Args:
            more: Result of `_more_tensors`.
        """
        mode, is_real = torch.from_numpy(modes), torch.from_numpy(real)
        if self.text_config.timesteps != "low_discrepancy":
            strata = padded.text_uniform
        noised, masked, timesteps, weights = self._mask(padded, strata, more)
        is_t2l = mode == T2L
        masked &= (is_real & ~is_t2l)[:, None]
        positions = masked.flatten().nonzero()[:, 0]
        is_null = (padded.dropout_uniform < self.condition_dropout) & is_t2l
        width = padded.tokens.shape[1]
        computed = torch.where(is_null[:, None], torch.arange(width) == 0, padded.attention)
        text_samples = positions // width
        return {
            "text_tokens": torch.where(is_t2l[:, None], padded.tokens, noised),
            "attention_mask": padded.attention,
            "text_timesteps": torch.where(is_t2l, 0.0, timesteps).float(),
            "token_positions": computed.flatten().nonzero()[:, 0],
            "text_positions": positions,
            "text_targets": padded.tokens.flatten()[positions],
            "text_weights": weights[text_samples].float(),
            "text_samples": text_samples,
            "length_targets": padded.attention.sum(1) - 1,
            "length_weights": (is_real & ~is_t2l).float(),
            # Present even when no row is null: the learned nulls must be in the graph on every
            # rank, or ranks reduce different sets of gradients.
            "text_is_null": is_null,
        }

    def _latent_tensors(
        self, padded: PaddedSamples, modes: np.ndarray, real: np.ndarray, strata: Tensor
    ) -> dict[str, Tensor]:
        is_l2t, is_real = torch.from_numpy(modes) == L2T, torch.from_numpy(real)
        is_given = padded.dropout_uniform >= self.condition_dropout
        whether, how_much = padded.l2t_noise_uniform.unbind(1)
        given_timesteps = torch.where(
            is_l2t & is_given & (whether < self.condition_noise),
            (1 - how_much) * self.condition_timestep,
            0.0,
        )
        timesteps = torch.where(
            is_l2t, given_timesteps, self._latent_timesteps(strata, padded.latent_uniform)
        )
        clean = padded.latents
        # Some weights are infinite at t = 0, where a latent is given and not scored.
        weights = self.latent_process.loss_weights(timesteps.clamp_min(1e-6))
        tensors = {}
        if padded.noise is not None:
            tensors["latents"], tensors["latent_targets"] = noised_latents(
                self.latent_process, clean, padded.noise, timesteps
            )
        return tensors | {
            "latent_timesteps": timesteps.float(),
            "latent_clean": clean,
            "latent_weights": torch.where(
                _expand_like(is_real & ~is_l2t, weights), weights, 0.0
            ).float(),
            "latent_is_null": ~is_given & is_l2t,
        }

    def _latent_timesteps(self, strata: Tensor, own: Tensor) -> Tensor:
        config = self.latent_config
        if config.timesteps == "logit_normal":
            t = logit_normal(strata, config.logit_normal_mean, config.logit_normal_std).clamp(
                config.min_timestep, 1.0
            )
        else:
            t = stretch(
                strata if config.timesteps == "low_discrepancy" else own, config.min_timestep
            )
        return shift(t, config.timestep_shift)
