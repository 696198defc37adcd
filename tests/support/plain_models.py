"""Plain transformers of every kind, small, and batches for them."""

from __future__ import annotations

import torch

from mmldlm.models.plain_config import PlainConfig

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
