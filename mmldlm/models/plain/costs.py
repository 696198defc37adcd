"""Costs and shapes of the plain transformer by arithmetic alone, without torch;
models/mmdit/costs.py says how.

Tests hold the counts against the model itself: parameters to the element, FLOPs against torch's
counter, activations against the storages that autograd keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmldlm.models.mmdit.costs import FREQUENCIES, head_bytes
from mmldlm.models.plain.config import PlainConfig


def parameter_counts(model: PlainConfig) -> dict[str, int]:
    """Parameters of each module of PlainTransformer; tied embeddings count once, as the token
    embedding.

    Args:
        model: with latent_dim and vocab_size set.
    """
    width, cond, vocab, dim = (
        model.hidden_size,
        model.cond_width,
        model.vocab_size,
        model.latent_dim,
    )
    chunks, two_layers = model.chunks * width, cond * cond + cond
    counts = {
        "token_embedding": (vocab + model.extra_input_tokens) * width,
        "start_token": width if model.causal else 0,
        "latent_tokens": dim * chunks + 3 * chunks + model.num_latents * width
        if model.has_latent_tokens
        else 0,
        "latent_pooled": dim * cond + cond + two_layers + cond if model.pools_latent else 0,
        "timestep": FREQUENCIES * cond + cond + two_layers if model.reads_time else 0,
        "blocks": model.n_blocks * block_elements(model),
        "text_head": 2 * width * (cond + 1) if model.is_modulated else width,
        "length_head": two_layers + (cond + 1) * model.max_seq_len if model.has_length_head else 0,
        "null_length": cond if model.has_length_head and not model.pools_latent else 0,
    }
    counts["text_head"] += vocab + (0 if model.tie_embeddings else vocab * width)
    return {name: count for name, count in counts.items() if count}


def block_elements(model: PlainConfig) -> int:
    """Parameters of one PlainBlock."""
    width = model.hidden_size
    norms = 2 * (width // model.n_heads) if model.qk_rmsnorm else 0
    found = block_matrix_elements(model) + norms
    found += 6 * width * (model.cond_width + 1) if model.is_modulated else 2 * width
    return found + (norms + 3 * width if model.conditioning == "cross_attention" else 0)


def block_matrix_elements(model: PlainConfig) -> int:
    """Parameters of one block's linear layers, which Muon updates: without modulation, norms and
    gates.
    """
    width, inner = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    cross = 4 * width * width if model.conditioning == "cross_attention" else 0
    return 4 * width * width + 2 * width * inner + cross


def matrix_elements(model: PlainConfig) -> int:
    """Parameters of all blocks' linear layers."""
    return model.n_blocks * block_matrix_elements(model)


def largest_unit(model: PlainConfig) -> int:
    """Parameters of the largest module that a sharding engine gathers at once."""
    counts = parameter_counts(model)
    tied = model.vocab_size * model.hidden_size if model.tie_embeddings else 0
    return max(
        block_elements(model),
        counts["token_embedding"],
        counts["text_head"] + tied,
        counts.get("latent_tokens", 0),
    )


def activation_bytes(
    model: PlainConfig, batch: int, length: int, dtype: str, scored_share: float = 0.5
) -> int:
    """Bytes that autograd keeps for one micro-batch (unfused blocks), attention's weights among
    them.

    Args:
        scored_share: share of the text that the head scores.
    """
    size = 4 if dtype == "fp32" else 2
    width, inner, heads = (
        model.hidden_size,
        int(model.hidden_size * model.mlp_ratio),
        model.n_heads,
    )
    rows, memory = length + model.prefix_rows, model.num_latents * model.chunks
    low, crosses, gated = (
        size == 2,
        model.conditioning == "cross_attention",
        2 * model.is_modulated,
    )
    # In units of H elements a row. A norm: its input (a weighted one copies it to fp32), the
    # normalized rows, the branch's input; under adaLN scale and shift. A gate: itself and what it
    # multiplies.
    weighted = 4 if low else 3
    norm = 5 if model.is_modulated else weighted
    # Before and after the norms of queries and keys; then what attention copies, in fp32.
    attention = norm + ((6 if low else 5) if model.qk_rmsnorm else 0) + (6 if low else 3)
    out = 1 + gated
    mlp = norm + gated + 2 * inner / width
    cross = (
        (weighted + ((3 if low else 2) if model.qk_rmsnorm else 0) + (2 if low else 1) + 2)
        if crosses
        else 0
    )
    weights = 4 * heads * (rows + (memory if crosses else 0))
    dropped = (2 + crosses) * width if model.dropout else 0  # masks, a byte an element
    block = batch * rows * (size * width * (attention + out + cross + mlp) + weights + dropped)
    block += batch * memory * size * width * (12 if low else 8) if crosses else 0
    kept = length * scored_share
    if model.gradient_checkpointing:
        blocks = model.n_blocks * batch * rows * width * size + block
    else:  # the last block computes what is behind attention for the scored rows alone
        blocks = model.n_blocks * block - batch * (rows - kept) * size * width * (
            mlp + (0 if crosses else out)
        )
    head = batch * kept * size * norm * width
    inputs = (
        batch
        * size
        * (rows * width + model.num_latents * model.latent_dim + 12 * model.cond_width)
    )
    return int(blocks + head + inputs)


def logits_bytes(model: PlainConfig, batch: int, length: int, dtype: str, on_gpu: bool) -> int:
    """Most bytes of logits that exist at once when half of the text is scored
    (models/linear_cross_entropy.py).
    """
    return head_bytes(model.vocab_size, batch * length // 2, dtype, on_gpu)


@dataclass(frozen=True)
class StepFlops:
    """Forward FLOPs by module; `training` is three times their sum."""

    embeddings: float
    modulation: float
    blocks: float
    attention: float
    text_head: float
    length_head: float

    @property
    def forward(self) -> float:
        return sum(vars(self).values())

    @property
    def training(self) -> float:
        """Model FLOPs of forward and backward: what MFU is taken of."""
        return 3 * self.forward


def step_flops(model: PlainConfig, lengths: Sequence[float], scored: float) -> StepFlops:
    """Forward FLOPs of one batch's real work.

    Attention is counted over all pairs, causal or not, as kernels' counters do.

    Args:
        model: its shape; latent_dim and vocab_size set.
        lengths: text tokens of each sample, EOS included.
        scored: text positions that the head scores.
    """
    width, cond, inner = (
        model.hidden_size,
        model.cond_width,
        int(model.hidden_size * model.mlp_ratio),
    )
    batch, latents, prefix = len(lengths), model.num_latents, model.prefix_rows
    rows, memory = sum(lengths) + batch * prefix, latents * model.chunks
    crosses = model.conditioning == "cross_attention"
    embeddings = 2 * latents * model.latent_dim * model.chunks * width
    embeddings += (
        latents * 2 * (model.latent_dim * cond + cond * cond) if model.pools_latent else 0
    )
    embeddings += 2 * (FREQUENCIES * cond + cond * cond) if model.reads_time else 0
    a_row = 2 * width * (4 * width + 2 * inner) + (4 * width * width if crosses else 0)
    unread = (
        2 * width * (2 * inner + (0 if crosses else width))
    )  # of the last block, behind attention
    cross_memory = batch * memory * 4 * width * width if crosses else 0
    pairs = sum((length + prefix) ** 2 for length in lengths) + (
        sum(lengths) * memory if crosses else 0
    )
    return StepFlops(
        embeddings=batch * embeddings,
        modulation=batch * 2 * cond * width * (6 * model.n_blocks + 2)
        if model.is_modulated
        else 0,
        blocks=model.n_blocks * (rows * a_row + cross_memory) - (rows - scored) * unread,
        attention=model.n_blocks * 4 * pairs * width,
        text_head=2 * scored * width * model.vocab_size,
        length_head=batch * 2 * cond * (cond + model.max_seq_len) if model.has_length_head else 0,
    )


def training_flops(
    model: PlainConfig,
    num_samples: int,
    num_tokens: float,
    num_scored: float,
    num_logits: float | None = None,
) -> float:
    """Return forward and backward FLOPs of a global batch's real work, from its counts, at the
    mean length.

    num_logits: that the head computes; None: the whole vocabulary at each scored position.
    """
    if not num_samples or not num_tokens:
        return 0.0
    mean = step_flops(model, [num_tokens / num_samples], num_scored / num_samples)
    num_logits = num_scored * model.vocab_size if num_logits is None else num_logits
    return 3 * (num_samples * (mean.forward - mean.text_head) + 2 * num_logits * model.hidden_size)


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes that a PlainTransformer of this config has, for weights that between them use every
    size in it.
    """
    model = PlainConfig(
        **{key: value for key, value in config.items() if key in PlainConfig.model_fields}
    )
    width, cond, vocab, dim = (
        model.hidden_size,
        model.cond_width,
        model.vocab_size,
        model.latent_dim,
    )
    inner = int(width * model.mlp_ratio)
    shapes = {
        "latent_mean": (dim,),
        "token_embedding.weight": (vocab + model.extra_input_tokens, width),
        "text_head.weight": (vocab, width),
    }
    if model.has_latent_tokens:
        shapes["latent_tokens.to_tokens.weight"] = (model.chunks * width, dim)
        shapes["latent_tokens.latent_position"] = (model.num_latents, 1, width)
    if model.pools_latent:
        shapes["latent_pooled.to_pooled.0.weight"] = (cond, dim)
    if model.has_length_head:
        shapes["length_head.3.weight"] = (model.max_seq_len, cond)
    for block in range(model.n_blocks):
        name = f"blocks.{block}"
        shapes[f"{name}.mlp_in.weight"] = (inner, width)
        if model.is_modulated:
            shapes[f"{name}.modulation.weight"] = (6 * width, cond)
        if model.qk_rmsnorm:
            shapes[f"{name}.query_norm.weight"] = (width // model.n_heads,)
    return shapes
