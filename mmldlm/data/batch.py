"""What a collator returns: one rank's micro-batch, ready for the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

# A task's data is opened before torch is imported.
if TYPE_CHECKING:
    from typing import Self

    import torch
    from torch import Tensor

    from mmldlm.data.batch_plan import GlobalBatch
    from mmldlm.data.lengths import AnyLengths


@dataclass(kw_only=True)
class Batch:
    """One micro-batch of B samples.

    The inputs of model and objective are fields that a subclass adds, each a tensor, a NamedTuple
    of tensors or None; a small task may put them into `tensors` instead.

    Attributes:
        ids: [B] sample ids.
        real: [B] False for placeholders, which fill up an incomplete batch or replace an unusable
            sample.
        counts: Sizes of the whole GLOBAL batch by which the losses are normalized, equal on every
            rank.
        num_tokens: Number of real tokens of this micro-batch.
        epoch: Epoch of the global batch.
        index: Index of the global batch within its epoch.
        bad: Records {id, reason} of samples left out as unusable or, with "repaired": True,
            repaired (stability.nan_to_num).
        tensors: Inputs without a field of their own, by name.
    """

    ids: np.ndarray
    real: np.ndarray
    counts: dict[str, int]
    num_tokens: int
    epoch: int
    index: int
    bad: list[dict] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the batch by its name; those of a NamedTuple as field.name."""
        named = dict(self.tensors)
        for name, value in self._inputs():
            if hasattr(value, "_asdict"):
                named |= {f"{name}.{part}": tensor for part, tensor in value._asdict().items()}
            else:
                named[name] = value
        return named

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Replace every tensor by its value under a function; return the batch itself."""
        self.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}
        for name, value in self._inputs():
            is_tuple = hasattr(value, "_make")
            setattr(self, name, value._make(map(function, value)) if is_tuple else function(value))
        return self

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Self:
        """Move the tensors to a device."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Pin the tensors; called by DataLoader's pinning thread."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def _inputs(self) -> list[tuple[str, Any]]:
        """Return name and value of the fields that hold a tensor or a NamedTuple of tensors."""
        from torch import Tensor

        values = [(item.name, getattr(self, item.name)) for item in fields(self)]
        return [
            (name, value)
            for name, value in values
            if isinstance(value, Tensor) or hasattr(value, "_fields")
        ]


class Collator(Protocol):
    """Builds micro-batches.

    A micro-batch is a function of (seed, global batch, slots), the same on any rank and world
    size.
    """

    def collate(
        self,
        batch: GlobalBatch,
        slots: np.ndarray,
        samples: Any,
        lengths: AnyLengths,
    ) -> Batch:
        """Build the micro-batch at some slots of a global batch, on the CPU.

        Args:
            batch: Global batch.
            slots: [B] positions in it; positions past its end become placeholders of weight 0.
            samples: Split of the run's data, read with `get(ids)`.
            lengths: [N] tokens of every sample.
        """
        ...
