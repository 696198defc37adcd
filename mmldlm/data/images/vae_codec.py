"""The codec of latents `vae:NAME`: what an autoencoder makes of an image.

Torch is loaded at its first use.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mmldlm.data.encoders.vae_files import VaeFiles, find_vae
from mmldlm.data.images.codec import ImageCodec
from mmldlm.errors import UserError

if TYPE_CHECKING:
    from mmldlm.data.encoders.vae import ImageVae

_DECODED = 32  # images at a time


@dataclass(frozen=True)
class VaeCodec(ImageCodec):
    """Turns images into latents and back through an autoencoder, which lies elsewhere: only its
    identity is kept.

    Attributes:
        vae: name, source, weights_sha256 and, if it is not fp32, dtype of the autoencoder.
        vae_folder: where it was, if it was a folder; not part of the identity.
        module: the loaded autoencoder; None before `ready`.
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
            folder: that the user named, to find it again.
        """
        identity = {
            "name": files.name,
            "source": files.source,
            "weights_sha256": files.weights_sha256(),
        }
        precision = {} if dtype == "fp32" else {"dtype": dtype}
        shape = {"size": size, "patch": files.patch, "channels": files.channels}
        num, dim = (size // files.patch) ** 2, 4 * files.latent_channels
        return cls(
            **shape,
            latents="vae",
            num_latents=num,
            latent_dim=dim,
            vae=identity | precision,
            vae_folder=folder,
        )

    @property
    def name(self) -> str:
        return f"vae:{self.vae['name']}"

    @property
    def source(self) -> str:
        return self.vae.get("source", "unknown")

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the autoencoder's weights."""
        return self.vae["weights_sha256"]

    @property
    def identity(self) -> dict[str, Any]:
        own = {**self._fields(), "grid": self.grid, "vae": self.vae}
        return own if self.vae_folder is None else {**own, "vae_folder": self.vae_folder}

    def ready(
        self, folder: str | None = None, device: str | None = None, batch_size: int | None = None
    ) -> VaeCodec:
        """Return the codec with its autoencoder loaded.

        Args:
            folder: of the autoencoder, if it is elsewhere than the identity says.
            device: a torch device (default: a GPU if available).
            batch_size: images per forward pass.

        Raises:
            UserError: the autoencoder is not there, is another one, or is damaged.
        """
        from mmldlm.data.encoders import vae as autoencoders

        files = self._find(folder)
        device = device or autoencoders.default_device()
        dtype = self.vae.get("dtype", "fp32")
        if batch_size is None:
            module = autoencoders.load_vae(files, device, dtype)
        else:
            module = autoencoders.ImageVae(files, device, dtype, batch_size)
        return replace(self, module=module)

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
        own = files.weights_sha256()
        if own != self.weights_sha256:
            raise UserError(
                f"the autoencoder {name} with the weights of these latents (sha256"
                f" {self.weights_sha256[:12]})",
                f"weights of sha256 {own[:12]} in {files.folder}",
                fix,
            )
        return files

    def encode(self, images: np.ndarray) -> np.ndarray:
        self.check_images(images)
        return self._module().encode(images)

    def decode(self, latents: np.ndarray) -> np.ndarray:
        parts = range(
            0, max(len(latents), 1), _DECODED
        )  # as floats, large images need four times their memory
        return np.concatenate(
            [ImageCodec.decode(self, latents[start : start + _DECODED]) for start in parts]
        )

    def from_values(self, values: np.ndarray) -> np.ndarray:
        raise AssertionError("an autoencoder is given whole gray levels (`encode`)")

    def to_values(self, latents: np.ndarray) -> np.ndarray:
        return self._module().decode(self.check_latents(latents))

    def _module(self) -> ImageVae:
        return self.module or self.ready().module
