"""Which parameters a mode trains, and how engines treat them.

Decided before the engine is built: DeepSpeed ignores later changes.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from mmldlm.config.renamed_keys import with_new_names
from mmldlm.config.resume_compat import configs_to_resume
from mmldlm.config.yaml_reader import read_yaml
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.errors import UserError
from mmldlm.models import MultimodalMMDiT
from mmldlm.models.layers import StreamLinear
from mmldlm.tasks.translation.config import TranslationConfig

# MM-LDLM's rule: l2t keeps the latent side, t2l the text side as it is. Valid for a model whose
# frozen side is already trained; from scratch it leaves a random projection (docs/objectives.md),
# hence training.freeze=auto.
FROZEN_GROUPS = {"unconditional": (), "mixed": (), "l2t": ("latent",), "t2l": ("text",)}
# Heads that no loss of the mode reads: frozen under freeze=none as well, or weight decay alone
# would move them.
UNREAD_MODULES = {
    "unconditional": (),
    "mixed": (),
    "l2t": ("latent_head",),
    "t2l": ("text_head", "length_head"),
}


def frozen_names(model: MultimodalMMDiT, mode: str, freeze: str) -> set[str]:
    """Names of the parameters that training.loss_type=mode with training.freeze=freeze leaves
    alone.
    """
    assert freeze in ("by_mode", "none"), "decided_freeze decides auto when the data is opened"
    names = {
        name for name, _ in model.named_parameters() if name.split(".")[0] in UNREAD_MODULES[mode]
    }
    if freeze == "by_mode":
        groups = model.parameter_groups()
        names |= {name for group in FROZEN_GROUPS[mode] for name in groups[group]}
    return names


def random_projection(mode: str, freeze: str, init_from: str | None) -> str | None:
    """The warning for a run from scratch that freezes weights which nothing has trained; None
    where it does not.
    """
    if freeze != "by_mode" or init_from is not None or not FROZEN_GROUPS[mode]:
        return None
    return (
        f"training.freeze=by_mode without training.init_from: the {FROZEN_GROUPS[mode][0]} side"
        " stays a random projection (docs/objectives.md says what it costs); training.freeze=auto"
        " trains it"
    )


def decided_freeze(config: TranslationConfig) -> Literal["by_mode", "none"]:
    """training.freeze with `auto` decided: `by_mode` or `none`.

    A run that continues keeps what its checkpoints were trained with: one begun with
    training.init_from need not name it again. Else trained weights are frozen by mode, and a
    random projection never.
    """
    training = config.training
    if training.freeze != "auto":
        return training.freeze
    for path in configs_to_resume(config):
        try:
            before = with_new_names(read_yaml(path))["training"]["freeze"]
        except (OSError, UserError, KeyError, TypeError):
            # What cannot be read is refused where the checkpoint itself is read.
            continue
        if before in ("by_mode", "none"):
            return before
    return "none" if training.init_from is None else "by_mode"


# Learned tokens and positions are embeddings that are not held by an nn.Embedding.
EMBEDDING_PREFIXES = ("null_", "chunk_position", "latent_position")


def parameter_plan(model: MultimodalMMDiT, config: TranslationConfig) -> ParameterPlan:
    """Plan for an MMDiT under training.loss_type and training.freeze (`auto` already resolved)."""
    training = config.training
    return ParameterPlan(
        sharding_units=list(model.blocks),
        no_decay=no_decay_names(model),
        frozen=frozenset(frozen_names(model, training.loss_type, training.freeze)),
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
