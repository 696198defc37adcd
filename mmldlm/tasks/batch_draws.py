"""Draws of collators: functions of (seed, epoch, sample, slot), never of ranks, micro-batches or call order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_DROPOUT_STREAM = 5  # last counter word; every collator keeps its own streams apart from it


def counter_generator(seed: int, epoch: int, *counter: int) -> np.random.Generator:
    """Return the generator of one counter: Philox4x64 (Salmon et al., SC 2011), low counter word for the draws."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, *counter]))


def dropout_keys(seed: int, epoch: int, ids: np.ndarray, slots: np.ndarray) -> Tensor:
    """Keys of `RowDropout` for the samples ids [B] at slots [B] of a global batch; [B] int64."""
    keys = [
        counter_generator(seed, epoch, sample, slot, _DROPOUT_STREAM).bit_generator.random_raw()
        for sample, slot in zip(ids.tolist(), slots.tolist(), strict=True)
    ]
    return torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))
