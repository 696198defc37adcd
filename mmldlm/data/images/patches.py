"""Images as rows of square patches, and back. Both only move values."""

from __future__ import annotations

import numpy as np


def to_patches(images: np.ndarray, patch: int) -> np.ndarray:
    """Cut images [B, S, S, C] into patches [B, (S / patch)^2, patch * patch * C], row by row; any
    dtype.
    """
    count, size, _, channels = images.shape
    side = size // patch
    grid = images.reshape(count, side, patch, side, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    return np.ascontiguousarray(grid).reshape(count, side * side, patch * patch * channels)


def from_patches(patches: np.ndarray, patch: int, channels: int) -> np.ndarray:
    """Join patches [B, N, patch * patch * C], N a square, into images [B, S, S, C]; any dtype."""
    count, side = len(patches), round(patches.shape[1] ** 0.5)
    grid = patches.reshape(count, side, side, patch, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    return np.ascontiguousarray(grid).reshape(count, side * patch, side * patch, channels)
