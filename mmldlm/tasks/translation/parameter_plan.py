"""How engines treat the parameters of the translation model."""

from __future__ import annotations

from torch import nn

from mmldlm.config.schema import Config
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.models.layers import StreamLinear
from mmldlm.tasks.translation.freezing import frozen_names

# Learned tokens and positions are embeddings that are not held by an nn.Embedding.
EMBEDDING_PREFIXES = ("null_", "chunk_position", "latent_position")


def parameter_plan(model: nn.Module, config: Config) -> ParameterPlan:
    """Plan for an MMDiT under training.loss_type and training.freeze (`auto` already resolved)."""
    return ParameterPlan(
        sharding_units=list(model.blocks),
        no_decay=no_decay_names(model),
        frozen=frozenset(frozen_names(model, config.training.loss_type, config.training.freeze)),
        matrices=stacked_matrices(model),
    )


def stacked_matrices(model: nn.Module) -> dict[str, int]:
    """Matrices for Muon: those of the blocks' StreamLinear layers, each stream's, and q, k and v
    by themselves.
    """
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, StreamLinear)
    }
    return {
        f"{name}.weight": layer.num_streams * (3 if name.endswith(".to_qkv") else 1)
        for name, layer in layers.items()
    }


def no_decay_names(model: nn.Module) -> frozenset[str]:
    """Names of the learned null conditions and positions: weight decay has no reason to pull them
    to zero.
    """
    names = (name for name, _ in model.named_parameters())
    return frozenset(
        name for name in names if name.rsplit(".", 1)[-1].startswith(EMBEDDING_PREFIXES)
    )
