"""The image_text task: captions from images and images from captions. Torch is imported where it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from mmldlm.tasks.image_text.config import ImageTextConfig
from mmldlm.tasks.image_text.data import ImageTextData, open_data
from mmldlm.tasks.image_text.words import MODES, both_words
from mmldlm.tasks.translation.task import TranslationTask

if TYPE_CHECKING:
    from mmldlm.tasks.image_text.noiser import ImageNoiser
    from mmldlm.tasks.translation.noiser import NoisedBatch, Noiser


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

    # -- without torch ----------------------------------------------------------------------------------------------

    def open_data(self, config: ImageTextConfig) -> ImageTextData:
        return open_data(config)

    def describe(self, config: ImageTextConfig) -> str:
        shares = {mode: share for mode, share in config.training.mode_weights().items() if share}
        modes = ", ".join(f"{both_words(mode)} {share:.0%}" for mode, share in shares.items())
        return f"{modes}; timestep_shift={config.latent_diffusion.timestep_shift:g}, freeze={config.training.freeze}"

    # -- with torch -------------------------------------------------------------------------------------------------

    def noiser_class(self) -> type[Noiser]:
        from mmldlm.tasks.image_text.noiser import ImageNoiser

        return ImageNoiser

    def collator(self, data: ImageTextData, seed: int | None = None, *words: Any, **options: Any) -> ImageNoiser:
        """Return the noiser; only that of training shifts images (data.shift_pixels)."""
        noiser = super().collator(data, seed, *words, **options)
        if seed is None and data.config.data.shift_pixels:
            noiser.codec, noiser.shift_pixels = data.codec, data.config.data.shift_pixels
        return noiser

    def model_config(self, data: ImageTextData) -> dict[str, Any]:
        """Return what the translation task returns, and what turns latents into pixels."""
        return super().model_config(data) | {"image": data.codec.identity}

    # -- debugging --------------------------------------------------------------------------------------------------

    def check_batch(self, data: ImageTextData, batch: NoisedBatch) -> list[str]:
        from mmldlm.tasks.translation.batch_checks import batch_problems

        return batch_problems(data, batch, data.shifted_latents)
