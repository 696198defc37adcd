"""The codec between images and latents: pixels or codes of patches, components of the image, or an
autoencoder's.

`pixels` needs no encoder (Li and He, "Back to Basics: Let Denoising Generative Models Denoise",
arXiv 2511.13720).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmldlm.data import BASIS, CODEBOOK
from mmldlm.data.codebook import Codebook, read_codec_file
from mmldlm.data.encoders.model_files import VaeFiles, find_vae
from mmldlm.data.images import from_patches, to_patches
from mmldlm.data.manifest import MANIFEST, CodecIdentity
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import sha256_of
from mmldlm.utils.counter_rng import counter_generator
from mmldlm.utils.json_files import read_json
from mmldlm.utils.validation import find_problems, not_none

if TYPE_CHECKING:
    from mmldlm.data.encoders.vae import ImageVae

# Entries of an identity that say where something was, not what it is.
HINTS = ("vae_folder",)
# In units of the root mean square norm of an autoencoder's training latents.
_MAX_NORM_RATIO = 20.0
_SHA256_OF = {"basis_sha256": BASIS, "codebook_sha256": CODEBOOK}
_KEYS = ("size", "patch", "channels", "grid", "latents", "num_latents", "latent_dim")
# Number of images that are decoded at once.
_DECODED = 32
# Last counter word; those of the collators are in tasks/translation/noiser.py.
_SHIFT_STREAM = 8


@dataclass(frozen=True)
class ImageCodec:
    """Turns images into latents and back.

    Attributes:
        size: Side S of an image in pixels.
        patch: Side of a patch; N = (S / patch)^2 latents per image.
        channels: C, 1 (gray) or 3 (RGB).
        latents: `pixels` (the values of a patch, u / 127.5 - 1), `pca` (components, largest
            variance first), `codes` (ids int64 of the nearest codes of patches, D = 1), or `vae`
            (`VaeCodec`).
        num_latents, latent_dim: N and D.
        basis: Basis of pca, float32 [N * D + 1, S * S * C]: the mean image, then orthonormal
            components.
        basis_file: File of the basis, if it was read from one.
        codebook: Codebook of codes.
    """

    size: int
    patch: int
    channels: int
    latents: str
    num_latents: int
    latent_dim: int
    basis: np.ndarray | None = None
    basis_file: Path | None = None
    codebook: Codebook | None = None

    @classmethod
    def open(
        cls, source: str | os.PathLike | dict[str, Any], folder: str | os.PathLike | None = None
    ) -> ImageCodec:
        """Open the codec of a store, of a folder that `save` wrote, of a manifest, or of an
        identity.

        Args:
            source: Folder of a store, its manifest, or the `identity` of a codec.
            folder: For a manifest or an identity of kind pca or codes: folder that has their file.

        Raises:
            UserError: not a codec of images, or its file is missing, damaged or another one.
        """
        if not isinstance(source, dict):
            folder = Path(source)
            source = read_json(folder / MANIFEST, "give the folder of a store of images")
        identity = _identity_of(source)
        codec = cls(**{key: identity[key] for key in _KEYS if key != "grid"})
        if codec.latents == "pixels":
            return codec
        if codec.latents == "vae":
            return VaeCodec.of_identity(identity, codec._fields())
        folder = Path(folder or ".")
        if codec.latents == "codes":
            values = codec.patch**2 * codec.channels
            return replace(codec, codebook=Codebook.read(folder / CODEBOOK, identity, values))
        shape = (codec.num_latents * codec.latent_dim + 1, codec.size**2 * codec.channels)
        basis = read_codec_file(folder / BASIS, shape, identity["basis_sha256"])
        return replace(codec, basis=basis, basis_file=folder / BASIS)

    def _fields(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _KEYS if key != "grid"}

    @property
    def grid(self) -> list[int] | None:
        """Rows and columns of the latents in the image; None for components, which have no
        position.
        """
        side = self.size // self.patch
        return None if self.latents == "pca" else [side, side]

    def of_size(self, size: int) -> ImageCodec:
        """Return the codec of images of another side, for latents that are pixels of the same
        patches.
        """
        assert self.latents == "pixels", self.latents
        return replace(self, size=size, num_latents=(size // self.patch) ** 2)

    @property
    def name(self) -> str:
        """`pixels`, `pca:M` or `codes:...`, the name of the encoder in a manifest."""
        if self.codebook is not None:
            return self.codebook.name
        return (
            "pixels" if self.latents == "pixels" else f"pca:{self.num_latents * self.latent_dim}"
        )

    @property
    def identity(self) -> dict[str, Any]:
        """JSON-ready identity; with the file of pca or codes it is all that `open` needs."""
        entries = {**self._fields(), "grid": self.grid}
        if self.codebook is not None:
            return entries | self.codebook.identity
        if self.basis_file is not None:
            entries["basis_sha256"] = sha256_of(self.basis_file)
        return entries

    def files(self) -> dict[str, Path]:
        """Name -> path of the files that belong to the identity."""
        if self.codebook is not None and self.codebook.file is not None:
            return {CODEBOOK: self.codebook.file}
        return {} if self.basis_file is None else {BASIS: self.basis_file}

    def ready(self, folder: str | None = None, device: str | None = None) -> ImageCodec:
        """Return the codec with everything loaded that it needs; only an autoencoder needs
        something.

        Raises:
            UserError: a folder of an autoencoder was given for other latents.
        """
        if folder is not None:
            raise UserError(
                "--vae with latents of an autoencoder", f"latents {self.name}", "leave --vae out"
            )
        return self

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Return latents float32 [B, N, D], or ids int64 [B, N, 1] of codes, of images uint8 [B,
        S, S, C].

        Raises:
            UserError: images of another size, number of channels or type.
        """
        self.check_images(images)
        if self.codebook is not None:
            return self.codebook.encode(to_patches(images, self.patch))[..., None]
        return self.from_values((images / 127.5 - 1).astype(np.float32))

    def check_images(self, images: np.ndarray) -> None:
        """Raise a UserError unless images are uint8 [B, S, S, C]."""
        if images.dtype != np.uint8 or images.shape[1:] != self.image_shape:
            raise UserError(
                f"uint8 images of shape {list(self.image_shape)}",
                f"{images.dtype} of shape {list(images.shape[1:])}",
                "resize and convert them as the model's images were",
            )

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Return images uint8 [B, S, S, C] of latents [B, N, D] (or [B, D] with N = 1); values are
        clipped.

        Raises:
            UserError: latents of another shape, or an id that names no code.
        """
        return np.clip(np.rint((self.to_values(latents) + 1) * 127.5), 0, 255).astype(np.uint8)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(S, S, C)."""
        return (self.size, self.size, self.channels)

    def from_values(self, values: np.ndarray) -> np.ndarray:
        """Return latents float32 [B, N, D] of pixel values [B, S, S, C], from -1 (black) to 1
        (white); not of codes.
        """
        assert self.codebook is None, "images are given to codes in whole gray levels (`encode`)"
        if self.basis is None:
            return to_patches(np.asarray(values, np.float32), self.patch)
        flat = values.reshape(len(values), -1).astype(np.float64) - self.basis[0]
        # In float64, so that the sums' rounding, which depends on the number of threads, does not
        # reach the result.
        components = flat @ self.basis[1:].T.astype(np.float64)
        return components.astype(np.float32).reshape(-1, self.num_latents, self.latent_dim)

    def to_values(self, latents: np.ndarray) -> np.ndarray:
        """Return pixel values float32 [B, S, S, C] of latents [B, N, D], neither rounded nor
        clipped.

        Raises:
            UserError: latents of another shape.
        """
        latents = self.check_latents(latents)
        if self.codebook is not None:
            patches = self.codebook.decode(latents)
            return from_patches(
                (patches / 127.5 - 1).astype(np.float32), self.patch, self.channels
            )
        if self.basis is None:
            return from_patches(latents, self.patch, self.channels)
        return (latents.reshape(len(latents), -1) @ self.basis[1:] + self.basis[0]).reshape(
            -1, *self.image_shape
        )

    def check_latents(self, latents: np.ndarray) -> np.ndarray:
        """Return latents as float32 [B, N, D], or ids [B, N] of codes; raise a UserError if they
        have another shape.
        """
        num, dim = self.num_latents, self.latent_dim
        if latents.shape[1:] != (num, dim) and not (num == 1 and latents.shape[1:] == (dim,)):
            raise UserError(
                f"latents of shape [samples, {num}, {dim}], those of images of {self.size} pixels",
                f"shape {list(latents.shape)}",
                "give the latents of images that this codec encoded, or that its model sampled",
            )
        if self.codebook is not None:
            return latents.reshape(-1, num)
        return np.asarray(latents, np.float32).reshape(-1, num, dim)


def max_image_norm(manifest: dict[str, Any]) -> float:
    """Return the largest norm that a latent of a store of images can have; above it, its file is
    damaged.

    The norm of an id is the id.
    """
    image = manifest["image"]
    if image["latents"] == "vae":
        # No bound is known for an autoencoder: use one far above the training latents.
        moments = (np.square(manifest["latent_stats"][key]).sum() for key in ("mean", "std"))
        return _MAX_NORM_RATIO * math.sqrt(sum(moments))
    if image["latents"] == "codes":
        return image["codes"] - 1
    num_values = image["size"] ** 2 * image["channels"]
    # Values lie in [-1, 1]; components describe the difference between two images (an image and
    # the mean), whose norm is at most twice as large.
    if image["latents"] == "pixels":
        return 1.001 * math.sqrt(manifest["latent_dim"])
    return 1.001 * 2 * math.sqrt(num_values)


def _identity_of(source: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of a codec from itself or from a store's manifest."""
    identity = source
    if "files" in source:
        # Only a manifest lists files.
        if source.get("kind", "text") != "image":
            raise UserError(
                "a store of images", "a store of texts", "prepare one: mmldlm prepare glyphs"
            )
        shape = {
            "num_latents": source.get("latents_per_text", 1),
            "latent_dim": source["latent_dim"],
        }
        checksums = {
            key: source["files"].get(name, {}).get("sha256") for key, name in _SHA256_OF.items()
        }
        identity = {**source["image"], **shape, **checksums}
    if problem := find_problems(CodecIdentity, identity):
        raise UserError(
            "a valid codec of images (image in a config.json or manifest)",
            problem,
            "copy the file again",
        )
    return identity


@dataclass(frozen=True)
class VaeCodec(ImageCodec):
    """Turns images into latents and back through an autoencoder, which lies elsewhere: only its
    identity is kept.

    Attributes:
        vae: Name, source, weights_sha256 and, if it is not fp32, dtype of the autoencoder.
        vae_folder: Folder in which it was, if it was one; not part of the identity.
        module: Loaded autoencoder; None before `ready`.
    """

    vae: dict[str, Any] = field(default_factory=dict)
    vae_folder: str | None = None
    module: ImageVae | None = None

    @classmethod
    def of_identity(cls, identity: dict[str, Any], fields: dict[str, Any]) -> VaeCodec:
        """Return the codec of an identity; see `ImageCodec.open`.

        Raises:
            UserError: no autoencoder is named.
        """
        vae = identity.get("vae")
        if not isinstance(vae, dict) or not all(
            isinstance(vae.get(key), str) for key in ("name", "weights_sha256")
        ):
            raise UserError(
                "the name and the SHA-256 of the autoencoder of these images",
                repr(vae)[:100],
                "copy it again",
            )
        return cls(**fields, vae=vae, vae_folder=identity.get("vae_folder"))

    @classmethod
    def of_files(
        cls, files: VaeFiles, size: int, dtype: str, folder: str | None = None
    ) -> VaeCodec:
        """Return the codec of an autoencoder for images of a size in pixels.

        Args:
            folder: Folder that the user named, to find it again.
        """
        identity = {
            "name": files.name,
            "source": files.source,
            "weights_sha256": files.weights_sha256(),
        }
        precision = {} if dtype == "fp32" else {"dtype": dtype}
        return cls(
            size=size,
            patch=files.patch,
            channels=files.channels,
            latents="vae",
            num_latents=(size // files.patch) ** 2,
            latent_dim=4 * files.latent_channels,
            vae=identity | precision,
            vae_folder=folder,
        )

    @property
    def name(self) -> str:
        return f"vae:{self.vae['name']}"

    @property
    def identity(self) -> dict[str, Any]:
        entries = {**self._fields(), "grid": self.grid, "vae": self.vae}
        return entries if self.vae_folder is None else {**entries, "vae_folder": self.vae_folder}

    def ready(
        self, folder: str | None = None, device: str | None = None, batch_size: int | None = None
    ) -> VaeCodec:
        """Return the codec with its autoencoder loaded.

        Args:
            folder: Folder of the autoencoder, if it is elsewhere than the identity says.
            device: Torch device (default: a GPU if available).
            batch_size: Number of images per forward pass.

        Raises:
            UserError: the autoencoder is not there, is another one, or is damaged.
        """
        from mmldlm.data.encoders import vae as autoencoders

        files = self._find(folder)
        dtype = self.vae.get("dtype", "fp32")
        return replace(self, module=autoencoders.load_vae(files, device, dtype, batch_size))

    def _find(self, folder: str | None) -> VaeFiles:
        name = self.vae["name"]
        fix = f"give the folder of {name} with --vae FOLDER"
        try:
            files = find_vae(folder or self.vae_folder or name)
        except UserError as error:
            if folder is not None:
                raise
            raise UserError(
                f"the autoencoder {name}, with which these latents were made", error.found, fix
            ) from error
        sha256 = files.weights_sha256()
        if sha256 != self.vae["weights_sha256"]:
            raise UserError(
                f"the autoencoder {name} with the weights of these latents (sha256"
                f" {self.vae['weights_sha256'][:12]})",
                f"weights of sha256 {sha256[:12]} in {files.folder}",
                fix,
            )
        return files

    def encode(self, images: np.ndarray) -> np.ndarray:
        self.check_images(images)
        return self._module().encode(images)

    def decode(self, latents: np.ndarray) -> np.ndarray:
        # As floats, large images need four times their memory.
        parts = range(0, max(len(latents), 1), _DECODED)
        return np.concatenate(
            [ImageCodec.decode(self, latents[start : start + _DECODED]) for start in parts]
        )

    def from_values(self, values: np.ndarray) -> np.ndarray:
        raise AssertionError("an autoencoder is given whole gray levels (`encode`)")

    def to_values(self, latents: np.ndarray) -> np.ndarray:
        return self._module().decode(self.check_latents(latents))

    def _module(self) -> ImageVae:
        return self.module or not_none(self.ready().module)


def draw_shifts(
    seed: int, epoch: int, ids: np.ndarray, slots: np.ndarray, max_shift: int
) -> np.ndarray:
    """Draw shifts [B, 2] int64 (down, right) of at most max_shift pixels each way.

    They are functions of (seed, epoch, sample, slot): the same on any number of ranks.

    Args:
        ids, slots: [B] samples, and their positions in the global batch.
    """
    draws = [
        counter_generator(seed, epoch, sample, slot, _SHIFT_STREAM).integers(
            -max_shift, max_shift, 2, endpoint=True
        )
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
