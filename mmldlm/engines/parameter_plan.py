"""What an engine needs to know of a model's parameters: the seam that keeps engines free of model
names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from mmldlm.errors import UserError


@dataclass(frozen=True)
class ParameterPlan:
    """How an engine treats the parameters of one model.

    Attributes:
        sharding_units: Modules, in forward order, whose weights are gathered and freed together.
            FSDP2 wraps each of them, ZeRO-3 gathers each as a unit.
        no_decay: Names of parameters without weight decay, in addition to the engine's own rule
            (parameters with fewer than two dimensions, norms and `nn.Embedding`).
        frozen: Names of parameters that are not trained.
        matrices: Parameters that Muon updates (optimizer.kind=muon), each with the number of equal
            matrices that it stacks along dimension 0: q, k and v in one weight are 3. Usually the
            weights inside blocks; not embeddings, heads, norms, modulation.
    """

    sharding_units: Sequence[nn.Module] = ()
    no_decay: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    matrices: Mapping[str, int] = field(default_factory=dict)

    def set_requires_grad(self, model: nn.Module) -> None:
        """Set requires_grad of every parameter; DeepSpeed ignores changes after the engine is
        built.
        """
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)

    def apply(
        self, model: nn.Module, groups: Mapping[str, Sequence[str]]
    ) -> dict[str, tuple[int, int]]:
        """`set_requires_grad`, and count the parameters of each group.

        Args:
            groups: Group -> names of its parameters.

        Returns:
            group -> (trainable, all) elements.

        Raises:
            UserError: nothing is trainable.
        """
        self.set_requires_grad(model)
        parameters = dict(model.named_parameters())
        counts = {}
        for group, names in groups.items():
            sizes = {name: parameters[name].numel() for name in names}
            trainable = sum(size for name, size in sizes.items() if name not in self.frozen)
            counts[group] = (trainable, sum(sizes.values()))
        if not any(trainable for trainable, _ in counts.values()):
            raise UserError("at least one trainable parameter", "none", "freeze less of the model")
        return counts
