"""GIDD and GIDD+ on a one-stream transformer, unconditional or given a latent."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from mmldlm.diffusion.gidd import GiddProcess
from mmldlm.errors import UserError
from mmldlm.models.plain import PlainTransformer
from mmldlm.models.plain_config import PlainConfig
from mmldlm.sampling.records import TextSamples
from mmldlm.tasks.baselines.config import GiddConfig, GiddDiffusionConfig
from mmldlm.tasks.baselines.divergence import DivergenceTask
from mmldlm.tasks.latent_data import LatentData
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.validation import not_none

_SAMPLERS = ("ancestral", "self_correction")


class GiddTask(DivergenceTask):
    """Masks and uniform noise (arXiv 2503.04482); GIDD+ with loss.text_weighting=dynamic and
    weight decay 0.02.
    """

    name = "gidd"
    config_class = GiddConfig
    logit_copies = 4
    samplers = {"l2t": _SAMPLERS, "unconditional": _SAMPLERS}

    def describe(self, config: GiddConfig) -> str:
        return f"{super().describe(config)}, uniform noise {config.text_diffusion.uniform_share:g}"

    def scored_fraction(self, config: GiddConfig) -> float:
        return 1.0 if config.text_diffusion.uniform_share else 0.5

    def process_of_data(self, data: LatentData) -> GiddProcess:
        return _process(data.config.text_diffusion, data.config.model)

    def process_of_model(self, pretrained: Pretrained) -> GiddProcess:
        model = cast(PlainTransformer, pretrained.model)
        return _process(pretrained.text_config, model.config)

    def write_texts(
        self, pretrained: Pretrained, latents: Tensor | None, *, sampler: str, **options: Any
    ) -> TextSamples:
        if sampler == "self_correction" and pretrained.text_config.uniform_share == 0:
            raise UserError(
                "a model trained with text_diffusion.uniform_share above 0, for --sampler"
                " self_correction",
                f"text_diffusion.uniform_share=0 in {pretrained.folder}: it never saw a wrong"
                " token",
                "omit --sampler",
            )
        return super().write_texts(pretrained, latents, sampler=sampler, **options)


def _process(config: GiddDiffusionConfig, model: PlainConfig) -> GiddProcess:
    vocab_size, mask_token_id = not_none(model.vocab_size), not_none(model.mask_token_id)
    return GiddProcess(vocab_size, mask_token_id, config.uniform_share, config.gamma)
