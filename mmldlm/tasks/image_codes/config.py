"""Config of the image_codes task: that of images, whose latents are ids of codes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from mmldlm.config.section import FilledFromData
from mmldlm.tasks.image_text.config import ImageModelConfig, ImageTextConfig

CODE_SAMPLERS = ("confidence", "ancestral")
"""Samplers of images, the default first."""
CODE_STEPS = 12
"""Default number of passes of an image (Show-o, arXiv 2408.12528, has as many)."""
# Section -> keys that only latents of values read; all keys of the section where none is named.
_OF_VALUES: dict[str, tuple[str, ...]] = {
    "latent_diffusion": (),
    "loss": (
        "latent_loss",
        "normalize_eps",
        "latent_loss_clamp",
        "latent_weight_clip",
        "latent_prediction_clamp",
        "latent_target_clamp",
        "allow_scale_free_latent_loss",
    ),
    "training": ("l2t_condition_noise", "l2t_condition_timestep"),
    "model": ("latent_predictions", "scale_noisy_latents", "latent_grids"),
    "data": ("shift_pixels", "shift_only_i2t"),
}


class ImageCodesModelConfig(ImageModelConfig):
    """The MMDiT; a latent is the id of the code of a patch."""

    num_codes: Annotated[int | None, FilledFromData()] = Field(None, ge=2, le=1 << 16)
    """Codes Q of which latents are ids. None: taken from the data."""


class ImageCodesConfig(ImageTextConfig):
    """One run of the image_codes task."""

    model: ImageCodesModelConfig = Field(default_factory=ImageCodesModelConfig)

    @model_validator(mode="after")
    def _has_no_options_of_values(self) -> ImageCodesConfig:
        unread = []
        for name, keys in _OF_VALUES.items():
            section = getattr(self, name)
            fields = type(section).model_fields
            for key in keys or fields:
                if (value := getattr(section, key)) != fields[key].default:
                    unread.append(f"{name}.{key}={value}")
        if unread:
            raise ValueError(
                f"task=image_codes does not read {', '.join(unread)} (ids are masked, neither"
                " noised, weighted nor shifted): drop them, start from --config-name"
                " image_text_discrete, or prepare with --latents pixels for task=image_text"
            )
        return self
