"""HDLM on a one-stream transformer, unconditional or given a latent.

Its clusters of tokens, model and task.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.store import load_tokenizer
from mmldlm.diffusion.hdlm import HierarchicalProcess, cluster_tokens
from mmldlm.errors import UserError
from mmldlm.models.plain import PlainTransformer
from mmldlm.models.plain_config import PlainConfig
from mmldlm.tasks.baselines.config import HdlmConfig
from mmldlm.tasks.baselines.divergence import DivergenceTask
from mmldlm.tasks.initialization import counted_texts
from mmldlm.tasks.latent_data import LatentData, open_latent_data
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.validation import not_none

# Bound for num_clusters=None; more clusters gained nothing in the paper.
MAX_CLUSTERS = 128
CONTEXTS, WINDOW = 256, 2


@dataclass(kw_only=True)
class HdlmData(LatentData):
    """Stores, and the clusters that they give: the same on every rank and machine."""

    config: HdlmConfig

    @cached_property
    def clusters(self) -> np.ndarray:
        """Cluster of every token, -1 for special tokens. [V] int64"""
        config = self.config
        count = not_none(config.text_diffusion.num_clusters)
        specials = self._special_tokens()
        texts = self.train.tokens(counted_texts(len(self.train_lengths)))
        vectors = cooccurrence_vectors(texts, not_none(config.model.vocab_size))
        if count > len(vectors) - len(specials):
            raise UserError(
                f"text_diffusion.num_clusters of at most {len(vectors) - len(specials)}, the words"
                " of the tokenizer",
                f"text_diffusion.num_clusters={count}",
                "choose fewer clusters",
            )
        return cluster_tokens(vectors, count, specials, config.training.seed)

    def fingerprint(self) -> str:
        """Fingerprint of the training split and of the clusters: a resume must find both."""
        return hashlib.sha256(super().fingerprint().encode() + self.clusters.tobytes()).hexdigest()

    def _special_tokens(self) -> set[int]:
        model = self.config.model
        ids = (model.mask_token_id, model.pad_token_id, model.eos_token_id)
        return {*load_tokenizer(self.train.root).all_special_ids, *map(not_none, ids)}


def cooccurrence_vectors(texts: list[np.ndarray], vocab_size: int) -> np.ndarray:
    """Positive pointwise mutual information of tokens with the CONTEXTS most frequent ones, at
    most WINDOW apart.

    Returns:
        [vocab_size, CONTEXTS or fewer] fp32; zeros for tokens that do not occur.
    """
    # An id that is no token keeps texts apart.
    gap = np.full(WINDOW, vocab_size)
    tokens = np.concatenate([part for text in texts for part in (text.astype(np.int64), gap)])
    frequency = np.bincount(tokens, minlength=vocab_size + 1)[:vocab_size]
    known = np.flatnonzero(frequency)
    contexts = np.argsort(-frequency, kind="stable")[: min(CONTEXTS, len(known))]
    row, column = np.full(vocab_size + 1, -1), np.full(vocab_size + 1, -1)
    row[known], column[contexts] = np.arange(len(known)), np.arange(len(contexts))
    counts = np.zeros(len(known) * len(contexts), dtype=np.int64)
    for distance in range(1, WINDOW + 1):
        for token, near in (
            (tokens[distance:], tokens[:-distance]),
            (tokens[:-distance], tokens[distance:]),
        ):
            seen = (row[token] >= 0) & (column[near] >= 0)
            places = row[token[seen]] * len(contexts) + column[near[seen]]
            counts += np.bincount(places, minlength=len(counts))
    pairs = counts.reshape(len(known), len(contexts)).astype(np.float64)
    expected = pairs.sum(1, keepdims=True) * pairs.sum(0, keepdims=True) / max(pairs.sum(), 1)
    vectors = np.zeros((vocab_size, len(contexts)), dtype=np.float32)
    ratio = np.divide(pairs, expected, out=np.ones_like(pairs), where=pairs > 0)
    vectors[known] = np.log(ratio).clip(0)
    return vectors


class HierarchicalTransformer(PlainTransformer):
    """A PlainTransformer that reads clusters as tokens V, V + 1, ... and holds which words they
    stand for.

    Attributes:
        token_clusters: Buffer with the cluster of every token, -1 for tokens in none. [V] int64
    """

    token_clusters: Tensor

    def __init__(self, config: PlainConfig):
        super().__init__(config)
        self.register_buffer(
            "token_clusters", torch.full((not_none(config.vocab_size),), -1, dtype=torch.int64)
        )


class HdlmTask(DivergenceTask):
    """Word -> cluster -> [MASK] (arXiv 2510.08632) with the exact posterior; clusters are stored
    with the model.
    """

    name = "hdlm"
    config_class = HdlmConfig
    logit_copies = 5
    architecture = "HierarchicalTransformer"
    buffers = DivergenceTask.buffers | {"token_clusters"}

    def open_data(self, config: HdlmConfig) -> HdlmData:
        """Open both splits and fill in what they decide: also num_clusters and
        model.extra_input_tokens.

        Raises:
            UserError: see `open_latent_data`; a contradiction of the number of clusters.
        """
        data = open_latent_data(HdlmData, config)
        model, diffusion = data.config.model, data.config.text_diffusion
        if diffusion.num_clusters is None:
            diffusion.num_clusters = min(
                MAX_CLUSTERS, max(math.isqrt(not_none(model.vocab_size)), 1)
            )
        if model.extra_input_tokens not in (0, diffusion.num_clusters):
            raise UserError(
                f"model.extra_input_tokens={diffusion.num_clusters}, one for each cluster",
                f"model.extra_input_tokens={model.extra_input_tokens}",
                "leave model.extra_input_tokens unset",
            )
        model.extra_input_tokens = diffusion.num_clusters
        return data

    def describe(self, config: HdlmConfig) -> str:
        return f"{super().describe(config)}, {config.text_diffusion.num_clusters} clusters"

    def model_class(self) -> type[HierarchicalTransformer]:
        return HierarchicalTransformer

    def build_model(self, data: HdlmData) -> HierarchicalTransformer:
        model = super().build_model(data)
        assert isinstance(model, HierarchicalTransformer)
        model.token_clusters.copy_(torch.from_numpy(data.clusters))
        return model

    def scored_fraction(self, config: HdlmConfig) -> float:
        """1 - E[(1 - t)^gamma] with t = sin^2(pi u / 2): a word that still stands is not
        scored.
        """
        gamma = config.text_diffusion.gamma
        # Of logarithms: the gamma function itself leaves fp64 at 172.
        ratio = math.exp(math.lgamma(gamma + 0.5) - math.lgamma(gamma + 1))
        return 1 - ratio / math.sqrt(math.pi)

    def process_of_data(self, data: HdlmData) -> HierarchicalProcess:
        clusters = torch.from_numpy(data.clusters)
        mask_token_id = not_none(data.config.model.mask_token_id)
        return HierarchicalProcess(clusters, mask_token_id, data.config.text_diffusion.gamma)

    def process_of_model(self, pretrained: Pretrained) -> HierarchicalProcess:
        model = cast(HierarchicalTransformer, pretrained.model)
        mask_token_id = not_none(model.config.mask_token_id)
        return HierarchicalProcess(
            model.token_clusters, mask_token_id, pretrained.text_config.gamma
        )
