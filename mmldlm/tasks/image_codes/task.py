"""The image_codes task: captions from images, and images as ids of codes from captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmldlm.models.flops import Flops, timestep_flops
from mmldlm.models.memory import head_bytes, regression_bytes
from mmldlm.sampling.records import TextSamples
from mmldlm.tasks.base import Metric
from mmldlm.tasks.image_codes.config import CODE_SAMPLERS, CODE_STEPS, ImageCodesConfig
from mmldlm.tasks.image_codes.data import ImageCodesData, open_data
from mmldlm.tasks.image_codes.model import CodeEncoder, CodesMMDiT
from mmldlm.tasks.image_codes.noiser import CodeNoiser, CodesBatch, code_problems
from mmldlm.tasks.image_codes.objective import CodeObjective
from mmldlm.tasks.image_codes.sampling import sample_codes, sample_codes_and_texts
from mmldlm.tasks.image_text.task import ImageTextTask
from mmldlm.tasks.text_task import Pretrained
from mmldlm.tasks.validation import PassTotals
from mmldlm.utils.validation import not_none

CODE_SUMS = ("code_nelbo_sum", "code_correct", "code_scored", "code_total")


class ImageCodesTask(ImageTextTask):
    """The image_text task on ids of codes, which are masked as the text is
    (docs/images.md#images-as-codes).
    """

    name = "image_codes"
    config_class = ImageCodesConfig
    architecture = "CodesMMDiT"
    sums = (*ImageTextTask.sums, *CODE_SUMS)
    metrics = (
        *ImageTextTask.metrics,
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
    samplers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **ImageTextTask.samplers,
        "t2i": CODE_SAMPLERS,
    }
    unread_of_kinds: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "t2i": ("method", "eta"),
        "i2t": ("condition_timestep",),
        "joint": ("solver", "condition_timestep"),
    }
    t2i_options: ClassVar[tuple[str, ...]] = ("sampler", "temperature", "top_p")
    t2i_steps: ClassVar[int | None] = CODE_STEPS
    corruption = "masked"

    # -- data and costs ---------------------------------------------------------------------------

    def open_data(self, config: ImageCodesConfig) -> ImageCodesData:
        return open_data(config)

    def describe_latents(self, config: ImageCodesConfig) -> str:
        return "masked ids"

    def activation_bytes(self, config: ImageCodesConfig, length: int) -> int:
        batch, dtype = config.training.train_batch_size, config.training.dtype
        regression = regression_bytes(config.model, batch, dtype)
        return super().activation_bytes(config, length) - regression

    def logits_bytes(self, config: ImageCodesConfig, length: int, on_gpu: bool) -> int:
        """The most bytes of logits when half of text and codes is scored; their heads run one
        after the other.
        """
        model, training = config.model, config.training
        scored = training.train_batch_size * model.num_latents // 2
        return max(
            super().logits_bytes(config, length, on_gpu),
            head_bytes(not_none(model.num_codes), scored, training.dtype, on_gpu),
        )

    def estimate_flops(
        self,
        model_config: Any,
        lengths: Sequence[float],
        num_scored: float,
        *,
        scored_codes: float | None = None,
        **work: Any,
    ) -> Flops:
        """Return the forward FLOPs of a batch: rows of a table, whose mean is pooled, and a head
        over codes in place of the projections.

        Args:
            scored_codes: Codes that the head scores; None: all.
        """
        flops = super().estimate_flops(model_config, lengths, num_scored, **work)
        samples, cond = len(lengths), model_config.cond_dim
        chunks = model_config.tokens_per_latent * model_config.hidden_size
        if scored_codes is None:
            scored_codes = samples * (work.get("num_latents") or model_config.num_latents)
        return flops._replace(
            latent_inputs=samples * 2 * cond * (chunks + cond),
            latent_head=scored_codes * 2 * chunks * model_config.num_codes,
            first_layers=timestep_flops(samples, cond),
        )

    def latent_work(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"scored_codes": sums["code_scored"]}

    # -- model, batches and loss ------------------------------------------------------------------

    def model_class(self) -> type[CodesMMDiT]:
        return CodesMMDiT

    def noiser_class(self, config: ImageCodesConfig) -> type[CodeNoiser]:
        return CodeNoiser

    def build_model(self, data: ImageCodesData) -> CodesMMDiT:
        """A function of config and data alone; the embeddings of codes start from their
        patches.
        """
        model = super().build_model(data)
        assert isinstance(model, CodesMMDiT)
        codebook, encoder = not_none(data.codec.codebook), model.latent_encoder
        assert isinstance(encoder, CodeEncoder)
        encoder.start_from(torch.from_numpy(codebook.as_float32()))
        return model

    def objective(self, config: ImageCodesConfig) -> CodeObjective:
        return CodeObjective(config)

    def validation_figures(self, totals: dict[str, PassTotals]) -> dict[str, float]:
        """Return the figures of the translation task, {mode}_code_nelbo (nats per code) and
        {mode}_code_accuracy.
        """
        figures = super().validation_figures(totals)
        for name, total in totals.items():
            sums = total.sums
            if sums["code_scored"]:
                figures[f"{name}_code_nelbo"] = sums["code_nelbo_sum"] / sums["code_total"]
                figures[f"{name}_code_accuracy"] = sums["code_correct"] / sums["code_scored"]
        return figures

    # -- sampling ---------------------------------------------------------------------------------

    def draw_images(
        self, pretrained: Pretrained, captions: list[list[int]], **options: Any
    ) -> Tensor:
        return sample_codes(pretrained.model, captions, **options)

    def draw_latents(
        self, pretrained: Pretrained, num_samples: int, *, solver: None, **options: Any
    ) -> Tensor:
        # A sampler by certainty would make the same image every time.
        options |= {"num_samples": num_samples, "sampler": "ancestral"}
        return sample_codes(pretrained.model, None, **options)

    def draw_pairs(
        self, pretrained: Pretrained, num_samples: int, *, solver: None, **options: Any
    ) -> tuple[TextSamples, Tensor]:
        # A sampler by certainty would make the same pair for every caption of one length.
        if options.get("temperature") is None:
            options["temperature"] = 1.0
        return sample_codes_and_texts(
            pretrained.model, num_samples, text_diffusion=pretrained.text_diffusion, **options
        )

    # -- debugging --------------------------------------------------------------------------------

    def check_batch(self, data: ImageCodesData, batch: CodesBatch) -> list[str]:
        return super().check_batch(data, batch) + code_problems(
            batch, not_none(data.config.model.num_codes)
        )
