"""What is wrong with a micro-batch: values out of range, or not those of the store.

`mmldlm sanity` asks (`Task.check_batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.store import Rows


class TextBatch(Protocol):
    """The fields of a batch of texts that are compared. B samples, S positions, M scored.

    Attributes:
        ids: Samples. [B]
        real: False for placeholders. [B]
        attention_mask: True for tokens and EOS. [B, S] bool
        text_tokens: Texts as the model reads them. [B, S]
        text_positions: Scored positions, as indices into B * S. [M]
        text_targets: Clean tokens at the scored positions. [M]
    """

    ids: np.ndarray
    real: np.ndarray
    attention_mask: Tensor
    text_tokens: Tensor
    text_positions: Tensor
    text_targets: Tensor


def range_problems(
    batch: TextBatch, vocab_size: int, timesteps: dict[str, Tensor], extra_inputs: int = 0
) -> list[str]:
    """Return token ids outside of the vocabulary, timesteps outside [0, 1], and empty texts.

    Args:
        timesteps: Timesteps by the name of their field.
        extra_inputs: Number of ids above the vocabulary that the model reads and does not predict.
    """
    problems = []
    for name, ids, count in (
        ("text_tokens", batch.text_tokens, vocab_size + extra_inputs),
        ("text_targets", batch.text_targets, vocab_size),
    ):
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            problems.append(
                f"{name} holds ids {int(ids.min())}..{int(ids.max())} outside 0..{count - 1}"
            )
    for name, values in timesteps.items():
        if not bool(((values >= 0) & (values <= 1)).all()):
            problems.append(f"{name} outside [0, 1]")
    if not bool(batch.attention_mask.any(dim=1).all()):
        problems.append("a text without a single token")
    return problems


def store_problems(
    batch: TextBatch,
    rows: Rows,
    eos_token_id: int,
    latents: Tensor | None,
    expected: Callable[[np.ndarray], Iterable[Tensor]],
) -> list[str]:
    """Compare the clean text and latent of every real row with the store.

    Where noise replaced a token, the position is scored: its target puts the token back.

    Args:
        rows: The store's rows of batch.ids.
        latents: Clean latents of the batch in model space; None: it has none. [B, ...]
        expected: Stored latents [B, ...] -> what they may be in model space: one, or each variant
            that augmentation makes.
    """
    clean, attention = batch.text_tokens.cpu().clone(), batch.attention_mask.cpu()
    width, positions = clean.shape[1], batch.text_positions.cpu()
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < clean.numel():
        return [f"text_positions outside 0..{clean.numel() - 1}"]
    clean.view(-1)[positions] = batch.text_targets.cpu()
    given = None if latents is None else latents.cpu().float()
    problems = []
    for row in batch.real.nonzero()[0].tolist():
        text = torch.tensor([*rows.tokens[row].tolist(), eos_token_id])
        sample = f"sample {batch.ids[row]}"
        if len(text) > width or not torch.equal(attention[row], torch.arange(width) < len(text)):
            problems.append(
                f"{sample}: attention_mask is not that of a text of {len(text)} tokens"
            )
        elif not torch.equal(clean[row, : len(text)], text):
            problems.append(f"{sample}: its tokens are not the store's")
        # One sample at a time: an image may have a thousand variants.
        if given is not None and not any(
            torch.allclose(given[row], variant[0].float(), rtol=1e-4, atol=1e-4)
            for variant in expected(rows.latents[row : row + 1])
        ):
            problems.append(f"{sample}: its latent is not the store's")
    return problems
