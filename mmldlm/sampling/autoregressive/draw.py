"""One token after the other, greedily or drawn; finished texts leave the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmldlm.models.plain import PlainTransformer, TextCache, next_logits
from mmldlm.sampling.text.draw import draw_tokens
from mmldlm.sampling.text.records import Recorder, report_changes

# Texts leave the batch once this share of it is finished: each departure copies the cache.
LEAVE_SHARE = 0.25


@dataclass
class WrittenTexts:
    """Texts of a batch of B.

    Attributes:
        tokens: int64, EOS written, then padded with EOS. [B, S]
        lengths: int64, EOS counted. [B]
        log_probs: fp64 log p(text) under the model, whatever temperature and nucleus drew it. [B]
        num_rows: rows that the model computed.
        passes: int64, one after the other, of each text. [B]
    """

    tokens: Tensor
    lengths: Tensor
    log_probs: Tensor
    num_rows: int
    passes: Tensor


def without_pad(model: PlainTransformer, logits: Tensor) -> Tensor:
    """Logits [C, V] with -inf for [PAD], which the model never saw."""
    config = model.config
    if config.pad_token_id == config.eos_token_id:
        return logits
    return logits.index_fill(
        1, torch.tensor([config.pad_token_id], device=logits.device), float("-inf")
    )


def draw_texts(
    model: PlainTransformer,
    cache: TextCache,
    uniform: Tensor,
    temperature: float,
    top_p: float = 1.0,
    recorder: Recorder | None = None,
    samples: Sequence[int] = (),
) -> WrittenTexts:
    """Write the texts of an empty cache, each until its EOS; at max_seq_len EOS is written without
    a draw.

    Args:
        cache: of B empty texts; used up.
        uniform: fp64 in [0, 1), one a token. [B, max_seq_len]
        temperature: 0 takes the most probable token.
        top_p: nucleus of the draws.
        recorder: called after every token, but not for EOS.
        samples: indices of the texts, for the recorder.

    Raises:
        MmldlmError: NaN logits.
    """
    batch, device, limit = cache.batch, uniform.device, model.config.max_seq_len
    eos = model.config.eos_token_id
    tokens = torch.full((batch, limit), eos, device=device)
    lengths = torch.full((batch,), limit, device=device)
    log_probs = torch.zeros(batch, dtype=torch.float64, device=device)
    rows, active = (
        torch.arange(batch, device=device),
        torch.ones(batch, dtype=torch.bool, device=device),
    )
    last, num_rows = None, 0
    for step in range(limit):
        logits = next_logits(model, cache, last)
        num_rows += cache.batch
        last = torch.full_like(rows, eos)
        if step + 1 < limit:
            last = draw_tokens(without_pad(model, logits), uniform[rows, step], temperature, top_p)
        added = logits.double().log_softmax(-1).gather(1, last[:, None])[:, 0]
        log_probs[rows] += torch.where(active, added, 0.0)
        before = None if recorder is None else tokens.clone()
        tokens[rows[active], step] = last[active]
        if before is not None:
            report_changes(
                recorder, samples, before, tokens, rows[active] * limit + step, logits[active]
            )
        ends = active & (last == eos)
        lengths[rows[ends]] = step + 1
        active = active & ~ends
        number = int(active.sum())
        if number == 0:
            break
        if number <= (1 - LEAVE_SHARE) * len(rows):
            kept = active.nonzero()[:, 0]
            cache.select(kept)
            rows, last, active = rows[kept], last[kept], active[kept]
    return WrittenTexts(tokens[:, : int(lengths.max())], lengths, log_probs, num_rows, lengths)
