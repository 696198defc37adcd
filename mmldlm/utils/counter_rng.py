"""Random numbers of a sample as functions of (seed, sample index): the same whatever the batch size or order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Key words that keep the streams of one seed apart.
TEXT, LATENT, LENGTH, JOINT_LATENT = 101, 102, 103, 104


def _generators(seed: int, stream: int, indices: Sequence[int]):
    # Philox4x64 (Salmon et al., SC 2011): the low counter word is left to the draws themselves.
    return (np.random.Generator(np.random.Philox(key=[seed, stream], counter=[0, int(i), 0, 0])) for i in indices)


def uniforms(seed: int, stream: int, indices: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """[len(indices), *shape] fp64 in [0, 1)."""
    rows = [generator.random(shape) for generator in _generators(seed, stream, indices)]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, *shape, dtype=torch.float64)


def normals(seed: int, stream: int, indices: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """[len(indices), *shape] fp32 standard normal."""
    rows = [generator.standard_normal(shape, dtype=np.float32) for generator in _generators(seed, stream, indices)]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, *shape)
