"""The forward pass and the length loss that the objectives of the baselines share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.data.batch import Batch
from mmldlm.models.latent_transformer import LatentInputs, ModelOutput, TextInputs
from mmldlm.models.token_scores import TokenQuery


def forward_text(model, tensors: dict[str, Tensor], query: TokenQuery) -> ModelOutput:
    """Run a PlainTransformer on a batch of TextCollator.

    Args:
        tensors: Tensors of the batch.
        query: What is wanted at its text_positions.
    """
    text = TextInputs(
        tensors["text_tokens"],
        tensors.get("text_timesteps"),
        tensors["attention_mask"],
        token_positions=tensors["token_positions"],
    )
    latents = None
    if "latents" in tensors:
        latents = LatentInputs(tensors["latents"], is_null=tensors.get("latent_is_null"))
    query = query._replace(positions=tensors["text_positions"])
    return model(text, latents, query, dropout_keys=tensors.get("dropout_keys"))


def add_length_loss(
    loss: Tensor, out: ModelOutput, batch: Batch, weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss plus weight * length NLL / lengths of the global batch; and the sums loss,
    length_nll_sum and length_scored, detached."""
    tensors = batch.tensors
    length_nll = F.cross_entropy(out.length_logits, tensors["length_targets"], reduction="none")
    length_sum = torch.dot(length_nll, tensors["length_weights"])
    loss = loss.add(length_sum, alpha=weight / max(batch.counts["lengths"], 1))
    return loss, {
        "loss": loss.detach(),
        "length_nll_sum": length_sum.detach(),
        "length_scored": tensors["length_weights"].sum(),
    }
