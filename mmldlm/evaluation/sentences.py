"""The unseen sentences of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmldlm.data.store import Store, check_latents
from mmldlm.errors import UserError
from mmldlm.evaluation.statistics import derangement
from mmldlm.inference.inputs import check_latent_shape
from mmldlm.sampling.model import Model, rows_of_latents
from mmldlm.utils.counter_rng import Stream, generator
from mmldlm.utils.progress import ProgressCallback


@dataclass
class Sentences:
    """Unseen sentences and the pairing of the shuffled control.

    Attributes:
        tokens: N lists of ids without EOS.
        latents: [N, D] (or [N, M, D]) fp32.
        texts: N strings.
        shuffled_index: [N] index of another sentence for each, of another text where it can be
            helped.
        rows: [N] their rows in the split; None where they come from elsewhere.
    """

    tokens: list[list[int]]
    latents: np.ndarray
    texts: list[str]
    shuffled_index: np.ndarray
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, rows: Sequence[int], seed: int) -> Sentences:
        """Return some sentences, paired among themselves."""
        texts = [self.texts[row] for row in rows]
        pairing = derangement(len(texts), seed, texts)
        return Sentences([self.tokens[row] for row in rows], self.latents[rows], texts, pairing)


def choose_sentences(store: Store, model: Model, num_samples: int | None, seed: int) -> Sentences:
    """Draw sentences of a store's validation split, the same for the same seed.

    Raises:
        UserError: fewer sentences than requested, another latent dimension or vocabulary, long
            texts, invalid latents.
    """
    config, split = model.config, f"{store.root}/{store.split}"
    count = min(1000, len(store)) if num_samples is None else num_samples
    if not 2 <= count <= len(store):
        raise UserError(
            "at least 2 sentences (each is compared with the latent of another) and at most those"
            " in the store",
            f"{count} requested, {len(store)} in {split}",
            "lower --num-samples, or prepare with more --validation-samples",
        )
    check_latent_shape(store, config)
    tokenizer = store.manifest["tokenizer"]
    expected = {
        key: getattr(config, key) for key in ("mask_token_id", "pad_token_id", "eos_token_id")
    }
    found = {key: tokenizer[key] for key in expected}
    if found != expected or tokenizer["vocab_size"] > config.vocab_size:
        raise UserError(
            f"a store with the model's tokenizer: {expected}, at most {config.vocab_size} tokens",
            f"{found}, {tokenizer['vocab_size']} tokens in {store.root}",
            "evaluate on a store prepared with the model's tokenizer",
        )
    ids = np.sort(generator(seed, Stream.SENTENCES).permutation(len(store))[:count])
    longest = int(store.lengths[ids].max()) + 1
    if longest > config.max_seq_len:
        raise UserError(
            f"texts of at most model.max_seq_len={config.max_seq_len} tokens, EOS included",
            f"one of {longest} in {split}",
            f"prepare with --max-tokens {config.max_seq_len - 1}",
        )
    batch = store.get(ids)
    check_latents(batch.latents, split, zero_ok=store.kind == "image")
    tokens = [row.tolist() for row in batch.tokens]
    texts = store.texts(ids)
    return Sentences(tokens, batch.latents, texts, derangement(count, seed, texts), ids)


Log = Callable[[str], ProgressCallback | None]
"""Called with one line per stage; the result, if any, is called as the stage progresses
(`ProgressBar.start`).
"""


def prefixed(log: Log, name: str) -> Log:
    """Return a log whose lines name a model or control."""
    return lambda line: log(f"{name.replace('_', ' ')}: {line}")


def spread(total: int, count: int) -> list[int]:
    """Return at most `count` rows that are spread evenly over `total`."""
    rows = np.linspace(0, total - 1, min(count, total)).astype(np.int64)
    return np.unique(rows).tolist()


def batch_budget(model: Model, batch_size: int | None) -> dict[str, Any]:
    """Return `batch_tokens` of the samplers and the NELBO for batch_size texts of full length, or
    images and their captions.
    """
    rows = model.config.max_seq_len + rows_of_latents(model.config)
    return {} if batch_size is None else {"batch_tokens": batch_size * rows}
