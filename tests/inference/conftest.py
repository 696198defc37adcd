"""A small converted model, and a judge without weights: a text's embedding is the sum of vectors
of its words, turned by their places.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmldlm.inference.load import load_pretrained
from mmldlm.sampling.judge import Judge
from mmldlm.sampling.latents import latent_shape
from tests.support.toy_models import checkpoint, toys

__all__ = ["checkpoint", "toys"]


class BagJudge(Judge):
    name = "bag"

    def __init__(self, pretrained):
        config = pretrained.model.config
        super().__init__(pretrained.tokenizer, latent_shape(config))
        self.vectors = np.random.default_rng(0).standard_normal(
            (config.vocab_size, config.latent_dim)
        )
        self.asked = []

    def _embed(self, texts):
        self.asked += [tuple(text) for text in texts]
        self.num_tokens += sum(map(len, texts))
        sums = [
            sum(np.roll(self.vectors[token], place // 4) for place, token in enumerate(text))
            for text in texts
        ]
        return np.array([vector / np.linalg.norm(vector) for vector in sums], dtype=np.float32)


@pytest.fixture(scope="session")
def pretrained(checkpoint):
    return load_pretrained(checkpoint)


@pytest.fixture
def judge(pretrained):
    return BagJudge(pretrained)


@pytest.fixture(scope="session")
def hidden(pretrained):
    """Texts of six words that nothing but a judge knows, and their embeddings [5, 6]."""
    texts = np.random.default_rng(1).integers(4, 32, (5, 6)).tolist()
    return texts, torch.from_numpy(BagJudge(pretrained).embed(texts))


@pytest.fixture(scope="session")
def new_judge(pretrained):
    return lambda: BagJudge(pretrained)
