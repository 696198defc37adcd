"""What a collator returns: one rank's micro-batch, ready for the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mmldlm.data.batch_plan import GlobalBatch


@dataclass(kw_only=True)
class Batch:
    """One micro-batch of B samples.

    Attributes:
        tensors: Inputs of the model and the objective, by name.
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
    """

    tensors: dict[str, Tensor]
    ids: np.ndarray
    real: np.ndarray
    counts: dict[str, int]
    num_tokens: int
    epoch: int
    index: int
    bad: list[dict] = field(default_factory=list)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """Move the tensors to a device."""
        self.tensors = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name, tensor in self.tensors.items()
        }
        return self

    def pin_memory(self) -> Batch:
        """Pin the tensors; called by DataLoader's pinning thread."""
        self.tensors = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return self


class Collator(Protocol):
    """Builds micro-batches.

    A micro-batch is a function of (seed, epoch, sample ids, slots), the same on any rank and
    world size.
    """

    def collate(
        self, batch: GlobalBatch, slots: np.ndarray, samples: Any, lengths: np.ndarray
    ) -> Batch:
        """Build the micro-batch at some slots of a global batch, on the CPU.

        Args:
            batch: Global batch.
            slots: [B] positions in it; positions past its end become placeholders of weight 0.
            samples: Split of the run's data, read with `get(ids)`.
            lengths: [N] tokens of every sample.
        """
        ...
