"""The information curve: the cross-entropy of a token as a function of how many others are known.

c(j) = E[-log p(x_i | x_S, z)] over random sets S of j known positions and unknown positions i. The NELBO with fixed
mask counts is the sum of c(j) over j = 0 .. L - 1, so its own evaluation measures the curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.errors import MmldlmError
from mmldlm.evaluation.information.isotonic import decreasing_fit
from mmldlm.evaluation.metrics.nelbo import Score
from mmldlm.sampling.device import device_of
from mmldlm.sampling.latent_sampler import pad_texts
from mmldlm.utils.counter_rng import Stream, uniforms

NUM_BUCKETS, MIN_SENTENCES = 6, 30  # of lengths; of a bucket
NUM_SHARES = 10  # points of a curve in the report


@dataclass
class TextCurves:
    """The curves of N texts, one random set of each size per text.

    Attributes:
        nats: N arrays [L] fp64: mean of -log p over the unknown positions, with j = 0 .. L - 1 known; L counts the EOS.
        length_nll: [N] fp64 nats of the lengths, or None for a model that does not predict them.
    """

    nats: list[np.ndarray]
    length_nll: np.ndarray | None

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64, EOS counted."""
        return np.array([len(values) for values in self.nats])

    def cost(self, schedules: Sequence[Sequence[int]]) -> np.ndarray:
        """Return NELBO_T = sum_i n_i c(r_i) of each text under its schedule, r_i positions known before pass i: [N].

        Each is an unbiased estimate of a bound on the negative log-likelihood of the text, if each pass fills n_i
        random positions.
        """
        costs = []
        for nats, counts in zip(self.nats, schedules, strict=True):
            known = np.cumsum([0, *counts[:-1]])
            costs.append(float(np.dot(counts, nats[known])))
        return np.array(costs)


@torch.inference_mode()
def text_curves(
    model: nn.Module,
    texts: Sequence[Sequence[int]],
    latents: torch.Tensor | None,
    *,
    score: Score,
    seed: int = 0,
    batch_tokens: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> TextCurves:
    """Score every text at every mask count, with other random positions for each.

    Args:
        model: whose config says what pads and ends a text, and whose `scale_latents` is applied.
        texts: N lists of ids without EOS.
        latents: [N, D] (or [N, M, D]) in the encoder's space; None: the null condition, on the same masks.
        score: `TextTask.score_texts` of a task with `scores_by_count`.
        seed: the masks of a text depend on the seed and its index only.
        progress: called with the number of scored (text, count) pairs and their total.

    Raises:
        MmldlmError: NaN predictions.
    """
    config, device = model.config, device_of(model)
    lengths = np.array([len(text) + 1 for text in texts])
    nats = [np.zeros(length) for length in lengths]
    length_nll: np.ndarray | None = None
    done, total = 0, int(lengths.sum())
    for rows in token_budget_batches(lengths, batch_tokens):
        tokens, real = pad_texts([texts[row] for row in rows], config.eos_token_id, config.pad_token_id, device)
        given = None if latents is None else model.scale_latents(latents[torch.from_numpy(rows.copy())].to(device))
        size = real.sum(1)
        uniform = uniforms(seed, Stream.LIKELIHOOD, rows, (tokens.shape[1], config.max_seq_len + 1)).to(device)
        for count in range(1, tokens.shape[1] + 1):
            own = (size >= count).nonzero()[:, 0]
            middle = (count - 0.5) / size[own, None].double()  # of the stratum in which `count` tokens are masked
            draws = torch.cat([uniform[own, count - 1, : tokens.shape[1]], middle], dim=1)
            found = score(tokens[own], real[own], None if given is None else given[own], draws, (0, 1))
            assert bool((found.scored == count).all()), "score_texts masked another number of tokens"
            values = (found.nats / size[own]).cpu().numpy()
            for row, value in zip(rows[own.cpu().numpy()], values):
                nats[row][lengths[row] - count] = value
            if count == 1 and found.length_nll is not None:
                length_nll = np.zeros(len(texts)) if length_nll is None else length_nll
                length_nll[rows] = found.length_nll.double().cpu().numpy()
            done += len(own)
            if progress is not None:
                progress(done, total)
    if not all(np.isfinite(values).all() for values in nats):
        raise MmldlmError("the model returned a NaN or infinite likelihood on validation text: its weights are corrupt")
    return TextCurves(nats, length_nll)


@dataclass
class CurvePoint:
    """The curve at one share of known positions: mean, standard error over sentences, isotonic fit."""

    share: float
    nats: float
    se: float
    fitted: float


class BucketCurve:
    """The curve of texts of similar lengths, as a function of the share of known positions.

    The fit is the isotonic regression over all values of the bucket: a curve that never rises, because a sound model
    never predicts worse for knowing more.

    Args:
        nats: arrays [L] of its texts.

    Attributes:
        shortest, longest: lengths of its texts, EOS counted.
    """

    def __init__(self, nats: Sequence[np.ndarray]):
        self.nats = list(nats)
        self.shortest, self.longest = min(map(len, self.nats)), max(map(len, self.nats))
        shares = np.concatenate([np.arange(len(values)) / len(values) for values in self.nats])
        self._shares, inverse = np.unique(shares, return_inverse=True)
        weights = np.bincount(inverse).astype(np.float64)
        means = np.bincount(inverse, weights=np.concatenate(self.nats)) / weights
        self._fitted = decreasing_fit(means, weights)

    def fitted(self, length: int) -> np.ndarray:
        """Return c(j) for j = 0 .. length - 1: [length] fp64, never rising."""
        return np.interp(np.arange(length) / length, self._shares, self._fitted)

    def points(self) -> list[CurvePoint]:
        """Return the curve at `NUM_SHARES` shares, each the mean over an equal part of the shares."""
        means = self._part_means()
        points = []
        for part in range(NUM_SHARES):
            values = means[:, part][~np.isnan(means[:, part])]
            if len(values) < 2:
                continue
            share = (part + 0.5) / NUM_SHARES
            fitted = float(np.interp(share, self._shares, self._fitted))
            error = float(values.std(ddof=1) / np.sqrt(len(values)))
            points.append(CurvePoint(share, float(values.mean()), error, fitted))
        return points

    def rises(self, in_standard_errors: float = 2.0) -> list[dict[str, float]]:
        """Return where knowing more makes the model worse: rises between neighboring points, paired over sentences.

        There the model is undertrained. With 9 pairs of points, one rise of 2 standard errors is no surprise.
        """
        means, found = self._part_means(), []
        for part, after in pairwise(range(NUM_SHARES)):
            rise = means[:, after] - means[:, part]
            rise = rise[~np.isnan(rise)]
            if len(rise) < 2:
                continue
            mean, error = float(rise.mean()), float(rise.std(ddof=1) / np.sqrt(len(rise)))
            if mean > in_standard_errors * error:
                shares = {"from_share": (part + 0.5) / NUM_SHARES, "to_share": (after + 0.5) / NUM_SHARES}
                found.append({**shares, "rise": mean, "se": error})
        return found

    def _part_means(self) -> np.ndarray:
        """Mean of each text over each part of the shares, NaN where a short text has none: [N, NUM_SHARES]."""
        means = np.full((len(self.nats), NUM_SHARES), np.nan)
        for row, values in enumerate(self.nats):
            part = np.arange(len(values)) * NUM_SHARES // len(values)
            sums, counts = np.bincount(part, values, NUM_SHARES), np.bincount(part, minlength=NUM_SHARES)
            means[row, counts > 0] = sums[counts > 0] / counts[counts > 0]
        return means


class InformationCurve:
    """The curve of a model by length: buckets of neighboring lengths with enough sentences each.

    Args:
        nats: arrays [L] of the texts, as in `TextCurves`.
    """

    def __init__(self, nats: Sequence[np.ndarray]):
        lengths = np.array([len(values) for values in nats])
        self.buckets = [
            BucketCurve([values for values in nats if low <= len(values) <= high])
            for low, high in length_buckets(lengths)
        ]

    def fitted(self, length: int) -> np.ndarray:
        """Return c(j) for j = 0 .. length - 1, from the bucket of the nearest lengths: [length] fp64, never rising."""
        distances = [max(bucket.shortest - length, length - bucket.longest, 0) for bucket in self.buckets]
        return self.buckets[int(np.argmin(distances))].fitted(length)


def length_buckets(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Return (shortest, longest) of at most NUM_BUCKETS buckets, of at least MIN_SENTENCES texts each if there are."""
    wanted = max(MIN_SENTENCES, len(lengths) / NUM_BUCKETS)
    values, counts = np.unique(lengths, return_counts=True)
    buckets: list[tuple[int, int]] = []
    start, size, left = 0, 0, len(lengths)
    for index, count in enumerate(counts):
        size, left = size + int(count), left - int(count)
        if left == 0 or (size >= wanted and left >= MIN_SENTENCES):
            buckets.append((int(values[start]), int(values[index])))
            start, size = index + 1, 0
    return buckets
