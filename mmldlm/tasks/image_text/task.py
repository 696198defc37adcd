"""The image_text task: captions from images and images from captions.

Torch is imported where it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from mmldlm.tasks.base import Metric
from mmldlm.tasks.image_codes.config import CODE_SAMPLERS
from mmldlm.tasks.image_text.config import ImageTextConfig
from mmldlm.tasks.image_text.data import ImageTextData, open_data
from mmldlm.tasks.image_text.words import MODES, both_words
from mmldlm.tasks.translation.task import TranslationTask

if TYPE_CHECKING:
    from mmldlm.models import MultimodalMMDiT
    from mmldlm.tasks.image_text.noiser import ImageNoiser
    from mmldlm.tasks.translation.noiser import NoisedBatch, Noiser
    from mmldlm.tasks.translation.objective import TranslationObjective
    from mmldlm.tasks.validation import PassTotals


class ImageTextTask(TranslationTask):
    """The translation task on images of N latents each (docs/images.md).

    Modes have two words each: t2i (= t2l), i2t (= l2t), joint (= unconditional).
    """

    name = "image_text"
    config_class = ImageTextConfig
    samplers: ClassVar = TranslationTask.samplers | {
        **{word: TranslationTask.samplers[mode] or CODE_SAMPLERS for word, mode in MODES.items()}
    }
    sample_rate = "images_per_second"
    sums = (*TranslationTask.sums, "code_nelbo_sum", "code_correct", "code_scored", "code_total")
    metrics = (
        *TranslationTask.metrics,
        Metric(
            "code_loss",
            "code_nelbo_sum",
            "codes",
            label="image",
            is_loss=True,
            evaluation="code_nelbo",
        ),
        Metric("code_accuracy", "code_correct", "code_scored"),
    )

    # -- without torch
    # ---------------------------------------------------------------------------------------------

    def open_data(self, config: ImageTextConfig) -> ImageTextData:
        return open_data(config)

    def describe(self, config: ImageTextConfig) -> str:
        shares = {mode: share for mode, share in config.training.mode_weights().items() if share}
        modes = ", ".join(f"{both_words(mode)} {share:.0%}" for mode, share in shares.items())
        shift = f"timestep_shift={config.latent_diffusion.timestep_shift:g}"
        if config.model.latent_kind == "ids":
            shift = "masked ids"
        return f"{modes}; {shift}, freeze={config.training.freeze}"

    # -- with torch
    # ---------------------------------------------------------------------------------------------

    def noiser_class(self, config: ImageTextConfig) -> type[Noiser]:
        if config.model.num_codes is not None:
            from mmldlm.tasks.image_codes.noiser import CodeNoiser

            return CodeNoiser
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

    def build_model(self, data: ImageTextData) -> MultimodalMMDiT:
        """A function of config and data alone; the embeddings of codes start from their
        patches.
        """
        import torch

        model, codebook = super().build_model(data), data.codec.codebook
        if codebook is not None:
            model.latent_encoder.start_from(torch.from_numpy(codebook.as_float32()))
        return model

    def objective(self, config: ImageTextConfig) -> TranslationObjective:
        if config.model.num_codes is None:
            from mmldlm.tasks.image_text.objective import ImageObjective

            return ImageObjective(config)
        from mmldlm.tasks.image_codes.objective import CodeObjective

        return CodeObjective(config)

    def validation_figures(self, totals: dict[str, PassTotals]) -> dict[str, float]:
        """Return the figures of the translation task; of codes {mode}_code_nelbo (nats a code),
        _code_accuracy.
        """
        found = super().validation_figures(totals)
        for name, total in totals.items():
            if total.sums["code_scored"]:
                found[f"{name}_code_nelbo"] = (
                    total.sums["code_nelbo_sum"] / total.sums["code_total"]
                )
                found[f"{name}_code_accuracy"] = (
                    total.sums["code_correct"] / total.sums["code_scored"]
                )
        return found

    def model_config(self, data: ImageTextData) -> dict[str, Any]:
        """Return what the translation task returns, and what turns latents into pixels."""
        return super().model_config(data) | {"image": data.codec.identity}

    # -- debugging
    # ---------------------------------------------------------------------------------------------

    def check_batch(self, data: ImageTextData, batch: NoisedBatch) -> list[str]:
        from mmldlm.tasks.translation.batch_checks import batch_problems

        problems = batch_problems(data, batch, data.shifted_latents)
        if (codes := data.config.model.num_codes) is not None:
            from mmldlm.tasks.image_codes.noiser import code_problems

            problems += code_problems(batch, codes)
        return problems
