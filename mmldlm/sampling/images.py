"""Images from captions, captions from images, and pairs: what differs from texts and embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mmldlm.data.images.codec import ImageCodec
from mmldlm.errors import UserError
from mmldlm.sampling.inputs import given_texts, tokenize_texts
from mmldlm.sampling.latent_sampler import sample_latents
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.utils.formatting import count_noun
from mmldlm.utils.progress import ProgressCallback

IMAGE_STEPS = 20
"""Default number of denoising steps of an image. One step, enough for an embedding, gives a blurred mean image."""
IMAGE_GUIDANCE = 2.0
NUM_LENGTHS = 3
"""Default number of lengths in which a caption is written: the model reads the length from the mean patch alone."""


def codec_of(pretrained: Pretrained) -> ImageCodec:
    """Return what turns the latents of a model into pixels.

    Raises:
        UserError: the model was not trained on images, or its files are damaged.
    """
    if pretrained.image is None:
        raise UserError(
            "a model of images (task=image_text)",
            f"{pretrained.folder or 'a model'} of task={pretrained.task.name}",
            "use another checkpoint, or sample l2t, t2l or unconditional",
        )
    return ImageCodec.from_identity(pretrained.image, pretrained.config_folder)


def make_images(
    pretrained: Pretrained,
    captions: list[list[int]],
    *,
    steps: int = IMAGE_STEPS,
    guidance: float = 1.0,
    method: str = "ddim",
    eta: float | str = 0.0,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample one image per caption of ids without EOS.

    Args:
        options: others of `sample_latents`.

    Returns:
        latents [B, N, D] fp32 and images [B, S, S, C] uint8.
    """
    latents = sample_latents(
        pretrained.model,
        captions,
        diffusion=pretrained.latent_diffusion,
        steps=steps,
        method=method,
        eta=eta,
        guidance=guidance,
        seed=seed,
        progress=progress,
        **options,
    ).numpy()
    return latents, codec_of(pretrained).decode(latents)
