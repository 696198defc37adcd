"""Config of a task that trains on stores of images."""

from __future__ import annotations

from pydantic import Field

from mmldlm.data.store.config import StoreDataConfig


class ImageDataConfig(StoreDataConfig):
    """Where the prepared images lie and how they are fed."""

    shift_pixels: int = Field(0, ge=0)
    """In training, shift every image by up to this many pixels each way; what comes in has the
    color of the border. 0: none. A sixteenth of the side is a good choice for small sets."""
    shift_only_i2t: bool = False
    """Shift only the images that captions are written of (i2t); those to make stay as they are
    stored.
    """
