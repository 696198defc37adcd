"""An enumerable model: texts of three words over three words, with exact conditionals, behind the
forward contract.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmldlm.models.base import EncodedLatent, LatentInputs, ModelOutput
from mmldlm.tasks.text_task import Pretrained
from mmldlm.tasks.translation.config import TextDiffusionConfig
from tests.evaluation.conftest import make, pretrained, store  # noqa: F401
from tests.support.forward import encode, scores_of, values_of
from tests.support.toy_text import toy_law

MASK, PAD, EOS, FIRST = 0, 1, 2, 3
LENGTH = 4  # three words and EOS


class Toy(nn.Module):
    """Logits of every position from the tokens that stand."""

    def __init__(self, sharpness: float = 1.0, context_free: bool = False):
        super().__init__()
        self.config = SimpleNamespace(
            vocab_size=6,
            max_seq_len=LENGTH,
            latent_dim=2,
            mask_token_id=MASK,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
        self.weight = nn.Parameter(torch.zeros(1))
        words, self.law = toy_law()
        self.texts = torch.cat([words + FIRST, torch.full((27, 1), EOS)], 1)
        self.sharpness, self.context_free = sharpness, context_free
        self.states: list[tuple[int, ...]] = []

    def scale_latents(self, latents: Tensor) -> Tensor:
        return latents

    def encode_latents(self, latents: LatentInputs | None, **_) -> EncodedLatent:
        return encode(latents)

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        """log p(x_i | the tokens that stand) [B, S, 6]."""
        state = torch.full_like(tokens, MASK) if self.context_free else tokens
        known = state[:, None, :] != MASK
        fits = ((state[:, None, :] == self.texts) | ~known).all(-1) * self.law
        fits = fits / fits.sum(1, keepdim=True)
        found = torch.zeros(*tokens.shape, 6, dtype=torch.float64)
        for place in range(tokens.shape[1]):
            found[:, place].index_add_(1, self.texts[:, place], fits)
        return found.clamp_min(1e-300).log()

    def forward(self, text, inputs=None, query=None):
        latents = values_of(inputs)
        count = len(latents if text is None else text.tokens)
        out = ModelOutput(length_logits=torch.zeros(count, LENGTH))
        if text is None or query is None or query.positions is None or len(query.positions) == 0:
            return out
        times = text.timesteps.tolist()
        self.states += [(*row, round(t, 6)) for row, t in zip(text.tokens.tolist(), times)]
        scale = (
            self.sharpness if latents is None else self.sharpness * latents[:, :1, None].double()
        )
        logits = (self.log_probabilities(text.tokens) * scale).flatten(0, 1)
        logits = logits[query.positions].float()
        logits[:, MASK] = float("-inf")
        return out._replace(text=scores_of(logits, query))


def all_texts() -> list[list[int]]:
    return (toy_law()[0] + FIRST).tolist()


def random_model_curves(count: int = 90, seed: int = 0) -> list[np.ndarray]:
    """Noisy falling curves of lengths 2 .. 15."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 16, count)
    return [3 * (1 - np.arange(n) / n) ** 2 + rng.gamma(2.0, 0.3, n) for n in lengths]


@pytest.fixture(scope="session")
def toy():
    def toy_pretrained(**options) -> Pretrained:
        return Pretrained(Toy(**options).eval(), None, TextDiffusionConfig(), None)

    return SimpleNamespace(
        Model=Toy,
        pretrained=toy_pretrained,
        texts=all_texts(),
        law=toy_law()[1].numpy(),
        curves=random_model_curves,
        LENGTH=LENGTH,
        MASK=MASK,
        EOS=EOS,
    )
