"""The forward pass and the length loss that the objectives of the baselines share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.data.batch import Batch


def forward_text(model, tensors: dict[str, Tensor], **scored: Any) -> dict[str, Tensor]:
    """Run a PlainTransformer on a batch of TextCollator.

    Args:
        tensors: of the batch.
        scored: what of `PlainTransformer.forward` says how text_positions are scored.
    """
    return model(
        tensors["text_tokens"],
        tensors.get("latents"),
        tensors.get("text_timesteps"),
        None,
        tensors["attention_mask"],
        latent_is_null=tensors.get("latent_is_null"),
        token_positions=tensors["token_positions"],
        text_positions=tensors["text_positions"],
        dropout_keys=tensors.get("dropout_keys"),
        **scored,
    )


def add_length_loss(
    loss: Tensor, out: dict[str, Tensor], batch: Batch, weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss plus weight * length NLL / lengths of the global batch; and the sums loss,
    length_nll_sum and length_scored, detached."""
    tensors = batch.tensors
    length_nll = F.cross_entropy(out["length_logits"], tensors["length_targets"], reduction="none")
    length_sum = torch.dot(length_nll, tensors["length_weights"])
    loss = loss.add(length_sum, alpha=weight / max(batch.counts["lengths"], 1))
    return loss, {
        "loss": loss.detach(),
        "length_nll_sum": length_sum.detach(),
        "length_scored": tensors["length_weights"].sum(),
    }
