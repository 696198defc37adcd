"""The codec between images and latents: pixels of patches, or principal components of the whole image.

`pixels` needs no encoder (Li and He, "Back to Basics: Let Denoising Generative Models Denoise", arXiv 2511.13720).
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.images.patches import from_patches, to_patches
from mmldlm.data.store.arrays import read_array
from mmldlm.data.store.repair_hints import MANIFEST
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import sha256_of, write_json
from mmldlm.utils.json_files import read_json

CODEC, BASIS = "image_codec.json", "pca_basis.npy"
_KEYS = ("size", "patch", "channels", "grid", "latents", "num_latents", "latent_dim")


@dataclass(frozen=True)
class ImageCodec:
    """Turns images into latents and back.

    Attributes:
        size: side S of an image in pixels.
        patch: side of a patch; N = (S / patch)^2 latents an image.
        channels: C, 1 (gray) or 3 (RGB).
        latents: `pixels` (the values of a patch, u / 127.5 - 1) or `pca` (components, largest variance first).
        num_latents, latent_dim: N and D.
        basis: of pca, float32 [N * D + 1, S * S * C]: the mean image, then orthonormal components.
        basis_file: where the basis lies, if it was read from a file.
    """

    size: int
    patch: int
    channels: int
    latents: str
    num_latents: int
    latent_dim: int
    basis: np.ndarray | None = None
    basis_file: Path | None = None

    @classmethod
    def open(cls, source: str | os.PathLike | dict[str, Any], folder: str | os.PathLike | None = None) -> ImageCodec:
        """Open the codec of a store, of a folder that `save` wrote, of a manifest, or of an identity.

        Args:
            source: a folder, a store's manifest, or the `identity` of a codec.
            folder: of a manifest or an identity of kind pca: the folder that has `pca_basis.npy`.

        Raises:
            UserError: not a codec of images, or its basis is missing, damaged or another one.
        """
        if not isinstance(source, dict):
            folder = Path(source)
            is_store = (folder / MANIFEST).is_file()
            source = read_json(folder / (MANIFEST if is_store else CODEC), "give the folder of a store of images")
        identity = _identity_of(source)
        codec = cls(**{key: identity[key] for key in _KEYS if key != "grid"})
        if codec.latents == "pixels":
            return codec
        path = Path(folder or ".") / BASIS
        return cls(**codec._fields(), basis=_read_basis(path, codec, identity["basis_sha256"]), basis_file=path)

    def _fields(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _KEYS if key != "grid"}

    @property
    def grid(self) -> list[int] | None:
        """Rows and columns of the latents in the image; None for components, which have no place."""
        side = self.size // self.patch
        return [side, side] if self.latents == "pixels" else None

    @property
    def name(self) -> str:
        """`pixels` or `pca:M`, the name of the encoder in a manifest."""
        return "pixels" if self.latents == "pixels" else f"pca:{self.num_latents * self.latent_dim}"

    @property
    def identity(self) -> dict[str, Any]:
        """JSON-ready: with `pca_basis.npy`, for pca, all that `open` needs."""
        own = {**self._fields(), "grid": self.grid}
        return own if self.basis_file is None else {**own, "basis_sha256": sha256_of(self.basis_file)}

    def files(self) -> dict[str, Path]:
        """Name -> path of the files that belong to the identity."""
        return {} if self.basis_file is None else {BASIS: self.basis_file}

    def save(self, folder: str | os.PathLike) -> None:
        """Write identity and files into a folder that exists; `open` reads it."""
        for name, path in self.files().items():
            shutil.copyfile(path, Path(folder, name))
        write_json(Path(folder, CODEC), self.identity)

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Return latents float32 [B, N, D] of images uint8 [B, S, S, C].

        Raises:
            UserError: images of another size, number of channels or type.
        """
        if images.dtype != np.uint8 or images.shape[1:] != self.image_shape:
            raise UserError(
                f"uint8 images of shape {list(self.image_shape)}",
                f"{images.dtype} of shape {list(images.shape[1:])}",
                "resize and convert them as the model's images were",
            )
        return self.from_values((images / 127.5 - 1).astype(np.float32))

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Return images uint8 [B, S, S, C] of latents [B, N, D] (or [B, D] with N = 1); values are clipped.

        Raises:
            UserError: latents of another shape.
        """
        return np.clip(np.rint((self.to_values(latents) + 1) * 127.5), 0, 255).astype(np.uint8)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(S, S, C)."""
        return (self.size, self.size, self.channels)

    def from_values(self, values: np.ndarray) -> np.ndarray:
        """Return latents float32 [B, N, D] of pixel values [B, S, S, C], from -1 (black) to 1 (white)."""
        if self.basis is None:
            return to_patches(np.asarray(values, np.float32), self.patch)
        flat = values.reshape(len(values), -1).astype(np.float64) - self.basis[0]
        # In float64, so that the sums' rounding, which depends on the number of threads, does not reach the result.
        found = flat @ self.basis[1:].T.astype(np.float64)
        return found.astype(np.float32).reshape(-1, self.num_latents, self.latent_dim)

    def to_values(self, latents: np.ndarray) -> np.ndarray:
        """Return pixel values float32 [B, S, S, C] of latents [B, N, D], neither rounded nor clipped.

        Raises:
            UserError: latents of another shape.
        """
        num, dim = self.num_latents, self.latent_dim
        if latents.shape[1:] != (num, dim) and not (num == 1 and latents.shape[1:] == (dim,)):
            raise UserError(
                f"latents of shape [samples, {num}, {dim}], those of images of {self.size} pixels",
                f"shape {list(latents.shape)}",
                "give the latents of images that this codec encoded, or that its model sampled",
            )
        latents = np.asarray(latents, np.float32).reshape(-1, num, dim)
        if self.basis is None:
            return from_patches(latents, self.patch, self.channels)
        return (latents.reshape(len(latents), -1) @ self.basis[1:] + self.basis[0]).reshape(-1, *self.image_shape)


def max_image_norm(manifest: dict[str, Any]) -> float:
    """Return the largest norm that a latent of a store of images can have; above it, its file is damaged."""
    image = manifest["image"]
    num_values = image["size"] ** 2 * image["channels"]
    # Values lie in [-1, 1]; a component is of the difference of two images.
    bound = math.sqrt(manifest["latent_dim"]) if image["latents"] == "pixels" else 2 * math.sqrt(num_values)
    return 1.001 * bound


def _identity_of(source: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of a codec from itself or from a store's manifest."""
    identity = source
    if "files" in source:  # a manifest
        if source.get("kind", "text") != "image":
            raise UserError("a store of images", "a store of texts", "prepare one: mmldlm prepare glyphs")
        shape = {"num_latents": source.get("latents_per_text", 1), "latent_dim": source["latent_dim"]}
        basis = source["files"].get(BASIS, {})
        identity = {**source["image"], **shape, "basis_sha256": basis.get("sha256")}
    missing = [key for key in _KEYS if key not in identity]
    if missing or identity["latents"] not in ("pixels", "pca"):
        found = f"no {', '.join(missing)}" if missing else f"latents {identity['latents']!r}"
        raise UserError("the codec of a model or store of images", found, "train on a store of images")
    return identity


def _read_basis(path: Path, codec: ImageCodec, sha256: str | None) -> np.ndarray:
    shape = (codec.num_latents * codec.latent_dim + 1, codec.size**2 * codec.channels)
    fix = f"copy {BASIS} again from the store or the checkpoint that the latents belong to"
    try:
        basis = read_array(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the components of {codec.name} in {path}", str(error), fix) from None
    if basis.shape != shape or basis.dtype != np.float32 or sha256_of(path) != sha256:
        found = f"{basis.dtype} {list(basis.shape)}" if basis.shape != shape else "other content"
        raise UserError(f"float32 {list(shape)} with the SHA-256 of its codec in {path}", found, fix)
    return basis
