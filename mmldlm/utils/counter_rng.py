"""Counter-based random numbers: functions of (seed, stream, index), independent of batch size and
order.

Philox4x64 (Salmon et al., SC 2011).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # `mix64` is needed where torch is not imported (preflight, convert)
    from torch import Tensor


class Stream(IntEnum):
    """Second key word of Philox: keeps the draws of one seed apart.

    Part of every result; never reuse a value.
    """

    SENTENCES = 0x5E
    SHUFFLED_PARTNERS = 0xDE
    TEXT = 101
    LATENT = 102
    LENGTH = 103
    JOINT_LATENT = 104
    CONDITION = 105
    CODES = 107
    TOKEN_CLUSTERS = 0xC1
    SELF_CORRECTION = 0xC2
    HYPOTHESES = 0xC3
    LIKELIHOOD = 201
    X0_ERROR = 202
    CODE_BITS = 203
    STS_BOOTSTRAP = 0x575
    BLEU_BOOTSTRAP = 0xB1E0
    PAIRED_BOOTSTRAP = 0xB1E1
    UNIGRAM_FLOOR = 0xF100
    FEATURE_SUBSETS = 0xF1D


# Arrays: of a few values, an operation with a NumPy scalar takes twice as long.
_SHIFTS = [np.array(shift, np.uint64) for shift in (30, 27, 31)]
_FACTORS = [np.array(factor, np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]


def mix64(values: np.ndarray) -> np.ndarray:
    """Apply the SplitMix64 finalizer (Steele et al., OOPSLA 2014) to uint64 values; it wraps by
    design.
    """
    values = (values ^ (values >> _SHIFTS[0])) * _FACTORS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _FACTORS[1]
    return values ^ (values >> _SHIFTS[2])


def candidate_seed(seed: int, candidate: int) -> int:
    """Return the seed of the k-th of several samples with the same index; the first has the seed
    itself.
    """
    if candidate == 0:
        return seed
    mixed = mix64(mix64(np.array([seed], dtype=np.uint64)) + np.uint64(candidate))
    return int(mixed[0])


def generator(seed: int, stream: Stream) -> np.random.Generator:
    """Return the generator of one stream."""
    return np.random.Generator(np.random.Philox(key=_key(seed, stream)))


def counter_generator(seed: int, epoch: int, *counter: int) -> np.random.Generator:
    """Return the generator of one counter of three words in an epoch; the low one is left to the
    draws.
    """
    return np.random.Generator(np.random.Philox(key=_key(seed, epoch), counter=[0, *counter]))


def _generators(
    seed: int, stream: int, indices: Sequence[int] | np.ndarray, part: int = 0
) -> Iterator[np.random.Generator]:
    # Philox4x64 (Salmon et al., SC 2011): the low counter word is left to the draws themselves.
    key = _key(seed, stream)
    return (
        np.random.Generator(np.random.Philox(key=key, counter=[0, int(i), part, 0]))
        for i in indices
    )


def _key(seed: int, second: int) -> np.ndarray:
    # NumPy would make fp64 of a list with a seed above 2^63, as candidate_seed returns them: seeds
    # that differ in the last 11 bits would be one.
    return np.array([seed, second], dtype=np.uint64)


def uniforms(
    seed: int,
    stream: int,
    indices: Sequence[int] | np.ndarray,
    shape: tuple[int, ...],
    part: int = 0,
) -> Tensor:
    """Draw [len(indices), *shape] fp64 in [0, 1); `part` tells draws of one index apart."""
    import torch

    rows = [generator.random(shape) for generator in _generators(seed, stream, indices, part)]
    return (
        torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, *shape, dtype=torch.float64)
    )


def normals(
    seed: int, stream: int, indices: Sequence[int] | np.ndarray, shape: tuple[int, ...]
) -> Tensor:
    """Draw [len(indices), *shape] fp32 standard normal numbers."""
    import torch

    rows = [
        generator.standard_normal(shape, dtype=np.float32)
        for generator in _generators(seed, stream, indices)
    ]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, *shape)
