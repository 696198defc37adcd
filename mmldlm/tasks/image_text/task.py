"""The image_text task: captions from images and images from captions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from mmldlm.sampling.latents import sample_latents
from mmldlm.tasks.image_text.config import MODES, ImageTextConfig, both_words
from mmldlm.tasks.image_text.data import ImageTextData, open_data
from mmldlm.tasks.image_text.noiser import ImageNoiser
from mmldlm.tasks.image_text.objective import ImageObjective
from mmldlm.tasks.text_task import Pretrained
from mmldlm.tasks.translation.noiser import Noiser
from mmldlm.tasks.translation.objective import TranslationObjective
from mmldlm.tasks.translation.task import TranslationTask


class ImageTextTask(TranslationTask):
    """The translation task on images of N latents each (docs/images.md).

    Modes have two words each: t2i (= t2l), i2t (= l2t), joint (= unconditional).
    """

    name = "image_text"
    config_class = ImageTextConfig
    samplers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **TranslationTask.samplers,
        **{word: TranslationTask.samplers[mode] for word, mode in MODES.items()},
    }
    sample_rate = "images_per_second"
    unread_of_kinds: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "t2i": ("sampler", "temperature", "top_p")
    }
    """Kind of `mmldlm sample` -> options of it that only a task of other latents reads."""
    t2i_options: ClassVar[tuple[str, ...]] = ("method", "eta")
    """Options of t2i alone that `draw_images` reads."""
    corruption = "noised"
    """What is done to the latents."""

    # -- data and costs ---------------------------------------------------------------------------

    def open_data(self, config: ImageTextConfig) -> ImageTextData:
        return open_data(config)

    def describe(self, config: ImageTextConfig) -> str:
        fractions = {
            mode: fraction for mode, fraction in config.training.mode_weights().items() if fraction
        }
        modes = ", ".join(
            f"{both_words(mode)} {fraction:.0%}" for mode, fraction in fractions.items()
        )
        return f"{modes}; {self.describe_latents(config)}, freeze={config.training.freeze}"

    def describe_latents(self, config: ImageTextConfig) -> str:
        """Return a few words about how the latents are corrupted, for `describe`."""
        return f"timestep_shift={config.latent_diffusion.timestep_shift:g}"

    # -- model, batches and loss ------------------------------------------------------------------

    def noiser_class(self, config: ImageTextConfig) -> type[Noiser]:
        return ImageNoiser

    def collator(
        self, data: ImageTextData, seed: int | None = None, *words: Any, **options: Any
    ) -> Noiser:
        """Return the noiser; only that of training shifts images (data.shift_pixels)."""
        codecs = data.codecs if data.config.data.shift_pixels else None
        return super().collator(data, seed, *words, codecs=codecs, **options)

    def objective(self, config: ImageTextConfig) -> TranslationObjective:
        return ImageObjective(config)

    def model_config(self, data: ImageTextData) -> dict[str, Any]:
        """Return what the translation task returns, and what turns latents into pixels."""
        return super().model_config(data) | {"image": data.codec.identity}

    # -- sampling ---------------------------------------------------------------------------------

    def draw_images(
        self, pretrained: Pretrained, captions: list[list[int]], **options: Any
    ) -> Tensor:
        """Sample the latents of one image for each caption.

        Args:
            options: Options steps, guidance, guidance_interval, seed, batch_tokens and progress of
                `sample_latents`, and `t2i_options`.
        """
        return sample_latents(
            pretrained.model,
            captions,
            diffusion=pretrained.latent_diffusion,
            clamp=pretrained.clamp_x0,
            **options,
        )
