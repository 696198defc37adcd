"""The plain transformer that a run starts from, and how engines treat its parameters."""

from __future__ import annotations

import torch
from torch import nn

from mmldlm.data.batch import Batch
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.models.plain import PlainTransformer
from mmldlm.tasks.baselines.common.data import BaselineData
from mmldlm.tasks.translation.embedding_init import encoder_token_embeddings
from mmldlm.tasks.translation.frequencies import log_length_frequencies, log_token_frequencies
from mmldlm.tasks.translation.parameter_plan import no_decay_names

STACKED = {"to_qkv": 3, "to_key_value": 2}  # matrices that one weight holds


def build_model(
    data: BaselineData, kind: type[PlainTransformer] = PlainTransformer
) -> PlainTransformer:
    """A function of config and data alone (training.seed, model.*). kind: the model's class."""
    config = data.config.model
    torch.manual_seed(data.config.training.seed)
    model = kind(config)
    model.set_latent_statistics(data.latent_mean, data.latent_std)
    if config.token_embedding_init == "encoder":
        embeddings = torch.from_numpy(encoder_token_embeddings(data.train, config.hidden_size))
        model.token_embedding.weight.data[: len(embeddings)].copy_(embeddings)
    if config.output_bias_init == "frequency":
        model.text_head.bias.data.copy_(torch.from_numpy(log_token_frequencies(data)))
        if model.length_head is not None:
            model.length_head[-1].bias.data.copy_(torch.from_numpy(log_length_frequencies(data)))
    return model


def parameter_plan(model: PlainTransformer) -> ParameterPlan:
    """Blocks are sharded; Muon updates their linear layers, q, k and v each by itself."""
    matrices = {
        f"{name}.weight": STACKED.get(name.rsplit(".", 1)[-1], 1)
        for name, module in model.named_modules()
        if name.startswith("blocks.") and type(module) is nn.Linear
    }
    return ParameterPlan(
        sharding_units=list(model.blocks), no_decay=no_decay_names(model), matrices=matrices
    )


def unused_parameters(model: PlainTransformer, batch: Batch) -> tuple[str, ...]:
    """Beginnings of the names of parameters that rightly get a zero gradient from a batch."""
    dropped = batch.tensors.get("latent_is_null")
    return (
        ()
        if dropped is None or bool(dropped.any())
        else ("latent_tokens.null_", "latent_pooled.null_")
    )
