"""The arithmetic of costs.py against the model itself: parameters, FLOPs, activations, shapes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.models.plain import costs
from mmldlm.models.plain.config import PlainConfig
from mmldlm.models.plain.model import PlainTransformer

IDS = {
    "vocab_size": 300,
    "latent_dim": 24,
    "mask_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
SHAPES = {
    "none": {"conditioning": "none"},
    "none_tied": {"conditioning": "none", "tie_embeddings": True, "qk_rmsnorm": False},
    "prefix": {"num_latents": 3, "mlp_ratio": 2.0},
    "prefix_timed": {"reads_time": True, "reads_pooled": True, "tokens_per_latent": 2},
    "adaln": {
        "conditioning": "adaln",
        "reads_time": True,
        "cond_dim": 40,
        "extra_input_tokens": 7,
    },
    "cross": {"conditioning": "cross_attention", "reads_time": True, "tokens_per_latent": 3},
    "causal": {"causal": True, "tokens_per_latent": 3},
    "causal_none": {"causal": True, "conditioning": "none"},
    "causal_cross": {"causal": True, "conditioning": "cross_attention"},
    "causal_adaln": {"causal": True, "conditioning": "adaln", "cond_dim": 40},
}


def configured(name: str, **keys) -> PlainConfig:
    return PlainConfig(
        **{
            "hidden_size": 48,
            "n_heads": 3,
            "n_blocks": 2,
            "max_seq_len": 40,
            **IDS,
            **SHAPES[name],
            **keys,
        }
    )


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_and_shapes_to_the_element(name):
    config = configured(name)
    with torch.device("meta"):
        model = PlainTransformer(config)
    counts: dict[str, int] = {}
    for parameter, tensor in model.named_parameters():
        module = parameter.split(".")[0]
        counts[module] = counts.get(module, 0) + tensor.numel()
    assert costs.parameter_counts(config) == counts
    assert costs.block_elements(config) == sum(p.numel() for p in model.blocks[0].parameters())
    state = model.state_dict()
    shapes = costs.expected_shapes(config.model_dump())
    assert {key: tuple(state[key].shape) for key in shapes} == shapes


def batch_of(
    config: PlainConfig, batch: int, length: int, device: str, scored: int, dtype=torch.float32
) -> dict:
    torch.manual_seed(0)
    tokens = torch.randint(3, config.vocab_size, (batch, length), device="cpu").to(device)
    latents = torch.zeros(batch, config.num_latents, config.latent_dim, device=device, dtype=dtype)
    return {
        "text_tokens": tokens,
        "latents": None if config.conditioning == "none" else latents,
        "text_timesteps": torch.zeros(batch, device=device),
        "text_positions": torch.arange(scored, device=device),
        "text_targets": torch.zeros(scored, dtype=torch.int64, device=device),
        "text_weights": torch.ones(scored, device=device),
        "dropout_keys": torch.arange(batch, device=device),
    }  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_flops_are_torchs(name):
    config = configured(name)
    model, scored = PlainTransformer(config), 33
    model.requires_grad_(False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**batch_of(config, 3, 20, "cpu", scored))
    found = costs.step_flops(config, [20] * 3, scored)
    assert counter.get_total_flops() == found.forward
    assert costs.training_flops(config, 3, 60.0, 33.0) == pytest.approx(found.training)


def kept_for_backward(config: PlainConfig, batch: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of the storages that autograd keeps, without weights."""
    with torch.device("meta"):
        model = PlainTransformer(config).to(dtype)
    scored = batch * length if config.causal else batch * length // 2
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept, alive = {}, []  # alive: no address is used twice

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(**batch_of(config, batch, length, "meta", scored, dtype))
    del out
    return sum(kept.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_activations(name, dtype):
    for keys in ({}, {"hidden_size": 192, "n_blocks": 4}, {"hidden_size": 192, "dropout": 0.1}):
        config = configured(name, **keys)
        kept = kept_for_backward(
            config, 4, 40, torch.float32 if dtype == "fp32" else torch.bfloat16
        )
        assert costs.activation_bytes(
            config, 4, 40, dtype, 1.0 if config.causal else 0.5
        ) == pytest.approx(kept, rel=0.065)
