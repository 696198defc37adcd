"""Draws of collators: functions of (seed, epoch, sample, slot), never of ranks, micro-batches or
call order.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from mmldlm.models.dropout import STEP, mix

_DROPOUT_STREAM, _NOISE_STREAM = (
    5,
    9,
)  # last counter word; every collator keeps its own streams apart from these


def counter_generator(seed: int, epoch: int, *counter: int) -> np.random.Generator:
    """Return the generator of one counter: Philox4x64 (Salmon et al., SC 2011), low counter word
    for the draws.
    """
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, *counter]))


def dropout_keys(seed: int, epoch: int, ids: np.ndarray, slots: np.ndarray) -> Tensor:
    """Keys of `RowDropout` for the samples ids [B] at slots [B] of a global batch; [B] int64."""
    return _sample_keys(seed, epoch, ids, slots, _DROPOUT_STREAM)


def noise_keys(seed: int, epoch: int, ids: np.ndarray, slots: np.ndarray) -> Tensor:
    """Keys of `keyed_normals` for the samples ids [B] at slots [B] of a global batch; [B]
    int64.
    """
    return _sample_keys(seed, epoch, ids, slots, _NOISE_STREAM)


def _sample_keys(seed: int, epoch: int, ids: np.ndarray, slots: np.ndarray, stream: int) -> Tensor:
    keys = [
        counter_generator(seed, epoch, sample, slot, stream).bit_generator.random_raw()
        for sample, slot in zip(ids.tolist(), slots.tolist(), strict=True)
    ]
    return torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))


def keyed_normals(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers on the device of their keys, equal on all devices up to rounding.

    Number i of SplitMix64 (Steele et al., OOPSLA 2014) started at a sample's key gives two
    uniforms of 31 and 32 bits, and these two normals (Box and Muller, 1958), at most 6.7 in size.

    Args:
        keys: int64, random, of each sample. [B]
        shape: of one sample's numbers.

    Returns:
        [B, *shape] fp32.
    """
    count = math.prod(shape)
    half = -(-count // 2)
    bits = mix(keys[:, None] + torch.arange(1, half + 1, device=keys.device) * STEP)
    words = bits.view(torch.int32)  # [B, 2 * half]
    uniform = (words[:, ::2] & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    angle = words[:, 1::2].float().mul_(math.pi * 2.0**-31)
    radius = uniform.log_().mul_(-2).sqrt_()
    normals = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
    return normals[:, :count].reshape(len(keys), *shape)
