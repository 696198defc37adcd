"""The noiser of images as codes: masks their ids."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.batch_plan import GlobalBatch
from mmldlm.data.lengths import AnyLengths
from mmldlm.data.store import Rows
from mmldlm.diffusion import MaskedDiffusion
from mmldlm.tasks.collation import RowReader
from mmldlm.tasks.image_text.noiser import ImageNoiser
from mmldlm.tasks.translation.noiser import L2T, PaddedSamples, TranslationBatch
from mmldlm.utils.counter_rng import counter_generator

# Last counter word; `noise_keys` has 9.
_CODE_STREAM = 10


@dataclass(kw_only=True)
class CodesBatch(TranslationBatch):
    """One micro-batch of images as N ids of codes, masked. Nothing is regressed: there are no
    latent_targets and no latent_weights.

    Attributes:
        latents: Ids, num_codes for [MASK]. [B, N, 1] int64
        latent_clean: Clean ids. [B, N, 1] int64
        latent_timesteps: Masked fractions k / N, 0 where the image is given. [B] fp32
        code_positions: Scored codes, as indices into B * N. [M] int64
        code_targets: Clean ids of the scored codes. [M] int64
        code_weights: NELBO weights of the scored codes. [M] fp32
        counts: Counts text_tokens, codes (of all images to score) and texts.
    """

    code_positions: Tensor
    code_targets: Tensor
    code_weights: Tensor


class CodeReader(RowReader):
    """Reads rows of ids below num_codes."""

    def __init__(self, num_codes: int, vocab_size: int):
        super().__init__(vocab_size, np.zeros(1), math.inf, nan_to_num=False)
        self.num_codes = num_codes

    def _rejected_latent(self, latent: np.ndarray) -> str | None:
        if latent.min() < 0 or latent.max() >= self.num_codes:
            return f"the id {latent.max()} of a code, expected one below {self.num_codes}"
        return None


class CodeNoiser(ImageNoiser):
    """Collator of the image_codes task.

    Of the N ids of an image exactly k = floor(t N) + 1 are replaced by [MASK], id num_codes, and
    each is scored with weight N / k: `MaskedDiffusion.corrupt_count`, so that the loss is a bound
    (NELBO) on -log p(image | caption).
    """

    batch_class = CodesBatch

    def __init__(self, config: Any, *words: Any, **options: Any):
        super().__init__(config, *words, **options)
        self.num_codes = config.model.num_codes
        self.reader = CodeReader(self.num_codes, self.reader.vocab_size)

    def collate(
        self, batch: GlobalBatch, slots: np.ndarray, samples: Any, lengths: AnyLengths
    ) -> TranslationBatch:
        noised = super().collate(batch, slots, samples, lengths)
        noised.counts["codes"] = noised.counts.pop("latents")
        return noised

    def _scaled(self, latents: np.ndarray) -> np.ndarray:
        return latents

    def _draws_noise(self, latents: np.ndarray) -> bool:
        return False

    def _pad(
        self, batch: GlobalBatch, rows: Rows, ids: np.ndarray, slots: np.ndarray
    ) -> PaddedSamples:
        """Return the samples with uniform numbers [B, N] fp64, for the masks, as their noise."""
        # An image of one patch has no axis of patches.
        if rows.latents.ndim == 2:
            rows = rows._replace(latents=rows.latents[:, None])
        count = rows.latents.shape[1]
        uniform = [
            counter_generator(self.seed, batch.epoch, sample, slot, _CODE_STREAM).random(count)
            for sample, slot in zip(ids.tolist(), slots.tolist(), strict=True)
        ]
        return (
            super()
            ._pad(batch, rows, ids, slots)
            ._replace(noise=torch.from_numpy(np.stack(uniform)))
        )

    def _latent_tensors(
        self, padded: PaddedSamples, modes: np.ndarray, real: np.ndarray, strata: Tensor
    ) -> dict[str, Tensor]:
        assert padded.noise is not None
        is_l2t, is_real = torch.from_numpy(modes) == L2T, torch.from_numpy(real)
        ids = padded.latents[..., 0]
        noised, masked, fraction = MaskedDiffusion.corrupt_count(
            ids, strata, padded.noise, torch.ones_like(ids, dtype=torch.bool), self.num_codes
        )
        scored = masked & (is_real & ~is_l2t)[:, None]
        positions = scored.flatten().nonzero()[:, 0]
        return {
            "latents": torch.where(is_l2t[:, None], ids, noised)[..., None],
            "latent_clean": padded.latents,
            "latent_timesteps": torch.where(is_l2t, 0.0, fraction).float(),
            "latent_is_null": (padded.dropout_uniform < self.condition_dropout) & is_l2t,
            "code_positions": positions,
            "code_targets": ids.flatten()[positions],
            "code_weights": (1 / fraction)[positions // ids.shape[1]].float(),
        }


def code_problems(batch: CodesBatch, num_codes: int) -> list[str]:
    """Return what is wrong with the codes of a micro-batch.

    Masked ids are exactly those that are scored, or of a sample whose weight is 0; all others are
    the clean ones.
    """
    assert batch.latents is not None
    noised, clean = batch.latents.cpu()[..., 0], batch.latent_clean.cpu()[..., 0]
    masked, problems = noised == num_codes, []
    if clean.numel() and not 0 <= int(clean.min()) <= int(clean.max()) < num_codes:
        problems.append(
            f"codes hold ids {int(clean.min())}..{int(clean.max())} outside 0..{num_codes - 1}"
        )
    if not torch.equal(noised[~masked], clean[~masked]):
        problems.append("codes that are not masked differ from the clean ones")
    positions, targets = batch.code_positions.cpu(), batch.code_targets.cpu()
    if not bool(masked.flatten()[positions].all()) or not torch.equal(
        clean.flatten()[positions], targets
    ):
        problems.append("code_targets are not the clean ids of masked codes")
    return problems
