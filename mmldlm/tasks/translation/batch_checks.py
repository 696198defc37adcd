"""Checks of a batch that only this task can make (`mmldlm sanity`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from mmldlm.tasks.translation.config import TranslationConfig
from mmldlm.tasks.translation.data import TranslationData
from mmldlm.tasks.translation.noiser import NoisedBatch


def unused_parameters(
    model: nn.Module, config: TranslationConfig, batch: NoisedBatch
) -> tuple[str, ...]:
    """Return beginnings of the names of parameters, or parts of them by stream, that a batch gives
    a zero gradient.

    In the last block the stream that no head of the mode reads still gives keys and values to the
    other stream; the rest of it changes nothing. A learned null waits for a sample whose condition
    was dropped.
    """
    stream = {"l2t": "latent", "t2l": "text"}.get(config.training.loss_type)
    last = f"blocks.{len(model.blocks) - 1}"
    unread = (
        [f"{last}.{layer}.weight[{stream}]" for layer in ("to_out", "mlp_in", "mlp_out")]
        if stream
        else []
    )
    nulls = [
        f"{side}_encoder.null_"
        for side in ("text", "latent")
        if not bool(batch.tensors[f"{side}_is_null"].any())
    ]
    return (*unread, *nulls)


Variants = Callable[[np.ndarray], list[np.ndarray]]
"""Stored latents of a batch -> what augmentation may make of them, each like the argument."""


def batch_problems(
    data: TranslationData, batch: NoisedBatch, variants: Variants | None = None
) -> list[str]:
    """Return what is wrong with a micro-batch: values out of range, or not those of the store."""
    return [
        *_range_problems(batch, data.config),
        *_store_problems(batch, data, variants or (lambda latents: [latents])),
    ]


def _range_problems(batch: NoisedBatch, config: TranslationConfig) -> list[str]:
    tensors, problems = batch.tensors, []
    for name in ("text_tokens", "text_targets"):
        ids = tensors[name]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < config.model.vocab_size:
            problems.append(
                f"{name} holds ids {int(ids.min())}..{int(ids.max())} outside"
                f" 0..{config.model.vocab_size - 1}"
            )
    for name in ("text_timesteps", "latent_timesteps"):
        if not bool(((tensors[name] >= 0) & (tensors[name] <= 1)).all()):
            problems.append(f"{name} outside [0, 1]")
    if not bool(tensors["attention_mask"].any(dim=1).all()):
        problems.append("a text without a single token")
    return problems


def _store_problems(batch: NoisedBatch, data: TranslationData, variants: Variants) -> list[str]:
    """Rebuild the clean text and latent of every real row and compare them with the store."""
    tensors = {name: tensor.cpu() for name, tensor in batch.tensors.items()}
    rows, clean = data.train.get(batch.ids), tensors["text_tokens"].clone()
    width = clean.shape[1]
    positions = tensors["text_positions"]
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < clean.numel():
        return [f"text_positions outside 0..{clean.numel() - 1}"]
    clean.view(-1)[positions] = tensors["text_targets"]
    expected = [
        _in_model_space(torch.from_numpy(latents), data) for latents in variants(rows.latents)
    ]
    problems = []
    for row in batch.real.nonzero()[0].tolist():
        text = torch.tensor([*rows.tokens[row].tolist(), data.config.model.eos_token_id])
        real = torch.arange(width) < len(text)
        if len(text) > width or not torch.equal(tensors["attention_mask"][row], real):
            problems.append(
                f"sample {batch.ids[row]}: attention_mask is not that of a text of {len(text)}"
                " tokens"
            )
        elif not torch.equal(clean[row, : len(text)], text):
            problems.append(f"sample {batch.ids[row]}: its tokens are not the store's")
        clean_latent = tensors["latent_clean"][row].float()
        if not any(
            torch.allclose(clean_latent, latents[row], rtol=1e-4, atol=1e-4)
            for latents in expected
        ):
            problems.append(f"sample {batch.ids[row]}: its latent is not the store's")
    return problems


def _in_model_space(latents: torch.Tensor, data: TranslationData) -> torch.Tensor:
    if data.config.latent_diffusion.l2_normalize:
        latents = torch.nn.functional.normalize(latents.float(), dim=-1)
    return (latents - torch.as_tensor(data.latent_mean)) / torch.as_tensor(data.latent_std)
