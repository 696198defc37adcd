"""One token after the other: a causal PlainTransformer with the keys and values of the text so
far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmldlm.models.latent_transformer import EncodedLatent
from mmldlm.models.plain.block import KeysValues
from mmldlm.models.plain.layout import Layout, rotations
from mmldlm.models.plain.model import PlainTransformer


@dataclass
class TextCache:
    """Keys and values of B texts of equal length (and of their prefixes).

    Attributes:
        latent: of the samples.
        past: buffers of each block, [B, heads, capacity, head_dim].
        prefix: rows before the text.
        length: positions that are filled, the prefix among them.
    """

    latent: EncodedLatent
    past: list[KeysValues]
    prefix: int
    length: int = 0

    @property
    def batch(self) -> int:
        """B."""
        return self.past[0][0].shape[0]

    @property
    def is_empty(self) -> bool:
        """Whether no logits were computed yet."""
        return self.length == self.prefix

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the texts rows [B'] int64: finished texts leave, beams are
        reordered.
        """
        self.past = [
            (key.index_select(0, rows), value.index_select(0, rows)) for key, value in self.past
        ]
        self.latent = self.latent.select(rows)


def start_text(
    model: PlainTransformer,
    latents: Tensor | None,
    batch: int | None = None,
    is_null: Tensor | None = None,
) -> TextCache:
    """Return the cache of B empty texts; the prefix is computed here.

    Args:
        model: causal.
        latents: in model space; None: the null latent, or an unconditional model. [B, D] or [B, N,
            D]
        batch: B, without latents.
        is_null: as latent_is_null of `PlainTransformer.forward`.
    """
    config = model.config
    assert config.causal, "only a causal model keeps keys and values"
    count = len(latents) if latents is not None else batch
    encoded = model.encode_latents(latents, is_null, count, caches=True)
    prefix = encoded.tokens.shape[1] if config.conditioning == "prefix" else 0
    shape = (
        count,
        config.n_heads,
        prefix + config.max_seq_len,
        config.hidden_size // config.n_heads,
    )
    past = [
        (model.start_token.new_empty(shape), model.start_token.new_empty(shape))
        for _ in model.blocks
    ]
    cache = TextCache(encoded, past, prefix)
    if prefix:
        _extend(model, encoded.tokens.flatten(0, 1), cache, prefix)
    return cache


def next_logits(model: PlainTransformer, cache: TextCache, tokens: Tensor | None = None) -> Tensor:
    """Logits of the next token of each text.

    Args:
        cache: of the texts so far; it is extended in place.
        tokens: int64, the last token of each text, which the cache does not have yet; None: the
            texts are empty. [B]

    Returns:
        [B, V] fp32, -inf for [MASK].

    Raises:
        ValueError: the texts have max_seq_len tokens, or tokens are given for empty texts, or
            missing for others.
    """
    if (tokens is None) != cache.is_empty:
        raise ValueError(
            "next_logits takes no tokens for empty texts, and one token a text after that"
        )
    if cache.length - cache.prefix >= model.config.max_seq_len:
        raise ValueError(
            f"the texts already have model.max_seq_len={model.config.max_seq_len} tokens"
        )
    rows = model.start_token.expand(cache.batch, -1) if tokens is None else model.embed(tokens)
    rows = _extend(model, rows, cache, 1)
    sample = torch.arange(cache.batch, device=rows.device)
    return model.text_head(rows, sample, model.condition(cache.latent, None, cache.batch))[
        "text_logits"
    ]


def _extend(model: PlainTransformer, rows: Tensor, cache: TextCache, steps: int) -> Tensor:
    """Run the blocks on `steps` new rows of each text, [B * steps, H]."""
    config, device = model.config, rows.device
    table = rotations(
        config.max_seq_len, cache.prefix, config.hidden_size // config.n_heads, device
    )
    rotation = table[cache.length : cache.length + steps].repeat(cache.batch, 1, 1, 1)
    sample = torch.arange(cache.batch, device=device).repeat_interleave(steps)
    layout = Layout(cache.batch, steps, sample, None, None, rotation)
    condition = model.condition(cache.latent, None, cache.batch)
    for i, block in enumerate(model.blocks):
        latent = None if cache.latent.keys_values is None else cache.latent.keys_values[i]
        rows = block.forward_cached(rows, condition, layout, latent, cache.past[i], cache.length)
    cache.length += steps
    return rows
