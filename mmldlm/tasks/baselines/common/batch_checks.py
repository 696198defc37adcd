"""Checks of a batch of the tasks on the plain transformer (`mmldlm sanity`)."""

from __future__ import annotations

import torch

from mmldlm.data.batch import Batch
from mmldlm.tasks.baselines.common.data import BaselineData


def batch_problems(data: BaselineData, batch: Batch) -> list[str]:
    """Return what is wrong with a micro-batch: its scored tokens or latents are not the store's.

    A position that is not scored may hold a noised token.
    """
    tensors = {name: tensor.cpu() for name, tensor in batch.tensors.items()}
    rows, problems, eos = data.train.get(batch.ids), [], data.config.model.eos_token_id
    mask, (num_rows, width) = tensors["attention_mask"], tensors["text_tokens"].shape
    positions = tensors["text_positions"]
    if (
        positions.numel()
        and not 0 <= int(positions.min()) <= int(positions.max()) < num_rows * width
    ):
        return [f"text_positions outside 0..{num_rows * width - 1}"]
    clean = tensors["text_tokens"].clone()
    clean.view(-1)[positions] = tensors["text_targets"]
    for row in batch.real.nonzero()[0].tolist():
        text = torch.tensor([*rows.tokens[row].tolist(), eos])
        if len(text) > width or not torch.equal(mask[row], torch.arange(width) < len(text)):
            problems.append(
                f"sample {batch.ids[row]}: attention_mask is not that of a text of {len(text)}"
                " tokens"
            )
        elif not torch.equal(clean[row, : len(text)], text):
            problems.append(f"sample {batch.ids[row]}: its tokens are not the store's")
        if "latents" in tensors:
            latent = torch.from_numpy(
                (rows.latents[row] - data.latent_mean) / data.latent_std
            ).float()
            if not torch.allclose(tensors["latents"][row], latent, rtol=1e-4, atol=1e-4):
                problems.append(f"sample {batch.ids[row]}: its latent is not the store's")
    return problems
