"""Child process of level 0: the part that needs torch, or reads the data (which may hang). Prints one JSON object.

python -m mmldlm.preflight.plan_child CONFIG.yaml WORLD_SIZE
"""

from __future__ import annotations

import json
import sys

from mmldlm.errors import UserError


def measure(config, world_size: int) -> dict:
    """Config against engine and data, parameters of the meta-device model, activations of one micro-batch."""
    from mmldlm.data.resolve import open_data
    from mmldlm.engines.build import check_engine

    found: dict = {}
    try:
        check_engine(config, world_size)
    except UserError as error:
        found["engine_error"] = {"expected": error.expected, "found": error.found, "fix": error.fix}
    try:
        data = open_data(config)
    except UserError as error:
        found["data_error"] = {"expected": error.expected, "found": error.found, "fix": error.fix}
        return found
    config = data.config
    found["samples"] = {"train": len(data.train_lengths), "validation": len(data.validation_lengths)}
    found["longest"] = int(max(data.train_lengths.max(), data.validation_lengths.max()))
    found["model"] = config.model.model_dump(mode="json")
    found.update(model_sizes(config, found["longest"]))
    return found


def model_sizes(config, length: int) -> dict:
    """Elements of trainable and frozen parameters, and bytes that a micro-batch of `length` tokens keeps for backward.

    All on the meta device: nothing is allocated or computed, however large the model.
    """
    import torch

    from mmldlm.models import MultimodalMMDiT
    from mmldlm.models.linear_cross_entropy import logits_bytes
    from mmldlm.objectives.freezing import apply_freezing

    with torch.device("meta"):
        model = MultimodalMMDiT(config.model)
    apply_freezing(model, config.training.loss_type, config.training.freeze)
    sizes = {"trainable": 0, "frozen": 0, "largest_block": 0}
    for parameter in model.parameters():
        sizes["trainable" if parameter.requires_grad else "frozen"] += parameter.numel()
    sizes["largest_block"] = max(sum(p.numel() for p in child.parameters()) for child in _blocks(model))
    sizes["buffers"] = sum(buffer.numel() for buffer in model.buffers())
    sizes["activations"] = activation_bytes(model, config, length)
    masked, low = num_masked(config, length), 4 if config.training.dtype == "fp32" else 2
    sizes["logits"] = {device: logits_bytes(masked, config.model.vocab_size, device, low) for device in ("cpu", "cuda")}
    return sizes


def _blocks(model):
    return [*model.blocks, model.text_encoder, model.text_head, model.latent_encoder]


def num_masked(config, length: int) -> int:
    """Scored text positions of a micro-batch of `length` tokens a text."""
    return max(config.training.train_batch_size * length // 2, 1)


def activation_bytes(model, config, length: int) -> int:
    """Bytes of the tensors that autograd keeps for one micro-batch, each storage counted once.

    Weights, their gradients and inputs are not counted. With half of the text masked, as on average in training.
    """
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    model = model.to(dtypes[config.training.dtype])
    batch, masked = config.training.train_batch_size, num_masked(config, length)
    with torch.device("meta"):
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        inputs = {
            "latents": torch.zeros(batch, config.model.latent_dim),
            "text_timesteps": torch.zeros(batch),
            "latent_timesteps": torch.zeros(batch),
            "attention_mask": torch.ones(batch, length, dtype=torch.bool),
        }
        more = {
            "text_is_null": torch.zeros(batch, dtype=torch.bool),
            "latent_is_null": torch.zeros(batch, dtype=torch.bool),
            "text_positions": torch.zeros(masked, dtype=torch.int64),
            "text_targets": torch.zeros(masked, dtype=torch.int64),
            "text_weights": torch.zeros(masked),
        }
    kept: dict[int, int] = {}
    storages = []  # keeps them alive, so that no id is used twice

    def pack(tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in kept and key not in known:
            kept[key] = storage.nbytes()
            storages.append(storage)
        return tensor

    known = {p.untyped_storage()._cdata: 0 for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(tokens, **inputs, **more)
        loss = out["text_loss_sum"] + out["latent_pred"].sum() + out["length_logits"].sum()
    del loss
    return sum(kept.values())


def main() -> int:
    from mmldlm.config.load import load_config

    path, world_size = sys.argv[1:]
    found = measure(load_config(None, path, []), int(world_size))
    print("\n" + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
