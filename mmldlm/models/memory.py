"""Memory that a step of the networks needs beside parameters, by arithmetic alone: activations,
working memory of the backward pass, logits.

Preflight's memory model adds them to what the engine keeps of the parameters. Tests hold the
counts against the storages that autograd keeps.
"""

from __future__ import annotations

from mmldlm.models.flops import FREQUENCIES, latent_rows
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.models.plain_config import PlainConfig
from mmldlm.models.transformer_config import TransformerConfig
from mmldlm.utils.validation import not_none

# Logits that exist at once (models/linear_cross_entropy.py): a GPU wants large products, on a CPU
# they are as fast in small ones (fp32 elements; of low precision twice as many).
CHUNK_ELEMENTS = {"cpu": 8 << 20, "cuda": 64 << 20}
MIN_ROWS = 64
# Rows whose softmax exists at once in fp32 next to low-precision logits on a CPU: few, so that it
# stays in the cache.
MIN_SHARED_ROWS = 64
# Rows of logits start at multiples of this: unaligned rows of 30,522 take 1.4 times as long on
# some CPUs (stores cross cache lines) and leave the aligned kernels on a GPU.
ROW_ALIGNMENT = 64


def mmdit_activation_bytes(model: ModelConfig, batch: int, length: int, dtype: str) -> int:
    """Bytes that autograd keeps for one micro-batch; attention is a fused kernel, which keeps no
    weights.

    Counted from mmldlm/models/fused_block.py, which keeps products of matrices only, and no
    masks of dropout. With gradient checkpointing: the inputs of the blocks that run again, and the
    whole of one of them.
    """
    size = 4 if dtype == "fp32" else 2
    width, mlp = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    tokens = length + latent_rows(model)
    block = mmdit_block_bytes(model, batch, length, dtype)
    # The last block has both branches and the MLP of the scored half alone.
    last = block - batch * length / 2 * size * (2 * width + mlp)
    blocks = _kept_by_blocks(model, block, last, inputs=batch * tokens * width * size)
    # Rows of the scored half, their norm and modulation; then the norm of the latents' head and
    # its input.
    head = 2.5 * length * width + 8 * width
    head += 3 * (tokens - length) * width
    outside = (
        batch
        * size
        * (
            head
            + 12 * model.cond_dim
            + 2 * FREQUENCIES
            + model.num_latents * not_none(model.latent_dim)
        )
    )
    outside += regression_bytes(model, batch, dtype)
    return int(blocks + outside)


def _kept_by_blocks(model: TransformerConfig, block: float, last: float, inputs: float) -> float:
    """Bytes of all blocks as the backward pass begins or runs the last of them again.

    Args:
        block: Bytes of a block that is not checkpointed.
        last: The same of the last block.
        inputs: Bytes of a block's inputs.
    """
    again = model.recomputed_blocks
    kept = len(again) * inputs + (model.n_blocks - len(again)) * block
    return kept + block if model.n_blocks - 1 in again else kept - block + last


def mmdit_block_bytes(model: ModelConfig, batch: int, length: int, dtype: str) -> int:
    """Bytes of `mmdit_activation_bytes` of one block that is not checkpointed."""
    size = 4 if dtype == "fp32" else 2
    width, mlp, heads = model.hidden_size, int(model.hidden_size * model.mlp_ratio), model.n_heads
    tokens = length + latent_rows(model)
    # A row in a block: itself, queries, keys and values, what attention mixed, both branches, the
    # MLP's hidden layer; queries and keys before the weights of their norms. In low precision
    # unfused attention copies 3 H.
    token = size * ((7 + (2 if model.qk_rmsnorm else 0) + (0 if size == 4 else 3)) * width + mlp)
    # Attention's log-sum-exp, and what the norms divided by.
    token += 4 * heads * (1 + (2 if model.qk_rmsnorm else 0))
    return int(batch * (tokens * token + size * 12 * width))


def regression_bytes(model: ModelConfig, batch: int, dtype: str) -> int:
    """Bytes of `mmdit_activation_bytes` that exist because vectors of latents are predicted."""
    size = 4 if dtype == "fp32" else 2
    # Hidden layers of the vector that several latents are pooled into.
    pooled = size * 2 * (model.num_latents - 1) * model.cond_dim
    # Of the loss, in fp32: predictions and targets, later gradients in their place.
    return batch * (
        pooled + 4 * 2 * model.num_latents * model.latent_predictions * not_none(model.latent_dim)
    )


def mmdit_working_bytes(model: ModelConfig, batch: int, length: int, dtype: str) -> int:
    """Most bytes that the backward pass of one block needs for its own results, while all that is
    kept is still there.

    Counted from mmldlm/models/fused_block.py: gradients of modulation and norms of every
    row, of what goes into and out of the products, and the hidden layer of the MLP with its two
    gradients.
    """
    size = 4 if dtype == "fp32" else 2
    width, mlp = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    rows = batch * (length + latent_rows(model))
    return int(rows * size * ((10 if model.qk_rmsnorm else 8) * width + 3 * mlp))


def plain_activation_bytes(
    model: PlainConfig, batch: int, length: int, dtype: str, scored_fraction: float = 0.5
) -> int:
    """Bytes that autograd keeps for one micro-batch (unfused blocks), attention's weights among
    them.

    Args:
        scored_fraction: Fraction of the text that the head scores.
    """
    size = 4 if dtype == "fp32" else 2
    width = model.hidden_size
    inner = int(model.hidden_size * model.mlp_ratio)
    heads = model.n_heads
    rows, memory = length + model.prefix_rows, model.num_latents * model.chunks
    low = size == 2
    crosses = model.conditioning == "cross_attention"
    gated = 2 * model.is_modulated
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
    # Masks of dropout have one byte per element.
    dropped = (2 + crosses) * width if model.dropout else 0
    block = batch * rows * (size * width * (attention + out + cross + mlp) + weights + dropped)
    block += batch * memory * size * width * (12 if low else 8) if crosses else 0
    scored_rows = length * scored_fraction
    # The last block computes what is behind attention for the scored rows alone.
    last = block - batch * (rows - scored_rows) * size * width * (mlp + (0 if crosses else out))
    blocks = _kept_by_blocks(model, block, last, inputs=batch * rows * width * size)
    head = batch * scored_rows * size * norm * width
    latent_values = model.num_latents * not_none(model.latent_dim)
    inputs = batch * size * (rows * width + latent_values + 12 * model.cond_width)
    return int(blocks + head + inputs)


def logits_bytes(
    model: TransformerConfig, batch: int, length: int, dtype: str, on_gpu: bool
) -> int:
    """Most bytes of logits that exist at once when half of the text is scored
    (models/linear_cross_entropy.py).
    """
    return head_bytes(not_none(model.vocab_size), batch * length // 2, dtype, on_gpu)


def head_bytes(classes: int, scored: int, dtype: str, on_gpu: bool) -> int:
    """Most bytes of logits and probabilities over so many classes that exist at once when so many
    positions are scored; bounded for any number of them.
    """
    low = 4 if dtype == "fp32" else 2
    rows = min(rows_of_a_chunk(classes, "cuda" if on_gpu else "cpu", low), max(scored, 1))
    # In low precision the probabilities are a separate fp32 tensor.
    shares = 0 if low == 4 else 4 * (rows if on_gpu else min(rows, MIN_SHARED_ROWS))
    return aligned(classes) * (rows * low + shares)


def rows_of_a_chunk(vocab_size: int, device_type: str, low_bytes: int) -> int:
    """Number of rows whose logits exist at once. low_bytes: size of an element in the compute
    dtype.
    """
    elements = CHUNK_ELEMENTS.get(device_type, CHUNK_ELEMENTS["cuda"])
    if device_type == "cpu" and low_bytes < 4:
        elements *= 2
    return max(elements // aligned(vocab_size), MIN_ROWS)


def aligned(vocab_size: int) -> int:
    """The width of a row of logits: a multiple of ROW_ALIGNMENT."""
    return -(-vocab_size // ROW_ALIGNMENT) * ROW_ALIGNMENT
