"""Find the files of an autoencoder of images and read its shape, without torch.

Diffusers' layout: config.json with diffusion_pytorch_model.safetensors (or .bin), in a folder, in
its folder `vae` if it is a pipeline, or in such a repository of the Hugging Face hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import sha256_of
from mmldlm.utils.formatting import first_line
from mmldlm.utils.json_files import read_json

CLASS = "AutoencoderKL"
_CONFIG = "config.json"
_WEIGHTS = (
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
)  # in order of preference
# latents of the autoencoder side by side that make one latent of the model, as in DiT and SD3
_PATCH = 2


@dataclass(frozen=True)
class VaeFiles:
    """An autoencoder on this machine.

    Attributes:
        name: as it was asked for; of a folder its last part.
        folder: with config.json and weights.
        source: `hub:NAME` or `folder:NAME`.
        channels: of the images, 1 or 3.
        latent_channels: C of the autoencoder; a latent of the model has D = 4 C values.
        patch: pixels a side that one latent of the model covers: twice the down-sampling.
        force_upcast: its card asks for float32.
    """

    name: str
    folder: Path
    source: str
    channels: int
    latent_channels: int
    patch: int
    force_upcast: bool

    @property
    def weights(self) -> Path:
        """The file of weights that diffusers reads."""
        return next(self.folder / name for name in _WEIGHTS if (self.folder / name).is_file())

    def weights_sha256(self) -> str:
        """Return the SHA-256 of the weights."""
        state = self.weights.stat()
        return _sha256(self.weights, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=8)
def _sha256(path: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file in this state; computed once in a process."""
    return sha256_of(path)


def find_vae(name: str, cache_dir: str | None = None) -> VaeFiles:
    """Find an autoencoder.

    Args:
        name: a folder, or a name on the Hugging Face hub, such as stabilityai/sd-vae-ft-mse.
        cache_dir: folder for hub files.

    Raises:
        UserError: it is neither, it cannot be downloaded, or it is not an AutoencoderKL.
    """
    if name and Path(name).is_dir():
        folder, source = Path(name), f"folder:{Path(name).resolve().name}"
        label = Path(name).resolve().name
    else:
        folder, source, label = _download(name, cache_dir), f"hub:{name}", name
    inner = folder / "vae"
    folder = inner if not _is_autoencoder(folder) and inner.is_dir() else folder
    return _read(label, folder, source)


def _download(name: str, cache_dir: str | None) -> Path:
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise UserError(
            "--latents vae:NAME_OR_FOLDER with a folder, or a name on the Hugging Face hub"
            " (owner/name)",
            f"no folder {name}" if name else "no name",
            "check the path, or give a name such as vae:stabilityai/sd-vae-ft-mse",
        )
    from huggingface_hub import snapshot_download

    try:
        for weights in _WEIGHTS:
            patterns = [
                f"{folder}{file}" for folder in ("", "vae/") for file in (_CONFIG, weights)
            ]
            folder = Path(snapshot_download(name, allow_patterns=patterns, cache_dir=cache_dir))
            if list(folder.rglob(weights)):
                break
    except (
        Exception
    ) as error:  # the hub client raises many types: no network, a missing file, a rejected token
        raise UserError(
            f"the autoencoder '{name}'",
            f"no folder of this name, and the Hugging Face hub failed: {first_line(error)}",
            "connect this machine to the hub once, or copy its files and give vae:FOLDER",
        ) from error
    return folder


def _is_autoencoder(folder: Path) -> bool:
    return (folder / _CONFIG).is_file()


def _read(name: str, folder: Path, source: str) -> VaeFiles:
    fix = f"give the folder of an {CLASS} of diffusers, with {_CONFIG} and {_WEIGHTS[0]}"
    expected = f"an autoencoder ({CLASS}) in {folder}"
    if not _is_autoencoder(folder):
        raise UserError(expected, f"no {_CONFIG}", fix)
    config: dict[str, Any] = read_json(folder / _CONFIG, fix)
    found = (
        config.get("_class_name", "a config without _class_name")
        if isinstance(config, dict)
        else "no object"
    )
    if found != CLASS:
        raise UserError(expected, str(found)[:100], fix)
    if not any((folder / weights).is_file() for weights in _WEIGHTS):
        raise UserError(expected, "no weights", fix)
    stages, latent, channels = (
        config.get(key) for key in ("block_out_channels", "latent_channels", "in_channels")
    )
    is_valid = (
        isinstance(stages, list)
        and stages
        and isinstance(latent, int)
        and latent > 0
        and channels in (1, 3)
    )
    if not is_valid or config.get("out_channels") != channels:
        shape = {
            key: config.get(key)
            for key in ("block_out_channels", "latent_channels", "in_channels")
        }
        raise UserError(
            f"{expected} with the same 1 or 3 channels in and out", str(shape)[:200], fix
        )
    down = 2 ** (len(stages) - 1)
    return VaeFiles(
        name,
        folder,
        source,
        channels,
        latent,
        _PATCH * down,
        bool(config.get("force_upcast", True)),
    )
