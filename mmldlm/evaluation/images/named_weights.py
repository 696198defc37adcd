"""Figures of made images by models that the user names: CLIP score, FID and KID.

Off by default.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mmldlm.errors import UserError
from mmldlm.evaluation.images.clip_score import ClipScorer, clip_score
from mmldlm.evaluation.images.inception import (
    FEW_IMAGES,
    FeatureNetwork,
    check_count,
    distance_estimates,
)
from mmldlm.evaluation.images.settings import ImageSettings
from mmldlm.evaluation.sentences import Sentences
from mmldlm.evaluation.statistics import Estimate
from mmldlm.sampling.pretrained import Pretrained


class NamedWeights:
    """The models of `--clip` and `--inception-weights`; without either, nothing is measured.

    Raises:
        UserError: files of other models, or a model that makes no images.
    """

    def __init__(self, settings: ImageSettings, pretrained: Pretrained) -> None:
        self.settings = settings
        given = {"--clip": settings.clip, "--inception-weights": settings.inception_weights}
        names = ", ".join(name for name, value in given.items() if value is not None)
        if names and not pretrained.supports("t2l"):
            raise UserError(
                f"a model trained in mode t2i for {names}",
                "one that makes no images",
                f"omit {names}",
            )
        device: torch.device = next(pretrained.model.parameters()).device
        self.scorer = None if settings.clip is None else ClipScorer(settings.clip, device)
        self.network = (
            None
            if settings.inception_weights is None
            else FeatureNetwork(settings.inception_weights, device)
        )

    def set_real(self, images: np.ndarray, sentences: Sentences) -> None:
        """Take the unseen images [N, S, S, C] uint8 that made ones are compared with, and their
        captions.

        Raises:
            UserError: too few images, or a network of other outputs.
        """
        self.texts, self.of_real = sentences.texts, {}
        if self.network is not None:
            check_count(len(images))
            self.real = self.network.features(images)
        if self.scorer is not None:
            pictures, texts = self.scorer.embed(images, self.texts)
            self.of_real["clip_score_real"] = clip_score(pictures, texts)
            self.of_real["clip_score_real_shuffled"] = clip_score(
                pictures, texts[sentences.shuffled_index]
            )

    def estimates(self, made: np.ndarray) -> dict[str, Estimate]:
        """Return the figures of images [N, S, S, C] uint8, made from the captions of the real
        ones.
        """
        found: dict[str, Estimate] = {}
        if self.scorer is not None:
            found["clip_score"] = clip_score(*self.scorer.embed(made, self.texts))
            found |= self.of_real
        if self.network is not None:
            found |= distance_estimates(self.network.features(made), self.real, self.settings.seed)
        return found

    def conditions(self) -> dict[str, Any]:
        """Return the names of the models."""
        given = {"clip": self.settings.clip, "inception_weights": self.settings.inception_weights}
        return {key: value for key, value in given.items() if value is not None}

    def notes(self, count: int) -> list[str]:
        """Return what limits the figures of so many images."""
        if self.network is None or count >= FEW_IMAGES:
            return []
        return [
            f"FID of n = {count} images, below {FEW_IMAGES}: it is mostly the bias of few images,"
            " which its standard error does not include; KID has no such bias"
        ]
