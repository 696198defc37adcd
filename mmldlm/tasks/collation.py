"""What the collators of prepared stores share: reading, padding and counting, draws, and the masks
of texts.

Draws are functions of (seed, epoch, sample, slot), those of modes and timesteps of (seed, epoch,
global batch, slot): never of ranks or call order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.batch import Batch
from mmldlm.data.batch_plan import GlobalBatch, permute
from mmldlm.data.lengths import AnyLengths
from mmldlm.data.store import Rows
from mmldlm.diffusion import MaskedDiffusion
from mmldlm.diffusion.timesteps import low_discrepancy, stretch
from mmldlm.models.dropout import STEP, mix
from mmldlm.tasks.candidates import CandidateSampler
from mmldlm.tasks.translation.config import TextDiffusionConfig
from mmldlm.utils.counter_rng import counter_generator
from mmldlm.utils.validation import not_none

# Last counter words, which keep the streams of one (seed, epoch) apart. Others: options of the
# translation task 4, the corrector 7, shifts of images 8, ids of codes 10.
_SAMPLE_STREAM, BATCH_STREAM, _CANDIDATE_STREAM, _DROPOUT_STREAM, _NOISE_STREAM = 1, 2, 3, 5, 9


class StoreCollator(ABC):
    """Reads samples of a store, checks and pads them; a task's own part is `fields`.

    Args:
        config: Config of the run, with the token ids that the data decides.
        latent_mean, latent_std: Scaling of the latents into model space. [D]
        max_norm: Norm above which a latent is a corrupted row, which is left out and reported.
        seed: Seed of the draws; None: training.seed. Evaluation passes its own, so that it never
            sees training noise.
        in_training: Whether the options of training apply that no evaluation has.
        candidates: Sampler of loss.text_candidates; None: the text head scores the whole
            vocabulary.

    Class attributes:
        batch_class: Class of the batches, whose fields the tensors are.
    """

    batch_class: ClassVar[type[Batch]]

    def __init__(
        self,
        config: Any,
        latent_mean: np.ndarray,
        latent_std: np.ndarray,
        max_norm: float,
        seed: int | None,
        in_training: bool,
        candidates: CandidateSampler | None = None,
    ):
        model = config.model
        self.pad_token_id = not_none(model.pad_token_id)
        self.eos_token_id = not_none(model.eos_token_id)
        self.latent_mean, self.latent_std = latent_mean, latent_std
        vocab_size = model.vocab_size or np.iinfo(np.int64).max
        self.reader = RowReader(vocab_size, latent_mean, max_norm, config.stability.nan_to_num)
        self.seed = config.training.seed if seed is None else seed
        self.has_dropout = in_training and model.dropout > 0
        self.candidates = candidates
        self.counts = GlobalCounts()

    @abstractmethod
    def fields(
        self,
        batch: GlobalBatch,
        ids: np.ndarray,
        slots: np.ndarray,
        rows: Rows,
        real: np.ndarray,
        bad: list[dict],
    ) -> dict[str, Any]:
        """Return the fields of a micro-batch that depend on the task, attention_mask and
        text_targets among them.

        Args:
            rows: Checked samples.
            real: False for placeholders. [B] bool
            bad: Reports of `Batch.bad`, to which more may be appended.
        """

    @abstractmethod
    def _count(self, batch: GlobalBatch, lengths: AnyLengths) -> dict[str, int]:
        """Return the counts of a global batch, equal on every rank."""

    def collate(
        self, batch: GlobalBatch, slots: np.ndarray, samples: Any, lengths: AnyLengths
    ) -> Any:
        """Build a micro-batch; see Collator.

        Args:
            samples: Split of a store.
            lengths: Number of tokens of every sample, EOS included. [N]
        """
        ids, real = batch.samples_at(slots)
        rows, is_bad, bad = self.reader.read(samples, ids, slots, len(batch.ids), lengths)
        real = real & ~is_bad
        fields = self.fields(batch, ids, slots, rows, real, bad)
        if self.has_dropout:
            fields["dropout_keys"] = dropout_keys(self.seed, batch.epoch, ids, slots)
        if self.candidates is not None:
            generator = counter_generator(
                self.seed, batch.epoch, batch.index, 0, _CANDIDATE_STREAM
            )
            fields |= self.candidates.tensors(fields["text_targets"], generator)
        return self.batch_class(
            **fields,
            ids=ids,
            real=real,
            counts=dict(self.counts(batch, lengths, self._count)),
            num_tokens=int(fields["attention_mask"].numpy()[real].sum()),
            epoch=batch.epoch,
            index=batch.index,
            bad=bad,
        )

    def pad_texts(
        self,
        batch: GlobalBatch,
        ids: np.ndarray,
        slots: np.ndarray,
        texts: list[np.ndarray],
        draw: Callable[[int, np.random.Generator], None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pad texts to the longest of them, with EOS behind each.

        Args:
            texts: Tokens of the B samples.
            draw: Function of (row, generator of its sample) that draws what a sample needs before
                the numbers of its tokens.

        Returns:
            Tokens [B, S] int64, which of them are real [B, S] bool, and a number in [0, 1) of each
            [B, S] fp64.
        """
        shape = len(ids), max(len(text) for text in texts) + 1
        tokens = np.full(shape, self.pad_token_id, dtype=np.int64)
        attention, uniform = np.zeros(shape, dtype=bool), np.zeros(shape)
        for row, (sample, slot) in enumerate(zip(ids.tolist(), slots.tolist(), strict=True)):
            generator = counter_generator(self.seed, batch.epoch, sample, slot, _SAMPLE_STREAM)
            draw(row, generator)
            length = len(texts[row]) + 1
            tokens[row, : length - 1] = texts[row]
            tokens[row, length - 1] = self.eos_token_id
            attention[row, :length] = True
            uniform[row, :length] = generator.random(length)
        return torch.from_numpy(tokens), torch.from_numpy(attention), torch.from_numpy(uniform)


class GlobalCounts:
    """Counts of a global batch, computed once for all of a rank's micro-batches of it.

    Counting takes as long as the global batch is large, whatever the number of ranks, and a
    step of 32 micro-batches would count 32 times.
    """

    def __init__(self) -> None:
        self._last: tuple[GlobalBatch, AnyLengths, dict[str, int]] | None = None

    def __call__(
        self,
        batch: GlobalBatch,
        lengths: AnyLengths,
        count: Callable[[GlobalBatch, AnyLengths], dict[str, int]],
    ) -> dict[str, int]:
        """Return count(batch, lengths), of the last call where it was for the same batch."""
        # Read and written as one tuple, because a prefetch thread may ask at the same time. The
        # plan keeps the ids of a window, so that the micro-batches of a step share the array.
        last = self._last
        if last is not None:
            known, known_lengths, counts = last
            same = (known.epoch, known.index, known.size) == (batch.epoch, batch.index, batch.size)
            if same and known.ids is batch.ids and known_lengths is lengths:
                return counts
        counts = count(batch, lengths)
        self._last = batch, lengths, counts
        return counts


class RowReader:
    """Reads and checks the samples of a micro-batch.

    Args:
        vocab_size: Size of the vocabulary; tokens are below it.
        latent_mean: Raw latent that takes the place of an unusable one. [D]
        max_norm: Norm above which a latent is a corrupted row, which is left out and reported.
        nan_to_num: Whether non-finite values of a latent are replaced by the mean
            (stability.nan_to_num).
    """

    def __init__(
        self, vocab_size: int, latent_mean: np.ndarray, max_norm: float, nan_to_num: bool
    ):
        self.vocab_size, self.latent_mean, self.max_norm = vocab_size, latent_mean, max_norm
        self.nan_to_num, self.zero_ok = nan_to_num, False

    def read(
        self, samples: Any, ids: np.ndarray, slots: np.ndarray, num_real: int, lengths: AnyLengths
    ) -> tuple[Rows, np.ndarray, list[dict]]:
        """Read the rows; return them, which of them are unusable, and the reports of Batch.bad.

        Args:
            samples: Split of a store.
            ids: Indices of its samples. [B]
            slots: Positions in the global batch, of which the first num_real hold samples. [B]
            lengths: Number of tokens of every sample, EOS included. [N]

        An unusable sample becomes a placeholder of weight 0, as one past the end of the batch: all
        ranks keep the same shapes and collectives. The counts of the global batch still include
        it, because other ranks do not know of it.
        """
        rows, repaired = self._replace_nonfinite(samples.get(ids))
        # A black patch of an image is a zero vector.
        self.zero_ok = getattr(samples, "kind", "text") == "image"
        reasons = [
            self._rejection_reason(rows.tokens[row], rows.latents[row], lengths[sample])
            for row, sample in enumerate(ids)
        ]
        is_bad = np.array([reason is not None for reason in reasons])
        if is_bad.any():
            replaced = is_bad.reshape(is_bad.shape + (1,) * (rows.latents.ndim - 1))
            rows = rows._replace(
                tokens=[
                    tokens[:0] if bad else tokens
                    for tokens, bad in zip(rows.tokens, is_bad, strict=True)
                ],
                latents=np.where(
                    replaced, self.latent_mean.astype(rows.latents.dtype), rows.latents
                ),
            )
        reports = [
            {
                "id": int(sample),
                "reason": reason or repaired[row],
                **({} if reason else {"repaired": True}),
            }
            for row, (sample, slot, reason) in enumerate(zip(ids, slots, reasons, strict=True))
            if (reason or row in repaired) and slot < num_real
        ]
        return rows, is_bad, reports

    def _replace_nonfinite(self, rows: Rows) -> tuple[Rows, dict[int, str]]:
        """Replace non-finite latent values by the mean (stability.nan_to_num); return what was
        done by row.
        """
        if not self.nan_to_num or np.isfinite(rows.latents).all():
            return rows, {}
        bad = ~np.isfinite(rows.latents)
        what = "non-finite values in its latent, replaced by the mean (stability.nan_to_num)"
        repaired = {
            int(row): f"{int(bad[row].sum())} {what}" for row in np.unique(np.nonzero(bad)[0])
        }
        mean = self.latent_mean.astype(rows.latents.dtype)
        return rows._replace(latents=np.where(bad, mean, rows.latents)), repaired

    def _rejection_reason(self, tokens: np.ndarray, latent: np.ndarray, length: int) -> str | None:
        """Return why a sample must not be trained on; None for a valid one."""
        return self._rejected_latent(latent) or self._rejected_tokens(tokens, length)

    def _rejected_latent(self, latent: np.ndarray) -> str | None:
        if not np.isfinite(latent).all():
            return f"{int((~np.isfinite(latent)).sum())} non-finite values in its latent"
        norms = np.linalg.norm(latent, axis=-1).reshape(-1).tolist()
        norm = next(
            (norm for norm in norms if norm > self.max_norm or not (norm or self.zero_ok)), None
        )
        if norm is not None:
            least = "" if self.zero_ok else "above 0 and "
            return f"a latent of norm {norm:.4g}, expected {least}at most {self.max_norm:.4g}"
        return None

    def _rejected_tokens(self, tokens: np.ndarray, length: int) -> str | None:
        if len(tokens) + 1 != length:
            return f"{len(tokens)} tokens where the index says {length - 1}"
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            return f"a token id outside 0..{self.vocab_size - 1}"
        return None


# -- draws and masks ------------------------------------------------------------------------------


def slot_uniforms(
    seed: int, batch: GlobalBatch, slots: np.ndarray, stream: int, offset: float
) -> np.ndarray:
    """Return the low-discrepancy uniforms [B] fp64 of some slots, by one of a global batch's
    permutations: of modes (0), text (1) and latent (2) timesteps.

    A place divided by the batch's size, plus the batch's offset, is a slot's uniform number: over
    the batch they are evenly spread, and in an order that depends on no other draw.
    """
    # Placeholders lie past the end of the batch; any slot will do for them.
    in_batch = np.minimum(slots, batch.size - 1)
    key = batch.epoch * 1_000_003 + batch.index
    places = permute(in_batch, batch.size, seed * 3 + stream + 11, key)
    return low_discrepancy(places, offset, batch.size)


def dropout_keys(seed: int, epoch: int, ids: np.ndarray, slots: np.ndarray) -> Tensor:
    """Keys of `RowDropout` for the samples ids [B] at slots [B] of a global batch; [B] int64."""
    return _sample_keys(seed, epoch, ids, slots, _DROPOUT_STREAM)


def noise_keys(seed: int, epoch: int, ids: np.ndarray, slots: np.ndarray) -> Tensor:
    """Keys of `keyed_normals` for the samples ids [B] at slots [B] of a global batch; [B]
    int64.
    """
    return _sample_keys(seed, epoch, ids, slots, _NOISE_STREAM)


def _sample_keys(seed: int, epoch: int, ids: np.ndarray, slots: np.ndarray, stream: int) -> Tensor:
    keys = [
        counter_generator(seed, epoch, sample, slot, stream).bit_generator.random_raw()
        for sample, slot in zip(ids.tolist(), slots.tolist(), strict=True)
    ]
    return torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))


def keyed_normals(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers on the device of their keys, equal on all devices up to rounding.

    Number i of SplitMix64 (Steele et al., OOPSLA 2014) started at a sample's key gives two
    uniforms of 31 and 32 bits, and these two normals (Box and Muller, 1958), at most 6.7 in size.

    Args:
        keys: Random key of each sample. [B] int64
        shape: Shape of one sample's numbers.

    Returns:
        [B, *shape] fp32.
    """
    count = math.prod(shape)
    half = -(-count // 2)
    bits = mix(keys[:, None] + torch.arange(1, half + 1, device=keys.device) * STEP)
    words = bits.view(torch.int32)  # [B, 2 * half]
    uniform = (words[:, ::2] & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    angle = words[:, 1::2].float().mul_(math.pi * 2.0**-31)
    radius = uniform.log_().mul_(-2).sqrt_()
    normals = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
    return normals[:, :count].reshape(len(keys), *shape)


def mask_texts(
    process: MaskedDiffusion,
    config: TextDiffusionConfig,
    tokens: Tensor,
    strata: Tensor,
    uniform: Tensor,
    maskable: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mask some tokens of every text.

    Args:
        tokens: Clean tokens. [B, S] int64
        strata: Numbers in [0, 1) that decide the noise level. [B] fp64
        uniform: Numbers in [0, 1) that decide which tokens are masked. [B, S] fp64
        maskable: Tokens that may be masked, at least one per row. [B, S] bool

    Returns:
        Noised tokens [B, S], the mask [B, S] bool, timesteps [B] and the NELBO weight [B] of a
        masked token, fp64.
    """
    if config.fully_masked_only:
        masked = maskable.clone()
        ones = torch.ones(len(tokens), dtype=torch.float64)
        return tokens.masked_fill(masked, process.mask_token_id), masked, ones, ones
    if config.masking == "fixed_count":
        noised, masked, fraction = process.corrupt_count(
            tokens, strata, uniform, maskable, process.mask_token_id
        )
        return noised, masked, process.timestep_of(fraction), 1 / fraction
    t = stretch(strata, config.min_timestep)
    noised, masked = process.corrupt(tokens, t, uniform, maskable)
    return noised, masked, t, process.loss_weights(t)
