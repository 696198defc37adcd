"""Extent and options of an evaluation of images."""

from __future__ import annotations

from dataclasses import dataclass

from mmldlm.sampling.options import IMAGE_GUIDANCE, IMAGE_STEPS, NUM_LENGTHS

TIMESTEPS = (0.75, 0.9, 1.0)
"""Noise levels at which the x0 error is measured; below them the noisy image itself says nearly all."""


@dataclass
class ImageSettings:
    """Extent and options of the measurements.

    Attributes:
        num_samples: unseen images; None is 1,000, or all if there are fewer.
        num_steps: passes that write a caption.
        latent_steps: denoising steps of an image.
        num_draws: timesteps per caption in the NELBO, and draws of noise per image in the x0 error.
        control_samples: how many of the images the untrained controls use.
        guidance: the second scale of classifier-free guidance of images; the first is 1.
        presence_penalty: of captions (see `sample_text`).
        num_lengths: lengths in which a caption is written; the most probable one is kept.
        seed: of every draw.
        batch_size: captions of full length per pass; None: the default of each measurement.
    """

    num_samples: int | None = None
    num_steps: int = 8
    latent_steps: int = IMAGE_STEPS
    num_draws: int = 2
    control_samples: int = 100
    guidance: float = IMAGE_GUIDANCE
    presence_penalty: float = 0.0
    num_lengths: int = NUM_LENGTHS
    seed: int = 0
    batch_size: int | None = None
