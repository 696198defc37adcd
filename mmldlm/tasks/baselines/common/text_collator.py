"""Micro-batches of texts, given their latents or not; a task adds its noise."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.batch import Batch
from mmldlm.data.batch_plan import GlobalBatch, permute
from mmldlm.data.run_data import StoreData
from mmldlm.diffusion.timesteps import low_discrepancy
from mmldlm.tasks.batch_draws import counter_generator, dropout_keys
from mmldlm.tasks.row_reader import RowReader

# Key words that keep the streams of one seed apart.
_SAMPLE_STREAM, _BATCH_STREAM = 1, 2  # 5: that of dropout_keys


class PaddedTexts(NamedTuple):
    """The clean texts of a micro-batch and their own draws. B samples, S positions.

    Attributes:
        tokens: [B, S] int64, EOS written, padded.
        attention: [B, S] bool, True for tokens and EOS.
        real: [B] bool, False for placeholders.
        uniform: [B, S] fp64 in [0, 1), for the noise of each token.
        strata: [B] fp64 in [0, 1), spread evenly over the global batch, for timesteps.
        own: [B] fp64 in [0, 1), independent ones.
    """

    tokens: Tensor
    attention: Tensor
    real: Tensor
    uniform: Tensor
    strata: Tensor
    own: Tensor


class TextCollator:
    """Reads texts and latents of a store, checks and pads them. Draws are functions of (seed,
    epoch, sample, slot).

    `noise` is the place for a task's own tensors. The others are attention_mask [B, S] bool,
    token_positions [T] int64 in B * S (real tokens), length_targets [B] int64 (length - 1),
    length_weights [B] fp32 (0 for placeholders) and, for a model that reads latents, latents [B,
    D] (or [B, N, D]) fp32 in model space and latent_is_null [B] bool; with model.dropout, in
    training, dropout_keys [B] int64. Counts: text_tokens, lengths (texts).

    Args:
        data: of the run, with latent_mean and latent_std [D], the scaling into model space.
        condition_dropout: share of samples given the learned null latent; None: the model reads no
            latents.
        seed: None: training.seed. Evaluation passes its own, so that it never sees training noise.
    """

    def __init__(self, data: StoreData, condition_dropout: float | None, seed: int | None = None):
        config = data.config
        self.model = config.model
        self.latent_mean, self.latent_std = data.latent_mean, data.latent_std
        self.condition_dropout = condition_dropout
        self.has_dropout = seed is None and config.model.dropout > 0
        self.seed = config.training.seed if seed is None else seed
        vocab_size, max_norm = config.model.vocab_size, data.max_latent_norm()
        self.reader = RowReader(
            vocab_size, data.latent_mean, max_norm, config.stability.nan_to_num
        )

    def noise(self, texts: PaddedTexts) -> dict[str, Tensor]:
        """Return the task's own tensors; here the clean text_tokens [B, S]."""
        return {"text_tokens": texts.tokens}

    def collate(
        self, batch: GlobalBatch, slots: np.ndarray, samples, lengths: np.ndarray
    ) -> Batch:
        """Build a micro-batch; see Collator.

        Args:
            samples: a store.
            lengths: [N] tokens of every sample, EOS included.
        """
        ids, real = batch.samples_at(slots)
        rows, is_bad, bad = self.reader.read(samples, ids, slots, len(batch.ids), lengths)
        real = real & ~is_bad
        texts, dropout = self._pad(batch, rows.tokens, ids, slots, real)
        attention = texts.attention
        tensors = {
            "attention_mask": attention,
            "token_positions": attention.flatten().nonzero()[:, 0],
            "length_targets": attention.sum(1) - 1,
            "length_weights": texts.real.float(),
            **self.noise(texts),
        }
        if self.condition_dropout is not None:
            raw, mean, std = map(
                torch.from_numpy,
                (rows.latents.astype(np.float32), self.latent_mean, self.latent_std),
            )
            # In memory of torch, not numpy's: a product's last bits depend on the alignment of its
            # inputs.
            tensors["latents"] = (raw - mean) / std
            # Present even when no row is null: the learned null must be in the graph on every
            # rank.
            tensors["latent_is_null"] = dropout < self.condition_dropout
        if self.has_dropout:
            tensors["dropout_keys"] = dropout_keys(self.seed, batch.epoch, ids, slots)
        return Batch(
            tensors=tensors,
            ids=ids,
            real=real,
            counts={"text_tokens": int(lengths[batch.ids].sum()), "lengths": len(batch.ids)},
            num_tokens=int(attention.numpy()[real].sum()),
            epoch=batch.epoch,
            index=batch.index,
            bad=bad,
        )

    def _pad(
        self,
        batch: GlobalBatch,
        texts: list[np.ndarray],
        ids: np.ndarray,
        slots: np.ndarray,
        real: np.ndarray,
    ) -> tuple[PaddedTexts, Tensor]:
        """The padded texts, and the uniforms [B] of the condition dropout."""
        count, width = len(ids), int(max(len(tokens) for tokens in texts)) + 1
        tokens = np.full((count, width), self.model.pad_token_id, dtype=np.int64)
        attention, uniform = np.zeros((count, width), dtype=bool), np.zeros((count, width))
        draws = np.empty((2, count))
        for row, (sample, slot) in enumerate(zip(ids.tolist(), slots.tolist(), strict=True)):
            generator = counter_generator(self.seed, batch.epoch, sample, slot, _SAMPLE_STREAM)
            draws[:, row] = generator.random(2)
            length = len(texts[row]) + 1
            tokens[row, : length - 1] = texts[row]
            tokens[row, length - 1] = self.model.eos_token_id
            attention[row, :length] = True
            uniform[row, :length] = generator.random(length)
        arrays = (tokens, attention, real, uniform)
        dropout, own = map(torch.from_numpy, draws)
        return PaddedTexts(
            *map(torch.from_numpy, arrays), self._strata(batch, slots), own
        ), dropout

    def _strata(self, batch: GlobalBatch, slots: np.ndarray) -> Tensor:
        offset = float(
            counter_generator(self.seed, batch.epoch, batch.index, 0, _BATCH_STREAM).random()
        )
        in_batch = np.minimum(slots, batch.size - 1)  # of placeholders, any slot will do
        key = batch.epoch * 1_000_003 + batch.index
        ranks = permute(np.arange(batch.size), batch.size, self.seed * 3 + 12, key)
        return low_discrepancy(torch.from_numpy(ranks[in_batch]), offset, batch.size)
