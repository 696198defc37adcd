"""Map uniform numbers to timesteps.

The uniforms come from the data pipeline's counter-based generator.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def low_discrepancy(ranks: np.ndarray, offset: float, count: int) -> np.ndarray:
    """One-offset strata: (rank / count + offset) mod 1 (MDLM's antithetic sampling; VDM, arXiv
    2107.00630).

    Args:
        ranks: Position of each sample in a random permutation of the global batch, 0 .. count - 1.
        offset: One uniform number for the whole global batch.
        count: Number of samples in the global batch.

    Returns:
        [B] fp64 uniforms in [0, 1); over a global batch every interval of width 1 / count holds
        exactly one.
    """
    return np.remainder(ranks / count + offset, 1.0)


def stretch(uniform: Tensor, min_timestep: float) -> Tensor:
    """[B] uniforms in [0, 1) -> timesteps in [min_timestep, 1)."""
    return min_timestep + (1.0 - min_timestep) * uniform


def logit_normal(uniform: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """[B] uniforms -> sigmoid(N(mean, std^2)) by the inverse normal CDF, so strata stay strata
    (SD3, arXiv 2403.03206)."""
    inside = uniform.double().clamp(1e-9, 1 - 1e-9)
    return torch.sigmoid(mean + std * torch.special.ndtri(inside))


def shift(t: Tensor, factor: float) -> Tensor:
    """t in [0, 1] -> factor t / (1 + (factor - 1) t): the same ends, more mass near 1 for factor >
    1 (SD3, eq. 23).
    """
    return factor * t / (1 + (factor - 1) * t)


def arcsine(uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Timesteps t = sin^2(pi u / 2), denser at both ends, and dt/du, by which an integral over t
    weighs them.

    A NELBO whose integrand grows as 1 / sqrt(t), or whose weights do as 1 / t, then has no mass at
    the ends that a uniform t in [1e-4, 1 - 1e-4] would miss, and a finite variance.

    Args:
        uniform: Uniform numbers u in [0, 1); they are moved into [1e-5, 1 - 1e-5], so that
            0 < t < 1.

    Returns:
        t and dt/du, both of uniform's shape, fp64.
    """
    angle = 0.5 * math.pi * uniform.double().clamp(1e-5, 1 - 1e-5)
    return torch.sin(angle) ** 2, 0.5 * math.pi * torch.sin(2 * angle)
