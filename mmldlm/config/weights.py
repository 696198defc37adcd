"""Weights of a choice among several: of modes, of stores."""

from __future__ import annotations

import math
from collections.abc import Mapping


def check_weights(key: str, weights: Mapping[str, float], least_share: float = 0.0) -> None:
    """Check that weights can be turned into shares.

    Args:
        key: of the config, for the error.
        weights: name -> weight.
        least_share: every share must be at least this, and above 0 if it is above 0.

    Raises:
        ValueError: no weight, a weight below 0 or not finite, a sum that is 0 or not finite, or a
            smaller share.
    """
    bad = {
        name: weight
        for name, weight in weights.items()
        if not (math.isfinite(weight) and weight >= 0)
    }
    if bad:
        name, weight = next(iter(bad.items()))
        raise ValueError(
            f"{key}: the weight of {name} is {weight}; weights are finite, and 0 or more"
        )
    total = sum(weights.values())
    if not 0 < total < math.inf:
        raise ValueError(
            f"{key}={dict(weights)}: the sum is {total}; one weight is above 0, and their sum is"
            " finite"
        )
    small = {name: weight for name, weight in weights.items() if weight / total < least_share}
    if small:
        name, weight = next(iter(small.items()))
        raise ValueError(
            f"{key}: the weight of {name} is {weight}, a share of {weight / total:.3g}; every"
            f" share is at least 1/{round(1 / least_share):,}: leave it out, or give it a larger"
            " weight"
        )
