"""Config of the image_text task: that of translation, with the words and options of images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from mmldlm.data.config import ImageDataConfig
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.tasks.translation.config import TranslationConfig, TranslationTrainingConfig

MODES = {"t2i": "t2l", "i2t": "l2t", "joint": "unconditional"}
"""Word for images -> the mode that it names, in configs, logs and checkpoints."""
WORDS = {mode: word for word, mode in MODES.items()}


def mode_of(word: object) -> object:
    """Return the mode that a word names; anything else as it is."""
    return MODES.get(word, word) if isinstance(word, str) else word


def both_words(mode: str) -> str:
    """Return "t2i (= t2l)" for a mode; `mixed` and others as they are."""
    return f"{WORDS[mode]} (= {mode})" if mode in WORDS else mode


def with_modes(weights: object) -> object:
    """Return weights by mode, whichever of its two words each is given by.

    Raises:
        ValueError: a mode is given by both words.
    """
    if not isinstance(weights, Mapping):
        return weights
    weight_of_mode: dict[object, object] = {}
    for word, weight in weights.items():
        if mode_of(word) in weight_of_mode:
            raise ValueError(
                f"training.loss_type_weights names {both_words(str(mode_of(word)))} twice: keep"
                " one word"
            )
        weight_of_mode[mode_of(word)] = weight
    return weight_of_mode


# (key, the only value for images, why)
TEXT_ONLY = (
    ("model.token_embedding_init", "random", "images have no encoder with token embeddings"),
    ("latent_diffusion.l2_normalize", False, "it would remove the brightness of a patch"),
)


class ImageModelConfig(ModelConfig):
    """The MMDiT; a latent is a patch of an image."""

    tokens_per_latent: int = Field(1, ge=1, le=1 << 20)
    """Rows K that present one latent. An image has many latents, so that one row each is enough.

    """


class ImageTrainingConfig(TranslationTrainingConfig):
    """Modes, and the common training keys."""

    @field_validator("loss_type", mode="before")
    @classmethod
    def _mode_by_word(cls, value: Any) -> Any:
        return mode_of(value)

    @field_validator("loss_type_weights", mode="before")
    @classmethod
    def _weights_by_word(cls, value: Any) -> Any:
        return with_modes(value)


class ImageTextConfig(TranslationConfig):
    """One run of the image_text task."""

    model: ImageModelConfig = Field(default_factory=ImageModelConfig)
    data: ImageDataConfig = Field(default_factory=ImageDataConfig)
    training: ImageTrainingConfig = Field(default_factory=ImageTrainingConfig)

    @model_validator(mode="after")
    def _has_no_options_of_texts(self) -> ImageTextConfig:
        for key, allowed, reason in TEXT_ONLY:
            section, name = key.split(".")
            if (value := getattr(getattr(self, section), name)) != allowed:
                raise ValueError(
                    f"{key}={value} does not go with task=image_text ({reason}): drop it"
                )
        return self
