"""The example's task with a fault: one byte value makes a NaN in the model, in an operation that
replay must name.
"""

from __future__ import annotations

import torch
from gpt2_task import Gpt2Task

BELL = 7  # the byte


class FragileEmbedding(torch.nn.Embedding):
    """An embedding that takes the square root of -1 where a token is BELL."""

    def forward(self, tokens):
        embedded = super().forward(tokens)
        return embedded * torch.sqrt(1 - 2 * (tokens == BELL).to(embedded.dtype))[..., None]


class FragileGpt2Task(Gpt2Task):
    def build_model(self, data):
        model = super().build_model(data)
        model.transformer.wte.__class__ = FragileEmbedding
        return model
