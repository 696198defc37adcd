"""What of a micro-batch is not as the store has it: `mmldlm sanity` asks (`Task.check_batch`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.store import Rows


def store_problems(
    batch: Any,
    rows: Rows,
    eos_token_id: int,
    latents: Tensor | None,
    expected: Callable[[np.ndarray], Iterable[Tensor]],
) -> list[str]:
    """Compare the clean text and latent of every real row with the store.

    Where noise replaced a token, the position is scored: its target puts the token back.

    Args:
        batch: `BaselineBatch` or `TranslationBatch`.
        rows: The store's rows of batch.ids.
        latents: Clean latents of the batch in model space; None: it has none. [B, ...]
        expected: Stored latents [B, ...] -> what they may be in model space: one, or each variant
            that augmentation makes.
    """
    clean, attention = batch.text_tokens.cpu().clone(), batch.attention_mask.cpu()
    width, positions = clean.shape[1], batch.text_positions.cpu()
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
