"""From a global batch to one rank's noised micro-batch. Modes, timesteps, masks and noise are functions, not state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.batching.batch import Batch
from mmldlm.data.batching.batch_plan import GlobalBatch, permute
from mmldlm.diffusion import GaussianProcess, MaskedDiffusion
from mmldlm.diffusion.timesteps import logit_normal, low_discrepancy, shift, stretch
from mmldlm.tasks.translation.config import PURE_MODES, TranslationConfig

UNCONDITIONAL, L2T, T2L = range(3)
assert PURE_MODES == ("unconditional", "l2t", "t2l")

# Key words that keep the streams of one seed apart.
_SAMPLE_STREAM, _BATCH_STREAM = 1, 2


@dataclass(kw_only=True)
class NoisedBatch(Batch):
    """One micro-batch, noised. B samples, S positions (longest text), M scored positions, D latent dim.

    Where a text has N latents, [B, D] below is [B, N, D].

    Attributes:
        tensors: text_tokens [B, S] int64 (noised), attention_mask [B, S] bool, latents [B, D] fp32 (noised, in model
            space, as latent_targets and latent_clean), text_timesteps [B], latent_timesteps [B] fp32, text_is_null and
            latent_is_null [B] bool, token_positions [T] int64 in B * S (text to compute: real tokens, of a null text
            the first position), text_positions [M] int64 in B * S, text_targets [M] int64, text_weights [M] fp32 (NELBO
            weight), text_rows [M] int64 (sample of each scored position), latent_targets [B, D] fp32, latent_clean
            [B, D] fp32, latent_weights [B] fp32 (0 where the latent is not scored), length_targets [B] int64
            (length - 1), length_weights [B] fp32.
        modes: [B] index in PURE_MODES.
        counts: text_tokens, latents (of N latents per text, each), lengths.
    """

    modes: np.ndarray


def _generator(seed: int, epoch: int, *counter: int) -> np.random.Generator:
    """Philox4x64 (Salmon et al., SC 2011) at a place of its own: the low counter word is left to the draws."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, *counter]))


def _over(rows, like):
    """[B] shaped to broadcast over [B, ...]."""
    return rows.reshape(rows.shape + (1,) * (like.ndim - 1))


class Noiser:
    """Draws the noise of a run.

    Args:
        config: the run's config (modes, dropout, diffusion, seed).
        mask_token_id, pad_token_id, eos_token_id: of the tokenizer.
        latent_mean, latent_std: [D] scaling into model space.
        mode_weights: shares of the modes; None: those of training.
        seed: None: training.seed. Evaluation passes its own, so that it never sees training noise.
        condition_dropout: None: training.condition_dropout.
        max_norm: a latent beyond this norm is a corrupted row; it is masked out and reported.
    """

    def __init__(
        self,
        config: TranslationConfig,
        mask_token_id: int,
        pad_token_id: int,
        eos_token_id: int,
        latent_mean: np.ndarray,
        latent_std: np.ndarray,
        mode_weights: dict[str, float] | None = None,
        seed: int | None = None,
        condition_dropout: float | None = None,
        max_norm: float = math.inf,
    ):
        self.text = MaskedDiffusion(mask_token_id, config.text_diffusion.schedule, config.text_diffusion.eps)
        latent = config.latent_diffusion
        self.latent = GaussianProcess(latent.path, latent.prediction, latent.weighting, latent.min_snr_gamma)
        self.text_config, self.latent_config = config.text_diffusion, latent
        self.pad_token_id, self.eos_token_id = pad_token_id, eos_token_id
        self.latent_mean, self.latent_std = latent_mean, latent_std
        self.max_norm = max_norm
        self.nan_to_num = config.stability.nan_to_num
        self.vocab_size = config.model.vocab_size or np.iinfo(np.int64).max
        weights = mode_weights or config.training.mode_weights()
        self.mode_edges = np.cumsum([weights[mode] for mode in PURE_MODES])
        self.seed = config.training.seed if seed is None else seed
        self.dropout = config.training.condition_dropout if condition_dropout is None else condition_dropout

    def modes(self, batch: GlobalBatch) -> np.ndarray:
        """[n] mode of every sample of the global batch (the same on every rank)."""
        return self._batch_draws(batch)[0][: len(batch.ids)]

    def _batch_draws(self, batch: GlobalBatch) -> tuple[np.ndarray, Tensor, Tensor]:
        """Mode [n], text uniforms [n] and latent uniforms [n] of the places of a global batch."""
        places = np.arange(batch.size)
        offsets = _generator(self.seed, batch.epoch, batch.index, 0, _BATCH_STREAM).random(3)
        key = batch.epoch * 1_000_003 + batch.index
        ranks = [permute(places, batch.size, self.seed * 3 + stream + 11, key) for stream in range(3)]
        mode_u = np.remainder(ranks[0] / batch.size + offsets[0], 1.0)
        modes = np.minimum(np.searchsorted(self.mode_edges, mode_u * self.mode_edges[-1], side="right"), 2)
        text_u = low_discrepancy(torch.from_numpy(ranks[1]), float(offsets[1]), batch.size)
        latent_u = low_discrepancy(torch.from_numpy(ranks[2]), float(offsets[2]), batch.size)
        return modes, text_u, latent_u

    def collate(self, batch: GlobalBatch, slots: np.ndarray, samples, lengths: np.ndarray) -> NoisedBatch:
        """Noise the samples at some places of a global batch.

        Args:
            batch: the global batch. slots: [B] places; places past its end become placeholders of weight 0.
            samples: a store, read with `get(ids)`. lengths: [N] tokens of every sample, EOS included.

        Returns:
            The micro-batch on the CPU.
        """
        num_real = len(batch.ids)
        modes_all, text_u, latent_u = self._batch_draws(batch)
        modes_real, lengths_real = modes_all[:num_real], lengths[batch.ids]
        has_text = modes_real != T2L

        real = slots < num_real
        ids = batch.ids[np.where(real, slots, 0)]
        places = np.minimum(slots, batch.size - 1)  # of placeholders, any will do
        modes = modes_all[places]
        rows = samples.get(ids)
        rows, mended = self._replace_nonfinite(rows)
        reasons = [
            self._rejection_reason(rows.tokens[row], rows.latents[row], lengths[sample])
            for row, sample in enumerate(ids)
        ]
        # A bad sample becomes a placeholder of weight 0, like one past the end of the batch: the same shapes and the
        # same collectives on every rank. The losses' denominators still count it: other ranks do not know.
        is_bad = np.array([reason is not None for reason in reasons])
        real = real & ~is_bad
        if is_bad.any():
            rows = rows._replace(
                tokens=[tokens[:0] if bad else tokens for tokens, bad in zip(rows.tokens, is_bad, strict=True)],
                latents=np.where(_over(is_bad, rows.latents), self.latent_mean, rows.latents),
            )
        num_rows, width = len(ids), int(max(len(tokens) for tokens in rows.tokens)) + 1
        tokens = np.full((num_rows, width), self.pad_token_id, dtype=np.int64)
        attention = np.zeros((num_rows, width), dtype=bool)
        uniform = np.zeros((num_rows, width))
        latents = rows.latents.astype(np.float32)
        if self.latent_config.l2_normalise:
            latents = latents / np.maximum(np.linalg.norm(latents, axis=-1, keepdims=True), np.float32(1e-12))
        latents = (latents - self.latent_mean) / self.latent_std
        noise = np.empty_like(latents)
        own_text_u, own_latent_u, drop = np.empty(num_rows), np.empty(num_rows), np.empty(num_rows)
        for row, (sample, slot) in enumerate(zip(ids.tolist(), slots.tolist(), strict=True)):
            generator = _generator(self.seed, batch.epoch, sample, slot, _SAMPLE_STREAM)
            drop[row], own_text_u[row], own_latent_u[row] = generator.random(3)
            noise[row] = generator.standard_normal(latents.shape[1:], dtype=np.float32)
            length = len(rows.tokens[row]) + 1
            tokens[row, : length - 1] = rows.tokens[row]
            tokens[row, length - 1] = self.eos_token_id
            attention[row, :length] = True
            uniform[row, :length] = generator.random(length)

        mode = torch.from_numpy(modes)
        latent_t = self._latent_timesteps(latent_u[places], torch.from_numpy(own_latent_u))
        latent_t = torch.where(mode == L2T, 0.0, latent_t)
        dropped = torch.from_numpy(drop < self.dropout)
        latent_is_null, text_is_null = dropped & (mode == L2T), dropped & (mode == T2L)

        clean_tokens, real_tokens = torch.from_numpy(tokens), torch.from_numpy(attention)
        text_strata = (
            text_u[places] if self.text_config.timesteps == "low_discrepancy" else torch.from_numpy(own_text_u)
        )
        noised, masked, text_t, weights = self._mask(clean_tokens, text_strata, torch.from_numpy(uniform), real_tokens)
        is_t2l = mode == T2L
        noised = torch.where(is_t2l[:, None], clean_tokens, noised)
        text_t = torch.where(is_t2l, 0.0, text_t)
        masked &= (torch.from_numpy(real) & ~is_t2l)[:, None]
        positions = masked.flatten().nonzero()[:, 0]
        first = torch.arange(width) == 0
        computed = torch.where(text_is_null[:, None], first, real_tokens)
        text_rows = positions // width

        clean, noise_tensor = torch.from_numpy(latents), torch.from_numpy(noise)
        z = torch.where(_over(mode == L2T, clean), clean, self.latent.add_noise(clean, noise_tensor, latent_t))
        latent_scored = torch.from_numpy(real & (modes != L2T))
        latent_weights = torch.where(latent_scored, self.latent.loss_weights(latent_t.clamp_min(1e-6)), 0.0)
        length_scored = torch.from_numpy(real & (modes != T2L))
        tensors = {
            "text_tokens": noised,
            "attention_mask": real_tokens,
            "latents": z,
            "text_timesteps": text_t.float(),
            "latent_timesteps": latent_t.float(),
            "token_positions": computed.flatten().nonzero()[:, 0],
            "text_positions": positions,
            "text_targets": clean_tokens.flatten()[positions],
            "text_weights": weights[text_rows].float(),
            "text_rows": text_rows,
            "latent_targets": self.latent.targets(clean, noise_tensor, latent_t),
            "latent_clean": clean,
            "latent_weights": latent_weights.float(),
            "length_targets": real_tokens.sum(1) - 1,
            "length_weights": length_scored.float(),
            # Present even when no row is null: the learned nulls must be in the graph on every rank, or ranks reduce
            # different sets of gradients.
            "text_is_null": text_is_null,
            "latent_is_null": latent_is_null,
        }
        return NoisedBatch(
            tensors=tensors,
            ids=ids,
            modes=modes,
            real=real,
            counts={
                "text_tokens": int(lengths_real[has_text].sum()),
                "latents": int((modes_real != L2T).sum()) * math.prod(latents.shape[1:-1]),
                "lengths": int(has_text.sum()),
            },
            num_tokens=int(attention[real].sum()),
            epoch=batch.epoch,
            index=batch.index,
            bad=[
                {"id": int(sample), "reason": reason or mended[row], **({} if reason else {"mended": True})}
                for row, (sample, slot, reason) in enumerate(zip(ids, slots, reasons, strict=True))
                if (reason or row in mended) and slot < num_real
            ],
        )

    def _replace_nonfinite(self, rows):
        """stability.nan_to_num: rows whose non-finite latent values are the mean's, and what was done by row."""
        if not self.nan_to_num or np.isfinite(rows.latents).all():
            return rows, {}
        bad = ~np.isfinite(rows.latents)
        told = "non-finite values in its latent, replaced by the mean (stability.nan_to_num)"
        mended = {int(row): f"{int(bad[row].sum())} {told}" for row in np.unique(np.nonzero(bad)[0])}
        return rows._replace(latents=np.where(bad, self.latent_mean.astype(rows.latents.dtype), rows.latents)), mended

    def _rejection_reason(self, tokens: np.ndarray, latent: np.ndarray, length: int) -> str | None:
        """Why a sample must not be trained on, None for a sound one."""
        if not np.isfinite(latent).all():
            return f"{int((~np.isfinite(latent)).sum())} non-finite values in its latent"
        norms = np.linalg.norm(latent, axis=-1).reshape(-1).tolist()
        norm = next((norm for norm in norms if not 0 < norm <= self.max_norm), None)
        if norm is not None:
            return f"a latent of norm {norm:.4g}, expected above 0 and at most {self.max_norm:.4g}"
        if len(tokens) + 1 != length:
            return f"{len(tokens)} tokens where the index says {length - 1}"
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            return f"a token id outside 0..{self.vocab_size - 1}"
        return None

    def _mask(self, tokens: Tensor, strata: Tensor, uniform: Tensor, maskable: Tensor) -> tuple[Tensor, ...]:
        """Noised tokens, masked, timesteps [B] and NELBO weight [B] of a masked token."""
        config = self.text_config
        if config.fully_masked_only:
            masked = maskable.clone()
            ones = torch.ones(len(tokens), dtype=torch.float64)
            return tokens.masked_fill(masked, self.text.mask_token_id), masked, ones, ones
        if config.masking == "count":
            noised, masked, share = self.text.corrupt_count(tokens, strata, uniform, maskable, self.text.mask_token_id)
            return noised, masked, self.text.timestep_of(share), 1 / share
        t = stretch(strata, config.t_min)
        noised, masked = self.text.corrupt(tokens, t, uniform, maskable)
        return noised, masked, t, self.text.loss_weights(t)

    def _latent_timesteps(self, strata: Tensor, own: Tensor) -> Tensor:
        config = self.latent_config
        if config.timesteps == "logit_normal":
            t = logit_normal(strata).clamp(config.t_min, 1.0)
        else:
            t = stretch(strata if config.timesteps == "low_discrepancy" else own, config.t_min)
        return shift(t, config.timestep_shift)
