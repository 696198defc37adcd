"""The share of unknown tokens ([UNK]) in texts: different words that are one id to a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmldlm.errors import UserError

WARN_SHARE, MAX_SHARE = 0.01, 0.2
# An encoder reads words in their context: a text with some unknown words still has a latent of its
# own.
MAX_ENCODER_SHARE = 0.9
_OTHER_TOKENIZER = (
    "--tokenizer train, that of a multilingual encoder, or for train and words a larger"
    " --vocab-size"
)


def count_unknown(
    tokens: Sequence[np.ndarray] | Sequence[list[int]], unk_token_id: int | None
) -> int:
    """Return how many of the token ids are the unknown one."""
    if unk_token_id is None or not len(tokens):
        return 0
    return int(
        (np.concatenate([np.asarray(ids, np.int64) for ids in tokens]) == unk_token_id).sum()
    )


def describe_share(num_unknown: int, num_tokens: int) -> str:
    """Return the share of unknown tokens in words of a table."""
    fraction = num_unknown / max(num_tokens, 1)
    return f"{fraction:.2%} of the tokens ({num_unknown:,})" if num_unknown else "none"


def check_unknown_share(
    num_unknown: int, num_tokens: int, split: str, where: str = "the"
) -> str | None:
    """Return a warning for a split of which a tokenizer does not know some words.

    Args:
        num_unknown: Number of [UNK] among its tokens.
        num_tokens: Number of its tokens.
        split: Name of the split.
        where: Owner of the split, for the message.

    Raises:
        UserError: more than MAX_SHARE of the training tokens, of which a model would learn next to
            nothing. A validation corpus of its own may have any share: its tokenizer is that of
            the training texts.
    """
    fraction = num_unknown / max(num_tokens, 1)
    found = f"{fraction:.1%} of the {num_tokens:,} tokens of {where} {split} texts are [UNK]"
    if fraction > MAX_SHARE and split == "train":
        raise UserError(
            f"a tokenizer that knows {1 - MAX_SHARE:.0%} of the tokens",
            found,
            f"use {_OTHER_TOKENIZER}",
        )
    if fraction > WARN_SHARE:
        return (
            f"{found}: words that the tokenizer does not know are all the same to a model (use"
            f" {_OTHER_TOKENIZER})"
        )
    return None


def check_unknown_to_encoder(num_unknown: int, num_tokens: int, encoder: str) -> str | None:
    """Return a warning for texts of which an encoder does not know some words.

    Args:
        num_unknown: Number of [UNK] among the encoder's tokens of some training texts.
        num_tokens: Number of these tokens.
        encoder: Name of the encoder.

    Raises:
        UserError: more than MAX_ENCODER_SHARE of them, so that different texts have nearly equal
            latents.
    """
    fraction = num_unknown / max(num_tokens, 1)
    found = (
        f"{fraction:.1%} of the tokens that encoder {encoder} reads of the training texts are"
        " [UNK]"
    )
    if fraction > MAX_ENCODER_SHARE:
        fix = (
            "choose an encoder of the language and script of the texts, such as --encoder e5"
            " or bge"
        )
        raise UserError(
            f"an encoder that knows at least {1 - MAX_ENCODER_SHARE:.0%} of the tokens", found, fix
        )
    return f"{found}: its latents do not tell these words apart" if fraction > WARN_SHARE else None
