"""The table of a checkpoint's tensors, against which `convert` compares weights without torch.

A run writes it into the manifest, whose checksums tie it to model_config.json: {name: "768x256"},
of parameters (a tied one under each of its names) and persistent buffers. What the weights of an
older checkpoint should be follows from its model_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.manifest import MANIFEST, MODEL_CONFIG, read_manifest
from mmldlm.config.renamed_keys import is_removed_weight, model_config_with_new_names
from mmldlm.errors import UserError
from mmldlm.utils.input_files import read_bytes

# Key of the manifest.
TABLE = "tensors"
_MMDIT = ("MultimodalMMDiT", "CodesMMDiT")
_ARCHITECTURES = (*_MMDIT, "PlainTransformer", "HierarchicalTransformer")


def tensor_table(shapes: Mapping[str, Iterable[int]]) -> dict[str, str]:
    """Return the table for the manifest."""
    return {name: "x".join(map(str, shape)) for name, shape in shapes.items()}


def check_tensors(weights: WeightSource, checkpoint: Path | None) -> None:
    """Compare the weights of a checkpoint with its table, or with its model_config.json, and note
    those that no model of today has.

    Raises:
        UserError: a weight is missing, is one too many, or has another shape.
    """
    if checkpoint is None:
        return
    removed = sorted({name.split(".")[0] for name in weights.tensors if is_removed_weight(name)})
    if removed:
        weights.notes.append(
            f"mmldlm does not read {', '.join(removed)}.* any more (docs/results/options.md)"
        )
    table = read_manifest(checkpoint).get(TABLE)
    if table is None:
        _check_with_config(weights, checkpoint / MODEL_CONFIG)
        return
    path, shapes = checkpoint / MANIFEST, _shapes_of(weights)
    if not isinstance(table, dict):
        raise _mismatch_error(path, weights, "a table of tensors", type(table).__name__)
    for name in table | shapes:
        expected = table.get(name, "no such weight")
        if (actual := shapes.get(name, "no such weight")) != expected:
            raise _mismatch_error(path, weights, f"{name}: {expected}", actual)


def _shapes_of(weights: WeightSource) -> dict[str, str]:
    return tensor_table({name: info.shape for name, info in weights.tensors.items()})


def _check_with_config(weights: WeightSource, path: Path) -> None:
    """Compare the weights of a checkpoint without a table with its model_config.json, if any."""
    if not path.is_file():
        return
    actual_shapes = _shapes_of(weights)
    try:
        config = model_config_with_new_names(json.loads(read_bytes(path)))
        # A user's own task is not imported.
        if config.get("architecture") not in _ARCHITECTURES:
            return
        if config.get("n_blocks", 0) > len(actual_shapes):
            # Checked before a loop over all of them.
            raise ValueError(f"n_blocks {config['n_blocks']} for {len(actual_shapes)} tensors")
        shapes, needed = tensor_table(_shapes_by_config(config)), _needed_names(config)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
        raise UserError(
            f"the config of a model in {path}", repr(e)[:200], "use an intact checkpoint"
        ) from e
    for name, expected in shapes.items():
        actual = actual_shapes.get(name, "no such weight" if name in needed else expected)
        if actual != expected:
            raise _mismatch_error(path, weights, f"{name}: {expected}", actual)
    num_blocks = len({name.split(".")[1] for name in actual_shapes if name.startswith("blocks.")})
    if num_blocks > config["n_blocks"]:
        raise _mismatch_error(path, weights, f"{config['n_blocks']} blocks", f"{num_blocks}")


def _shapes_by_config(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return shapes of weights that together use every size in a config; no model has all of
    them.
    """
    width, vocab, dim = config["hidden_size"], config["vocab_size"], config["latent_dim"]
    # None: not read, or a default.
    cond, chunks = config["cond_dim"], config["tokens_per_latent"]
    streams, head = (2 if config["architecture"] in _MMDIT else 1), width // config["n_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "latent_mean": (dim,),
        "token_clusters": (vocab,),
        "text_head.weight": (vocab, width),
        "text_encoder.token_embedding.weight": (vocab, width),
        "token_embedding.weight": (vocab + config.get("extra_input_tokens", 0), width),
        "latent_encoder.latent_position": (config["num_latents"], 1, width),
        "latent_tokens.latent_position": (config["num_latents"], 1, width),
    }
    if chunks is not None:
        joined, predictions = chunks * width, config.get("latent_predictions", 1)
        shapes["latent_encoder.to_tokens.weight"] = (joined, dim)
        shapes["latent_tokens.to_tokens.weight"] = (joined, dim)
        shapes["latent_head.to_latent.weight"] = (predictions * dim, joined)
        shapes["hypothesis_encoder.position"] = (config["num_latents"] * chunks, width)
        if (codes := config.get("num_codes")) is not None:
            shapes["latent_encoder.code_embedding.weight"] = (codes + 1, joined)
            shapes["latent_head.weight"] = (codes, joined)
    if cond is not None:
        shapes["length_head.3.weight"] = (config["max_seq_len"], cond)
        shapes["latent_pooled.to_pooled.0.weight"] = (cond, dim)
    for block in range(config["n_blocks"]):
        name = f"blocks.{block}"
        shapes[f"{name}.mlp_in.weight"] = (streams * int(width * config["mlp_ratio"]), width)
        shapes[f"{name}.qk_norm.weight"] = (4 * head,)
        shapes[f"{name}.query_norm.weight"] = (head,)
        if cond is not None:
            shapes[f"{name}.modulation.weight"] = (6 * streams * width, cond)
    return shapes


def _needed_names(config: dict[str, Any]) -> set[str]:
    """Return the names of `_shapes_by_config` that every model of this config has."""
    blocks = [f"blocks.{block}" for block in range(config["n_blocks"])]
    names = {"latent_mean", "text_head.weight", *(f"{block}.mlp_in.weight" for block in blocks)}
    if config["architecture"] not in _MMDIT:
        names.add("token_embedding.weight")
        if config.get("qk_rmsnorm"):
            names |= {f"{block}.query_norm.weight" for block in blocks}
        return names
    names |= {"text_encoder.token_embedding.weight", "length_head.3.weight"}
    names |= {f"{block}.modulation.weight" for block in blocks}
    if config.get("qk_rmsnorm"):
        names |= {f"{block}.qk_norm.weight" for block in blocks}
    if config.get("latent_grids") is None:
        # With several grids the positions are fixed, not learned.
        names.add("latent_encoder.latent_position")
    if config.get("num_codes") is None:
        names |= {"latent_encoder.to_tokens.weight", "latent_head.to_latent.weight"}
    else:
        names |= {"latent_encoder.code_embedding.weight", "latent_head.weight"}
    if config.get("corrector", "none") != "none":
        names.add("hypothesis_encoder.position")
    return names


def _mismatch_error(path: Path, weights: WeightSource, expected: str, found: str) -> UserError:
    fix = "restore the checkpoint as it was saved; the two are of different runs"
    return UserError(f"{expected}, as {path} says", f"{found} in {weights.path}", fix)
