"""The model that a run starts from: the same weights on every rank, in every tool that
needs them.
"""

from __future__ import annotations

import torch

from mmldlm.models import MultimodalMMDiT
from mmldlm.tasks.translation.data import TranslationData
from mmldlm.tasks.translation.embedding_init import encoder_token_embeddings
from mmldlm.tasks.translation.frequencies import log_length_frequencies, log_token_frequencies


def build_model(data: TranslationData, kind: type[MultimodalMMDiT]) -> MultimodalMMDiT:
    """A function of config and data alone (training.seed, model.*); nothing is frozen yet, no
    engine wraps it.
    """
    config = data.config
    torch.manual_seed(config.training.seed)
    model = kind(config.model)
    model.set_latent_statistics(data.latent_mean, data.latent_std)
    if config.model.token_embedding_init == "encoder":
        embeddings = encoder_token_embeddings(data.train, config.model.hidden_size)
        model.text_encoder.token_embedding.weight.data.copy_(torch.from_numpy(embeddings))
    if config.model.output_bias_init == "frequency":
        model.text_head.bias.data.copy_(torch.from_numpy(log_token_frequencies(data)))
        model.length_head[-1].bias.data.copy_(torch.from_numpy(log_length_frequencies(data)))
    return model
