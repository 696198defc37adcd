"""The values of stored latents: fewer bytes on disk than in training."""

from __future__ import annotations

import numpy as np

# Never 0 (127 is -0.004, 128 is +0.004), so that no flat gray patch is a zero vector.
_UINT8_VALUES = (np.arange(256) / 127.5 - 1).astype(np.float32)


def as_float32(latents: np.ndarray) -> np.ndarray:
    """Return stored latents as float32; a uint8 value u is u / 127.5 - 1."""
    return (
        _UINT8_VALUES[latents]
        if latents.dtype == np.uint8
        else latents.astype(np.float32, copy=False)
    )


def as_values(latents: np.ndarray) -> np.ndarray:
    """Return stored latents as float32, uint16 ids of codes as int64."""
    return latents.astype(np.int64) if latents.dtype == np.uint16 else as_float32(latents)
