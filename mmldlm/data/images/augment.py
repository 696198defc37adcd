"""Shifts of images in training: small sets need them.

Never flips, which would contradict left, right and letters.
"""

from __future__ import annotations

import numpy as np

from mmldlm.data.images.codec import ImageCodec

_SHIFT_STREAM = 8  # last counter word; the collators' own draws have 1 to 7


def draw_shifts(
    seed: int, epoch: int, ids: np.ndarray, slots: np.ndarray, max_shift: int
) -> np.ndarray:
    """Draw shifts [B, 2] int64 (down, right) of at most max_shift pixels each way.

    They are functions of (seed, epoch, sample, slot): the same on any number of ranks. Philox4x64
    (Salmon et al., SC 2011), with the counter of the collators' other draws.

    Args:
        ids, slots: [B] samples, and their positions in the global batch.
    """
    draws = [
        np.random.Generator(
            np.random.Philox(key=[seed, epoch], counter=[0, sample, slot, _SHIFT_STREAM])
        ).integers(-max_shift, max_shift, 2, endpoint=True)
        for sample, slot in zip(ids.tolist(), slots.tolist(), strict=True)
    ]
    return np.array(draws, np.int64).reshape(-1, 2)


def shift_images(images: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Shift images [B, S, S, C] of any dtype by [B, 2] pixels; what comes in has the color of the
    border.
    """
    size = images.shape[1]
    shifted = np.empty_like(images)
    for row, (down, right) in enumerate(shifts.tolist()):
        rows, columns = (
            np.clip(np.arange(size) - offset, 0, size - 1) for offset in (down, right)
        )
        shifted[row] = images[row][rows[:, None], columns]
    return shifted


def shift_latents(codec: ImageCodec, latents: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Shift the images of latents float32 [B, N, D] by [B, 2] pixels; return latents of the same
    shape.

    Of `pixels` only values move; of `pca` the image that the components describe is shifted and
    encoded again.
    """
    return codec.from_values(shift_images(codec.to_values(latents), shifts)).reshape(latents.shape)
