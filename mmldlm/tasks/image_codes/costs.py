"""Costs and shapes of the MMDiT on ids of codes, without torch: those of one on values of one
dimension, and what a table and a head over codes have in place of its projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmldlm.models.mmdit import costs
from mmldlm.models.mmdit.costs import (
    FREQUENCIES,
    StepFlops,
    block_elements,
    group_of,
    head_bytes,
    matrix_elements,
    working_bytes,
)
from mmldlm.tasks.image_codes.config import ImageCodesModelConfig

__all__ = [  # what the translation task asks of the costs of its model
    "activation_bytes",
    "block_elements",
    "expected_shapes",
    "group_of",
    "logits_bytes",
    "matrix_elements",
    "parameter_counts",
    "step_flops",
    "training_flops",
    "working_bytes",
]


def parameter_counts(model: ImageCodesModelConfig) -> dict[str, int]:
    """Parameters of each module of CodesMMDiT; see models/mmdit/costs.py."""
    counts, chunks = costs.parameter_counts(model), model.tokens_per_latent * model.hidden_size
    more = model.num_codes - model.latent_dim
    counts["latent_encoder"] += more * chunks + (chunks - model.latent_dim) * model.cond_dim
    counts["latent_head"] += more * (chunks + 1)
    return counts


def activation_bytes(model: ImageCodesModelConfig, batch: int, length: int, dtype: str) -> int:
    """Bytes that autograd keeps for one micro-batch, in which no latent is regressed."""
    regression = costs.regression_bytes(model, batch, dtype)
    return costs.activation_bytes(model, batch, length, dtype) - regression


def logits_bytes(
    model: ImageCodesModelConfig, batch: int, length: int, dtype: str, on_gpu: bool
) -> int:
    """Most bytes of logits that exist at once when half of text and codes is scored; their heads
    run one after the other.
    """
    scored = batch * model.num_latents // 2
    return max(
        costs.logits_bytes(model, batch, length, dtype, on_gpu),
        head_bytes(model.num_codes, scored, dtype, on_gpu),
    )


def step_flops(
    model: ImageCodesModelConfig,
    lengths: Sequence[int],
    scored: int,
    num_latents: float | None = None,
    scored_codes: float | None = None,
) -> StepFlops:
    """Forward FLOPs of one batch.

    Args:
        scored_codes: Codes that the head scores (default: all).
    """
    num_latents = model.num_latents if num_latents is None else num_latents
    chunks, cond = model.tokens_per_latent * model.hidden_size, model.cond_dim
    scored_codes = len(lengths) * num_latents if scored_codes is None else scored_codes
    return replace(
        costs.step_flops(model, lengths, scored, num_latents),
        # Rows of a table, whose mean is pooled.
        latent_inputs=len(lengths) * 2 * cond * (chunks + cond),
        latent_head=scored_codes * 2 * chunks * model.num_codes,
        inputs=len(lengths) * 2 * 2 * FREQUENCIES * cond,
    )


def training_flops(
    model: ImageCodesModelConfig,
    num_samples: int,
    num_tokens: float,
    num_scored: float,
    num_logits: float | None = None,
    num_latents: float | None = None,
    scored_codes: float = 0,
) -> float:
    """Forward and backward FLOPs of a global batch's real work, from its counts."""
    values = costs.training_flops(
        model, num_samples, num_tokens, num_scored, num_logits, num_latents
    )
    if not values:
        return 0.0
    ids, numbers = (flops(model, [1], 1, num_latents) for flops in (step_flops, costs.step_flops))
    inputs = num_samples * (ids.latent_inputs - numbers.latent_inputs - numbers.latent_head)
    chunks = model.tokens_per_latent * model.hidden_size
    return values + 3 * (inputs + 2 * scored_codes * chunks * model.num_codes)


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes that a CodesMMDiT of this config has, for some of its weights."""
    shapes = costs.expected_shapes(config)
    del shapes["latent_encoder.to_tokens.weight"], shapes["latent_head.to_latent.weight"]
    codes, chunks = config["num_codes"], config["tokens_per_latent"] * config["hidden_size"]
    return shapes | {
        "latent_encoder.code_embedding.weight": (codes + 1, chunks),
        "latent_head.weight": (codes, chunks),
    }
