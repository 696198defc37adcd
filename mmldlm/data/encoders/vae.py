"""The autoencoder of latents `vae:NAME`: images -> the mean of the posterior -> images (diffusers'
AutoencoderKL).

Latent diffusion: Rombach et al., arXiv 2112.10752. Latents are kept raw: a store has their mean
and deviation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmldlm.data.encoders.model_files import VaeFiles
from mmldlm.data.images import from_patches, to_patches
from mmldlm.errors import UserError
from mmldlm.utils.formatting import first_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Pixels per forward pass, a bound of memory: one image of 512 pixels on a CPU, 16 on a GPU.
_CPU_PIXELS, _GPU_PIXELS = 512**2, 16 * 512**2


def usable_dtype(files: VaeFiles, dtype: str | None, device: str) -> str:
    """Return the precision: as asked for, else fp32 where the model asks for it or on a CPU, else
    bf16.

    Raises:
        UserError: another precision than fp32 for a model that asks for it.
    """
    if dtype is None:
        return "fp32" if files.force_upcast or device == "cpu" else "bf16"
    if dtype != "fp32" and files.force_upcast:
        raise UserError(
            f"--dtype fp32 for the autoencoder {files.name}, whose config has force_upcast",
            dtype,
            "leave --dtype out",
        )
    return dtype


class ImageVae:
    """A frozen autoencoder on the CPU or on one GPU.

    Args:
        files: Files of the autoencoder.
        device: Torch device (default: a GPU if available).
        dtype: Precision, fp32 or bf16.
        batch_size: Number of images per forward pass (default: as many as a bound of pixels
            allows).

    Raises:
        UserError: diffusers is not installed, or the files are damaged.
    """

    def __init__(
        self, files: VaeFiles, device: str | None, dtype: str, batch_size: int | None = None
    ):
        self.files, self.dtype, self.batch_size = files, dtype, batch_size
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._model = _load(files.folder, DTYPES[dtype]).to(self.device)

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Return latents float32 [B, N, 4 C] of images uint8 [B, S, S, channels]: the mean in 2 x
        2 patches.
        """
        return to_patches(self._in_batches(self._encode, images, images.shape[1]), 2)

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Return pixel values float32 [B, S, S, channels], about -1 to 1, of latents [B,
        N, 4 C].
        """
        maps = from_patches(np.asarray(latents, np.float32), 2, self.files.latent_channels)
        return self._in_batches(self._decode, maps, maps.shape[1] * self.files.patch // 2)

    def _in_batches(
        self, run: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, size: int
    ) -> np.ndarray:
        """Run in batches, smaller ones where a GPU runs out of memory; `size` is the side of the
        images in pixels.
        """
        limit = _CPU_PIXELS if self.device == "cpu" else _GPU_PIXELS
        count = self.batch_size or max(1, limit // size**2)
        while True:
            try:
                return np.concatenate(
                    [run(rows[start : start + count]) for start in range(0, len(rows), count)]
                )
            except torch.cuda.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                if count == 1:
                    found = f"one image of {size} pixels does not fit: {first_line(error)}"
                    raise UserError(
                        f"memory for {self.files.name}",
                        found,
                        "choose a larger GPU, or --device cpu",
                    ) from None
                count //= 2

    @torch.inference_mode()
    def _encode(self, images: np.ndarray) -> np.ndarray:
        values = (
            torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).to(self.device, torch.float32)
            / 127.5
            - 1
        )
        # The mean, not a draw: a store has one latent for an image, and equal images have equal
        # latents.
        latents = self._model.encode(values.to(DTYPES[self.dtype])).latent_dist.mean
        return latents.float().cpu().numpy().transpose(0, 2, 3, 1)

    @torch.inference_mode()
    def _decode(self, maps: np.ndarray) -> np.ndarray:
        latents = torch.from_numpy(maps.transpose(0, 3, 1, 2).copy()).to(
            self.device, DTYPES[self.dtype]
        )
        return self._model.decode(latents).sample.float().cpu().numpy().transpose(0, 2, 3, 1)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    try:
        from diffusers import AutoencoderKL
    except ImportError:
        raise UserError(
            "the package diffusers, for autoencoders", "not installed", "pip install 'mmldlm[vae]'"
        ) from None
    try:
        model = AutoencoderKL.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            low_cpu_mem_usage=False,
            torch_dtype=dtype,
        )
    except MemoryError:
        raise
    except Exception as error:
        # safetensors, torch and diffusers raise their own types.
        raise UserError(
            f"the weights of the autoencoder in {folder}",
            first_line(error),
            "copy or download these files again",
        ) from error
    return model.eval().requires_grad_(False)


@lru_cache(maxsize=2)
def load_vae(files: VaeFiles, device: str | None, dtype: str, batch_size: int | None) -> ImageVae:
    """Return an autoencoder, loaded once in a process; see `ImageVae`."""
    return ImageVae(files, device, dtype, batch_size)
