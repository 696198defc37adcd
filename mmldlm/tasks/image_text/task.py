"""The image_text task: captions from images and images from captions.

Torch is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mmldlm.tasks.image_text.config import ImageTextConfig
from mmldlm.tasks.image_text.data import ImageTextData, open_data
from mmldlm.tasks.image_text.words import MODES, both_words
from mmldlm.tasks.translation.task import TranslationTask

if TYPE_CHECKING:
    from torch import Tensor

    from mmldlm.tasks.image_text.noiser import ImageNoiser
    from mmldlm.tasks.pretrained import Pretrained
    from mmldlm.tasks.translation.noiser import NoisedBatch, Noiser
    from mmldlm.tasks.translation.objective import TranslationObjective


class ImageTextTask(TranslationTask):
    """The translation task on images of N latents each (docs/images.md).

    Modes have two words each: t2i (= t2l), i2t (= l2t), joint (= unconditional).
    """

    name = "image_text"
    config_class = ImageTextConfig
    samplers: ClassVar = TranslationTask.samplers | {
        word: TranslationTask.samplers[mode] for word, mode in MODES.items()
    }
    sample_rate = "images_per_second"
    unread_of_kinds: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "t2i": ("sampler", "temperature", "top_p")
    }
    """Kind of `mmldlm sample` -> options of it that only a task of other latents reads."""
    t2i_options: ClassVar[tuple[str, ...]] = ("method", "eta")
    """Options of t2i alone that `draw_images` reads."""
    t2i_steps: ClassVar[int | None] = None
    """Default number of steps of an image; None: that of `mmldlm sample`."""
    corruption = "noised"
    """What is done to the latents."""

    # -- without torch
    # ---------------------------------------------------------------------------------------------

    def open_data(self, config: ImageTextConfig) -> ImageTextData:
        return open_data(config)

    def describe(self, config: ImageTextConfig) -> str:
        shares = {mode: share for mode, share in config.training.mode_weights().items() if share}
        modes = ", ".join(f"{both_words(mode)} {share:.0%}" for mode, share in shares.items())
        return f"{modes}; {self.describe_latents(config)}, freeze={config.training.freeze}"

    def describe_latents(self, config: ImageTextConfig) -> str:
        """Return a few words about how the latents are corrupted, for `describe`."""
        return f"timestep_shift={config.latent_diffusion.timestep_shift:g}"

    # -- with torch
    # ---------------------------------------------------------------------------------------------

    def noiser_class(self, config: ImageTextConfig) -> type[Noiser]:
        from mmldlm.tasks.image_text.noiser import ImageNoiser

        return ImageNoiser

    def collator(
        self, data: ImageTextData, seed: int | None = None, *words: Any, **options: Any
    ) -> ImageNoiser:
        """Return the noiser; only that of training shifts images (data.shift_pixels)."""
        noiser = super().collator(data, seed, *words, **options)
        noiser.counts_images = data.config.model.latent_grids is not None
        if seed is None and data.config.data.shift_pixels:
            noiser.codecs, noiser.shift_pixels = data.codecs, data.config.data.shift_pixels
            noiser.shift_only_i2t = data.config.data.shift_only_i2t
        return noiser

    def objective(self, config: ImageTextConfig) -> TranslationObjective:
        from mmldlm.tasks.image_text.objective import ImageObjective

        return ImageObjective(config)

    def model_config(self, data: ImageTextData) -> dict[str, Any]:
        """Return what the translation task returns, and what turns latents into pixels."""
        return super().model_config(data) | {"image": data.codec.identity}

    # -- sampling
    # ---------------------------------------------------------------------------------------------

    def draw_images(
        self, pretrained: Pretrained, captions: list[list[int]], **options: Any
    ) -> Tensor:
        """Sample the latents of one image for each caption.

        Args:
            options: steps, guidance, guidance_interval, seed, batch_tokens and progress of
                `sample_latents`, and `t2i_options`.
        """
        from mmldlm.sampling.latents import sample_latents

        return sample_latents(
            pretrained.model,
            captions,
            diffusion=pretrained.latent_diffusion,
            clamp=pretrained.clamp_x0,
            **options,
        )

    # -- debugging
    # ---------------------------------------------------------------------------------------------

    def check_batch(self, data: ImageTextData, batch: NoisedBatch) -> list[str]:
        from mmldlm.tasks.translation.batch_checks import batch_problems

        return batch_problems(data, batch, data.shifted_latents)
