"""Extent and options of an evaluation of images."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmldlm.sampling.options import IMAGE_GUIDANCE, IMAGE_STEPS, NUM_LENGTHS
from mmldlm.tasks.image_text.task import ImageTextTask

TIMESTEPS = (0.75, 0.9, 1.0)
"""Noise levels at which the x0 error is measured; below them the noisy image itself says nearly
all.
"""


@dataclass
class ImageSettings:
    """Extent and options of the measurements.

    Attributes:
        num_samples: unseen images; None is 1,000, or all if there are fewer.
        num_steps: passes that write a caption.
        latent_steps: denoising steps of an image; None: 20, of codes 12.
        num_draws: timesteps per caption in the NELBO, and draws of noise or masks per image.
        control_samples: how many of the images the untrained controls use.
        guidance: the second scale of classifier-free guidance of images; the first is 1.
        presence_penalty: of captions (see `sample_text`).
        num_lengths: lengths in which a caption is written; the most probable one is kept.
        seed: of every draw.
        batch_size: captions of full length per pass; None: the default of each measurement.
        clip: folder of a CLIPModel that scores made images; None: no CLIP score.
        inception_weights: TorchScript file of the features of FID and KID; None: neither.
    """

    num_samples: int | None = None
    num_steps: int = 8
    latent_steps: int | None = None
    num_draws: int = 4
    control_samples: int = 100
    guidance: float = IMAGE_GUIDANCE
    presence_penalty: float = 0.0
    num_lengths: int = NUM_LENGTHS
    seed: int = 0
    batch_size: int | None = None
    clip: str | None = None
    inception_weights: str | None = None

    def fitted(self, task: ImageTextTask) -> ImageSettings:
        """Return the settings with the default number of steps of a task's images."""
        steps = IMAGE_STEPS if task.t2i_steps is None else task.t2i_steps
        return self if self.latent_steps is not None else replace(self, latent_steps=steps)
