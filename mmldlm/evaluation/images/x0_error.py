"""The error of the clean image that a model predicts from a noisy one, by noise level and
caption.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mmldlm.evaluation.images.settings import TIMESTEPS
from mmldlm.evaluation.sentences import Sentences
from mmldlm.evaluation.statistics import Estimate, mean
from mmldlm.sampling.device import device_of
from mmldlm.sampling.latent_sampler import pad_texts
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.utils.counter_rng import Stream, normals
from mmldlm.utils.progress import ProgressCallback

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
    """Return the squared error per dimension, in model space, of (t, arm of ARMS): [N] fp64.

    All arms of an image share its noise, so that their differences are paired.

    Args:
        sentences: captions, and latents [N, L, D] of images.
        draws: of noise per image.
    """
    model, device = pretrained.model, device_of(pretrained.model)
    count, shape = len(sentences), sentences.latents.shape[1:]
    found = {(t, arm): np.zeros(count) for t in TIMESTEPS for arm in ARMS}
    for start in range(0, count, _ROWS):
        rows = np.arange(start, min(start + _ROWS, count))
        clean = model.scale_latents(torch.from_numpy(sentences.latents[rows]).to(device))
        noise = normals(seed, Stream.X0_ERROR, rows.tolist(), (draws, *shape)).to(device)
        partners = sentences.shuffled_index[rows]
        for t in TIMESTEPS:
            for draw in range(draws):
                given = {
                    "right": sentences.tokens_of(rows),
                    "null": None,
                    "shuffled": sentences.tokens_of(partners),
                }
                for arm, captions in given.items():
                    error = _error(pretrained, captions, clean, noise[:, draw], t)
                    found[t, arm][rows] += error.cpu().numpy() / draws
        if progress is not None:
            progress(len(rows) + start, count)
    return found


def _error(
    pretrained: Pretrained,
    captions: Sequence[Sequence[int]] | None,
    clean: Tensor,
    noise: Tensor,
    t: float,
) -> Tensor:
    """Return the squared error [B] fp64 of the x0 estimate at one noise level."""
    model, process = pretrained.model, pretrained.latent_diffusion
    times = torch.full((len(clean),), t, dtype=torch.float64, device=clean.device)
    z = process.add_noise(clean, noise, times)
    tokens = real = None
    if captions is not None:
        tokens, real = pad_texts(
            captions, model.config.eos_token_id, model.config.pad_token_id, clean.device
        )
    no_positions = torch.empty(0, dtype=torch.int64, device=clean.device)
    prediction = model(tokens, z, None, times.float(), real, text_positions=no_positions)[
        "latent_pred"
    ].float()
    x0 = process.to_x0(prediction, z, times)
    return (x0 - clean).double().square().flatten(1).mean(1)


def x0_estimates(errors: dict[tuple[float, str], np.ndarray]) -> dict[str, Estimate]:
    """Return error and paired gains of the right caption at every t."""
    unit, found = "squared error", {}
    for t in TIMESTEPS:
        name = f"x0_error_t{round(100 * t)}"
        right = errors[t, "right"]
        found |= {f"{name}_{arm}": mean(errors[t, arm], unit) for arm in ARMS}
        found |= {
            f"{name}_gain_{arm}": mean(errors[t, arm] - right, unit)
            for arm in ("null", "shuffled")
        }
    return found
