"""A model on disk as Hugging Face lays it out: model.safetensors (or shards with an index) and config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmldlm.config.schema import ModelConfig
from mmldlm.errors import UserError

if TYPE_CHECKING:
    from mmldlm.models.mmdit import MultimodalMMDiT

CONVERT = "make the folder with `mmldlm convert RUN/latest OUT`"


def write(model: MultimodalMMDiT, folder: Path) -> None:
    """Write model.safetensors and config.json into folder; a tied head is stored once."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del tensors["text_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config_dict(), indent=2) + "\n")


def read(kind: type[MultimodalMMDiT], path: str | Path, device: str, dtype: torch.dtype) -> MultimodalMMDiT:
    """See `MultimodalMMDiT.from_pretrained`."""
    folder = Path(path)
    if not folder.is_dir():
        folder = _download(str(path))
    if not (folder / "config.json").is_file():
        raise UserError(f"config.json in {folder}", "no such file", CONVERT)
    known = ModelConfig.model_fields
    values = json.loads((folder / "config.json").read_text())
    model = kind(ModelConfig(**{key: value for key, value in values.items() if key in known}))
    tensors = _read_tensors(folder)
    if model.config.tie_embeddings:
        tensors.setdefault("text_head.weight", tensors.get("text_encoder.token_embedding.weight"))
    own = model.state_dict()
    found = {name: None if tensors.get(name) is None else tuple(tensors[name].shape) for name in own}
    wrong = [
        f"{name}: {found[name] or 'missing'}, expected {tuple(own[name].shape)}"
        for name in own
        if found[name] != tuple(own[name].shape)
    ] + [f"{name}: not a tensor of this model" for name in tensors if name not in own]
    if wrong:
        raise UserError(
            f"the tensors of the model in {folder}/config.json",
            f"{len(wrong)} that differ: " + "; ".join(wrong[:5]),
            "convert the checkpoint again; config.json and model.safetensors must come from the same conversion",
        )
    model.load_state_dict(tensors)
    mean, std = model.latent_mean.clone(), model.latent_std.clone()
    model.to(device=device, dtype=dtype)
    model.latent_mean, model.latent_std = mean.to(device), std.to(device)
    return model.eval()


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=["*.safetensors", "*.json", "tokenizer/*"]))
    except Exception as error:
        raise UserError(
            f"a folder or a Hugging Face repository named {repository}",
            f"no such folder, and the hub answered: {error}",
            "check the path; a run's checkpoint must be converted first (`mmldlm convert RUN/latest OUT`)",
        ) from error


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors, or of the shards that its index names."""
    from safetensors import safe_open

    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    files = [single]
    if not single.is_file() and index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    tensors: dict[str, Tensor] = {}
    for path in files:
        if not path.is_file():
            raise UserError(f"{path.name} in {folder}", "no such file", CONVERT)
        with safe_open(path, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})
    return tensors
