"""Tensors of a batch of texts during decoding."""

from __future__ import annotations

import torch
from torch import Tensor


class DecodingState:
    """A batch of texts between all [MASK] and complete.

    The last position of a text of known length is its EOS: it is written, not predicted.

    Args:
        lengths: [B] int64, EOS counted.
        width: number of positions S.
        mask_token_id: id of [MASK].
        pad_token_id: id of [PAD].
        eos_token_id: id of EOS.
        drafts: [B, >= S] int64 tokens that stand from the start, [MASK] where one is to be filled;
            None: all [MASK].

    Attributes:
        tokens: [B, S] int64.
        real: [B, S] bool, False at padding.
        is_last: [B, S] bool, the EOS position of each text.
        undecided: [B, S] bool, positions that a strategy has yet to fill.
    """

    def __init__(
        self,
        lengths: Tensor,
        width: int,
        *,
        mask_token_id: int,
        pad_token_id: int,
        eos_token_id: int,
        drafts: Tensor | None = None,
    ):
        assert int(lengths.min()) >= 1 and int(lengths.max()) <= width
        self.mask_token_id, self.pad_token_id, self.eos_token_id = (
            mask_token_id,
            pad_token_id,
            eos_token_id,
        )
        self.lengths = lengths
        position = torch.arange(width, device=lengths.device)
        self.real = position < lengths[:, None]
        self.is_last = position == lengths[:, None] - 1
        self.tokens = torch.where(self.real, mask_token_id, pad_token_id)
        self.undecided = self.real & ~self.is_last
        if drafts is not None:
            self.tokens = torch.where(self.undecided, drafts[:, :width], self.tokens)
            self.undecided &= self.tokens == mask_token_id
        # Also of a text without words: nothing of it is left to predict.
        has_token = (self.real & ~self.is_last & ~self.undecided).any(1)
        self.write_eos((has_token | (lengths == 1))[:, None])

    def masked_share(self) -> Tensor:
        """Return the share of masked tokens of each text, EOS counted as in training: [B] fp64."""
        return ((self.tokens == self.mask_token_id) & self.real).sum(1) / self.lengths.double()

    def write_eos(self, rows: Tensor) -> None:
        """Write the EOS where `rows` ([B, 1] or [B, S] bool) is True."""
        self.tokens.masked_fill_(self.is_last & rows, self.eos_token_id)

    def fill(self, positions: Tensor, tokens: Tensor) -> None:
        """Write tokens [M] at positions [M] of B * S."""
        self.tokens.view(-1)[positions] = tokens
        self.undecided.view(-1)[positions] = False

    def texts(self) -> list[list[int]]:
        """Return the ids of each complete text without its EOS."""
        assert not bool(self.undecided.any())
        lengths = self.lengths.tolist()
        return [row[: length - 1] for row, length in zip(self.tokens.tolist(), lengths)]
