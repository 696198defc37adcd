"""How often tokens and lengths occur in the training split, and output biases that begin
with it.
"""

from __future__ import annotations

import numpy as np

from mmldlm.data.mixture import MixedStore
from mmldlm.data.run_data import RunData

COUNTED_TEXTS = 65_536  # spread over the split: enough to rank tokens
UNSEEN = 0.1  # occurrences added to every token


def token_counts(data: RunData) -> np.ndarray:
    """Occurrences [V] of each token in the training split, EOS included, or in COUNTED_TEXTS texts
    spread over it.
    """
    num_texts = len(data.train_lengths)
    spread = np.unique(
        np.linspace(0, num_texts - 1, min(num_texts, COUNTED_TEXTS)).astype(np.int64)
    )
    parts = data.train.of_one_size(spread) if isinstance(data.train, MixedStore) else [spread]
    tokens = [ids for part in parts for ids in data.train.get(part).tokens]
    counts = np.bincount(np.concatenate(tokens), minlength=data.config.model.vocab_size)
    counts[data.config.model.eos_token_id] += len(spread)
    return counts


def word_counts(data: RunData) -> np.ndarray:
    """`token_counts` of words: 0 for EOS, [PAD] and [MASK]. [V]"""
    model, counts = data.config.model, token_counts(data)
    counts[[model.eos_token_id, model.pad_token_id, model.mask_token_id]] = 0
    return counts


def log_token_frequencies(data: RunData) -> np.ndarray:
    """[V] fp32 log probabilities of tokens without a context."""
    counts = token_counts(data) + UNSEEN
    return np.log(counts / counts.sum()).astype(np.float32)


def log_length_frequencies(data: RunData) -> np.ndarray:
    """[max_seq_len] fp32 log probabilities of lengths 1 .. max_seq_len."""
    counts = 1.0 + np.bincount(
        np.asarray(data.train_lengths) - 1, minlength=data.config.model.max_seq_len
    )
    return np.log(counts / counts.sum()).astype(np.float32)
