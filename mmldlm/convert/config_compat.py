"""Verify, without torch, that exported weights match config.json.

Shapes: mmldlm/models (a test compares them with a model).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.layout import MODEL_CONFIG
from mmldlm.errors import UserError


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return shapes of a MultimodalMMDiT with this config, for weights that together depend on every size in it."""
    width, cond, vocab = config["hidden_size"], config["cond_dim"], config["vocab_size"]
    latent, tokens, heads = config["latent_dim"], config["latent_tokens"], config["n_heads"]
    mlp = int(width * config["mlp_ratio"])
    shapes = {
        "latent_mean": (latent,),
        "text_encoder.token_embedding.weight": (vocab, width),
        "latent_encoder.to_tokens.weight": (tokens * width, latent),
        "latent_encoder.latent_position": (config["max_latents"], 1, width),
        "text_head.weight": (vocab, width),
        "latent_head.to_latent.weight": (latent, tokens * width),
        "length_head.3.weight": (config["max_seq_len"], cond),
    }
    for block in range(config["n_blocks"]):
        name = f"blocks.{block}"
        shapes[f"{name}.modulation.weight"] = (12 * width, cond)
        shapes[f"{name}.mlp_in.weight"] = (2 * mlp, width)
        if config["qk_rmsnorm"]:
            shapes[f"{name}.qk_norm.weight"] = (4 * (width // heads),)
    return shapes


def check_config(weights: WeightSource, checkpoint: Path | None) -> None:
    """Compare a source with the model_config.json of its checkpoint, if there is one.

    Raises:
        UserError: a weight is missing or has another shape than in the config, or there are more blocks.
    """
    path = checkpoint / MODEL_CONFIG if checkpoint else None
    if path is None or not path.is_file():
        return
    try:
        config = json.loads(path.read_text())
        if config.get("architecture") != "MultimodalMMDiT":
            return
        if config.get("n_blocks", 0) > len(weights.tensors):  # before a loop over all of them
            raise ValueError(f"n_blocks {config['n_blocks']} for {len(weights.tensors)} tensors")
        shapes = expected_shapes(config)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"the config of a model in {path}", repr(error)[:200], "use an intact checkpoint") from error
    for name, shape in shapes.items():
        found = weights.tensors[name].shape if name in weights.tensors else "no such weight"
        if found != shape:
            raise _mismatch_error(path, weights, f"{name} of shape {shape}", f"{found}")
    blocks = {name.split(".")[1] for name in weights.tensors if name.startswith("blocks.")}
    if len(blocks) > config["n_blocks"]:
        raise _mismatch_error(path, weights, f"{config['n_blocks']} blocks", f"{len(blocks)}")


def _mismatch_error(path: Path, weights: WeightSource, expected: str, found: str) -> UserError:
    fix = "restore the checkpoint as it was saved; the two are of different runs"
    return UserError(f"{expected}, as {path} says", f"{found} in {weights.path}", fix)
