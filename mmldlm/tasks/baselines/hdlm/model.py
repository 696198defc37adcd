"""The plain transformer with the clusters of its tokens."""

from __future__ import annotations

import torch

from mmldlm.models.plain import PlainTransformer
from mmldlm.models.plain_config import PlainConfig


class HierarchicalTransformer(PlainTransformer):
    """A PlainTransformer that reads clusters as tokens V, V + 1, ... and holds which words they
    stand for.

    Attributes:
        token_clusters: buffer, cluster of every token, -1 for tokens in none. [V] int64
    """

    def __init__(self, config: PlainConfig):
        super().__init__(config)
        self.register_buffer(
            "token_clusters", torch.full((config.vocab_size,), -1, dtype=torch.int64)
        )
