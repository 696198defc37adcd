"""The error of the clean image that a model predicts from a noisy one, by noise level and
caption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.errors import MmldlmError
from mmldlm.evaluation.sentences import Sentences
from mmldlm.evaluation.statistics import Estimate, mean
from mmldlm.models.base import LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.latents import pad_texts
from mmldlm.sampling.model import Model, device_of
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.counter_rng import Stream, normals, uniforms
from mmldlm.utils.progress import ProgressCallback

TIMESTEPS = (0.75, 0.9, 1.0)
"""Noise levels at which the x0 error is measured; below them the noisy image itself says nearly
all.
"""
ARMS = ("right", "null", "shuffled")
_ROWS = 64


@torch.inference_mode()
def x0_errors(
    pretrained: Pretrained,
    sentences: Sentences,
    *,
    draws: int,
    seed: int,
    progress: ProgressCallback | None = None,
) -> dict[tuple[float, str], np.ndarray]:
    """Return the squared error per dimension, in model space, of (t, arm of ARMS): [N] fp64; for
    the t of TIMESTEPS at which the process estimates x0 (`sampling_start`).

    All arms of an image share its noise, so that their differences are paired.

    Args:
        sentences: Captions, and latents [N, L, D] of images.
        draws: Draws of noise per image.
    """
    model, device = pretrained.model, device_of(pretrained.model)
    count, shape = len(sentences), sentences.latents.shape[1:]
    timesteps = [t for t in TIMESTEPS if t <= pretrained.latent_diffusion.sampling_start]
    found = {(t, arm): np.zeros(count) for t in timesteps for arm in ARMS}
    for rows, captions in _batches(model, sentences, progress):
        clean = model.scale_latents(torch.from_numpy(sentences.latents[rows]).to(device))
        noise = normals(seed, Stream.X0_ERROR, rows.tolist(), (draws, *shape)).to(device)
        for t in timesteps:
            for draw in range(draws):
                for arm in ARMS:
                    error = _error(pretrained, captions[arm], clean, noise[:, draw], t)
                    found[t, arm][rows] += error.cpu().numpy() / draws
    return found


def _batches(
    model: Model, sentences: Sentences, progress: ProgressCallback | None
) -> Iterator[tuple[np.ndarray, dict[str, TextInputs | None]]]:
    """Yield rows of images, and their captions by arm of ARMS; report each batch when it is
    done.
    """
    config, device, count = model.config, device_of(model), len(sentences)

    def padded(of_rows: np.ndarray) -> TextInputs:
        texts = [sentences.tokens[row] for row in of_rows.tolist()]
        tokens, real = pad_texts(texts, config.eos_token_id, config.pad_token_id, device)
        return TextInputs(tokens, attention_mask=real)

    for start in range(0, count, _ROWS):
        rows = np.arange(start, min(start + _ROWS, count))
        shuffled = padded(sentences.shuffled_index[rows])
        yield rows, {"right": padded(rows), "null": None, "shuffled": shuffled}
        if progress is not None:
            progress(start + len(rows), count)


def _no_tokens(device: torch.device) -> TokenQuery:
    return TokenQuery(torch.empty(0, dtype=torch.int64, device=device))


def _error(
    pretrained: Pretrained, text: TextInputs | None, clean: Tensor, noise: Tensor, t: float
) -> Tensor:
    """Return the squared error [B] fp64 of the x0 estimate at one noise level."""
    process, device = pretrained.latent_diffusion, clean.device
    times = torch.full((len(clean),), t, dtype=torch.float64, device=device)
    z = process.add_noise(clean, noise, times)
    output = pretrained.model(text, LatentInputs(z, times.float()), _no_tokens(device))
    x0 = process.to_x0(output.latent.float(), z, times)
    return (x0 - clean).double().square().flatten(1).mean(1)


def x0_estimates(errors: dict[tuple[float, str], np.ndarray]) -> dict[str, Estimate]:
    """Return error and paired gains of the right caption at every t of `x0_errors`."""
    unit = "squared error"
    found: dict[str, Estimate] = {}
    for t in dict.fromkeys(t for t, _ in errors):
        name = f"x0_error_t{round(100 * t)}"
        right = errors[t, "right"]
        found |= {f"{name}_{arm}": mean(errors[t, arm], unit) for arm in ARMS}
        found |= {
            f"{name}_gain_{arm}": mean(errors[t, arm] - right, unit)
            for arm in ("null", "shuffled")
        }
    return found


UNSEEN = 0.1  # occurrences added to every code


@torch.inference_mode()
def code_bits(
    model: Model,
    sentences: Sentences,
    *,
    draws: int,
    seed: int,
    progress: ProgressCallback | None = None,
) -> dict[str, np.ndarray]:
    """Return an upper bound (NELBO) of the bits per code of every image, by arm of ARMS: [N] fp64.

    Of the L codes of an image k are masked, and each counts L / k
    (`MaskedDiffusion.corrupt_count`); k is drawn from as many equal strata of 1 .. L as there are
    draws. All arms of an image share its masks, so their differences are paired.

    Args:
        model: Model of codes.
        sentences: Captions, and ids [N, L, 1] of images (of one code an image [N, 1]).
        draws: Masks per image.

    Raises:
        MmldlmError: NaN predictions.
    """
    device, count = device_of(model), len(sentences)
    ids = model.scale_latents(torch.from_numpy(sentences.latents)).reshape(count, -1)
    found = {arm: np.zeros(count) for arm in ARMS}
    for rows, captions in _batches(model, sentences, progress):
        clean = ids[torch.from_numpy(rows)].to(device)
        uniform = uniforms(seed, Stream.CODE_BITS, rows.tolist(), (draws, clean.shape[1] + 1)).to(
            device
        )
        for draw in range(draws):
            level = (draw + uniform[:, 0, -1]) / draws
            for arm in ARMS:
                nats = _nats(model, captions[arm], clean, level, uniform[:, draw, :-1])
                found[arm][rows] += nats.cpu().numpy() / (draws * clean.shape[1] * math.log(2))
    if not all(np.isfinite(values).all() for values in found.values()):
        raise MmldlmError(
            "the model returned NaN or infinite likelihoods of codes: its weights are corrupt"
        )
    return found


def _nats(
    model: Any, text: TextInputs | None, ids: Tensor, level: Tensor, uniform: Tensor
) -> Tensor:
    """Return one draw of the NELBO of images [B] fp64, in nats.

    Args:
        model: Model of codes, whose forward pass also reads a `latent_query`.
        ids: [B, L] int64.
        level: [B] in [0, 1), how many are masked.
        uniform: [B, L], which.
    """
    everything = torch.ones_like(ids, dtype=torch.bool)
    noised, masked, share = MaskedDiffusion.corrupt_count(
        ids, level, uniform, everything, model.config.num_codes
    )
    positions = masked.flatten().nonzero()[:, 0]
    rows = positions // ids.shape[1]
    weights = (1 / share)[rows]
    codes = TokenQuery(positions, ids.flatten()[positions], weights.float())
    latents = LatentInputs(noised[..., None], share.float())
    nll = model(text, latents, _no_tokens(ids.device), latent_query=codes).latent.nll
    per_image = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    return per_image.index_add_(0, rows, nll.double() * weights)


def bit_estimates(bits: dict[str, np.ndarray]) -> dict[str, Estimate]:
    """Return bits per code of every arm, and the paired gains of the right caption."""
    found = {f"code_bits_{arm}": mean(bits[arm], "bits / code") for arm in ARMS}
    gains = {
        f"code_bits_gain_{arm}": mean(bits[arm] - bits["right"], "bits / code")
        for arm in ("null", "shuffled")
    }
    return found | gains


def frequency_estimates(
    blocks: Iterable[tuple[int, np.ndarray]], sentences: Sentences, num_codes: int
) -> dict[str, Estimate]:
    """Return the bits per code of the frequencies of training codes alone: what a model without
    context pays.

    Args:
        blocks: (first row, ids [n, L, 1]) of the training split.
    """
    counts = np.full(num_codes, UNSEEN)
    for _, ids in blocks:
        counts += np.bincount(ids.ravel(), minlength=num_codes)
    bits = -np.log2(counts / counts.sum())[sentences.latents.reshape(len(sentences), -1)]
    return {"code_bits_right": mean(bits.mean(1), "bits / code")}
