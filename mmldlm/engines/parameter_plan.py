"""What an engine needs to know of a model's parameters: the seam that keeps engines free of model names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterPlan:
    """How an engine treats the parameters of one model.

    Attributes:
        sharding_units: modules, in forward order, whose weights are gathered and freed together. FSDP2 wraps each of
            them, ZeRO-3 gathers each as a unit.
        no_decay: names of parameters without weight decay, in addition to the engine's own rule (parameters with fewer
            than two dimensions, norms and `nn.Embedding`).
        frozen: names of parameters that are not trained.
    """

    sharding_units: Sequence[nn.Module] = ()
    no_decay: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()

    def set_requires_grad(self, model: nn.Module) -> None:
        """Set requires_grad of every parameter; DeepSpeed ignores changes after the engine is built."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
