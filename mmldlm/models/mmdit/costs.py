"""Costs and shapes of the MMDiT by arithmetic alone, without torch: parameters, activations,
logits, FLOPs, weights.

The counts restate the modules next to this file, so that preflight needs no import of seconds;
tests hold them against the model itself, parameters to the element. FLOPs: only matrix products
count, 2 per multiply-add, as in PaLM's MFU (arXiv 2204.02311, appendix B) and torch's
FlopCounterMode. A text token meets the text stream and the head alone: 6 N FLOPs per token with
all N parameters would overstate the work of the 0.9B model three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmldlm.models.mmdit.config import ModelConfig

GROUPS = ("text", "latent", "shared")
_GROUP_OF_MODULE = {
    "text_encoder": "text",
    "text_head": "text",
    "length_head": "text",
    "latent_encoder": "latent",
    "latent_head": "latent",
    "text_timestep": "shared",
    "latent_timestep": "shared",
    "hypothesis_encoder": "shared",
    "blocks": "shared",
}
FREQUENCIES = 256  # models/layers.py: sinusoids of a timestep
# Of models/linear_cross_entropy.py; elements on a CPU, on a GPU.
_CHUNK_ELEMENTS, _CHUNK_ROWS, _SHARE_ROWS, _ROW_ALIGNMENT = (8 << 20, 64 << 20), 64, 64, 64


def group_of(name: str) -> str:
    """Return the group (GROUPS) of a module or parameter of MultimodalMMDiT."""
    return _GROUP_OF_MODULE[name.split(".")[0]]


def parameter_counts(model: ModelConfig) -> dict[str, int]:
    """Parameters of each module of MultimodalMMDiT; tied embeddings count once, as the token
    embedding.

    Args:
        model: with latent_dim and vocab_size set.
    """
    width, cond, vocab = model.hidden_size, model.cond_dim, model.vocab_size
    chunks = model.tokens_per_latent * width
    positions = 0 if model.latent_grids is not None else model.num_latents * width
    two_layers = cond * cond + cond  # the second layer of every small MLP
    more = {}
    if model.corrector != "none":
        rows = 2 * model.num_latents * chunks  # positions and nulls of the differences' tokens
        more["hypothesis_encoder"] = (
            2 * (width + 1) * width + (cond + 1) * width + two_layers + rows
        )
    return more | {
        "text_encoder": vocab * width + width,
        "latent_encoder": _latent_inputs(model) + positions + 2 * cond + two_layers,
        "text_timestep": FREQUENCIES * cond + cond + two_layers,
        "latent_timestep": FREQUENCIES * cond + cond + two_layers,
        "blocks": model.n_blocks * block_elements(model),
        "text_head": (
            2 * width * (cond + 1) + vocab + (0 if model.tie_embeddings else vocab * width)
        ),
        "latent_head": 2 * width * (cond + 1) + (chunks + 1) * _latent_outputs(model),
        "length_head": two_layers + (cond + 1) * model.max_seq_len,
    }


def _latent_inputs(model: ModelConfig) -> int:
    """Parameters that read a latent, with nulls and positions of its chunk tokens."""
    chunks = model.tokens_per_latent * model.hidden_size
    return (model.latent_dim + 3) * chunks + model.latent_dim * model.cond_dim


def _latent_outputs(model: ModelConfig) -> int:
    """Numbers that the latent head computes for each latent."""
    return model.latent_predictions * model.latent_dim


def block_elements(model: ModelConfig) -> int:
    """Parameters of one MMDiTBlock: two streams."""
    width, mlp = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    norms = 2 * (width // model.n_heads) if model.qk_rmsnorm else 0
    return 2 * (6 * width * (model.cond_dim + 1) + 4 * width * width + norms + 2 * width * mlp)


def matrix_elements(model: ModelConfig) -> int:
    """Parameters of the blocks' linear layers, which Muon updates: without modulation and
    norms.
    """
    width, mlp = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    return model.n_blocks * 2 * (4 * width * width + 2 * width * mlp)


def _tokens_of_a_latent(model: ModelConfig) -> int:
    """Rows in the blocks for each latent: its own and, with a corrector, those of its difference
    to a hypothesis.
    """
    return (2 if model.corrector != "none" else 1) * model.tokens_per_latent


def activation_bytes(model: ModelConfig, batch: int, length: int, dtype: str) -> int:
    """Bytes that autograd keeps for one micro-batch; attention is a fused kernel, which keeps no
    weights.

    Counted from mmldlm/models/mmdit/fused_block.py, which keeps products of matrices only, and no
    masks of dropout. With gradient checkpointing: every block's inputs, and the whole of the one
    block that is being computed again.
    """
    size = 4 if dtype == "fp32" else 2
    width, mlp, heads = model.hidden_size, int(model.hidden_size * model.mlp_ratio), model.n_heads
    tokens = length + model.num_latents * _tokens_of_a_latent(model)
    # A row in a block: itself, queries, keys and values, what attention mixed, both branches, the
    # MLP's hidden layer; queries and keys before the weights of their norms. In low precision
    # unfused attention copies 3 H.
    token = size * ((7 + (2 if model.qk_rmsnorm else 0) + (0 if size == 4 else 3)) * width + mlp)
    token += (
        4 * heads * (1 + (2 if model.qk_rmsnorm else 0))
    )  # attention's log-sum-exp; what the norms divided by
    block = batch * (tokens * token + size * 12 * width)
    inputs = batch * tokens * width * size
    if model.gradient_checkpointing:
        blocks = model.n_blocks * inputs + block
    else:  # in the last one, both branches and the MLP of the scored half alone
        blocks = model.n_blocks * block - batch * length / 2 * size * (2 * width + mlp)
    head = 2.5 * length * width + 8 * width  # rows of the scored half, their norm and modulation
    head += 3 * (tokens - length) * width  # the norm of the latents' head and its input
    outside = (
        batch
        * size
        * (head + 12 * model.cond_dim + 2 * FREQUENCIES + model.num_latents * model.latent_dim)
    )
    outside += regression_bytes(model, batch, dtype)
    if model.corrector != "none":  # words, the factor of each, and their product
        outside += batch * size * 3 * length * width
    return int(blocks + outside)


def regression_bytes(model: ModelConfig, batch: int, dtype: str) -> int:
    """Bytes of `activation_bytes` that exist because latents are vectors that are predicted."""
    size = 4 if dtype == "fp32" else 2
    pooled = size * 2 * (model.num_latents - 1) * model.cond_dim  # hidden layers of the vector
    # Of the loss, in fp32: predictions and targets, later gradients in their place.
    return batch * (pooled + 4 * 2 * model.num_latents * _latent_outputs(model))


def working_bytes(model: ModelConfig, batch: int, length: int, dtype: str) -> int:
    """Most bytes that the backward pass of one block needs for its own results, while all that is
    kept is still there.

    Counted from mmldlm/models/mmdit/fused_block.py: gradients of modulation and norms of every
    row, of what goes into and out of the products, and the hidden layer of the MLP with its two
    gradients.
    """
    size = 4 if dtype == "fp32" else 2
    width, mlp = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    rows = batch * (length + model.num_latents * _tokens_of_a_latent(model))
    return rows * size * ((10 if model.qk_rmsnorm else 8) * width + 3 * mlp)


def logits_bytes(model: ModelConfig, batch: int, length: int, dtype: str, on_gpu: bool) -> int:
    """Most bytes of logits that exist at once when half of the text is scored
    (models/linear_cross_entropy.py).
    """
    return head_bytes(model.vocab_size, batch * length // 2, dtype, on_gpu)


def head_bytes(classes: int, scored: int, dtype: str, on_gpu: bool) -> int:
    """Most bytes of logits over so many classes that exist at once when so many positions are
    scored.
    """
    low = 4 if dtype == "fp32" else 2
    wide = -(-classes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    elements = _CHUNK_ELEMENTS[on_gpu] * (1 if on_gpu or low == 4 else 2)
    scored = max(scored, 1)
    rows = min(max(elements // wide, _CHUNK_ROWS), scored)
    shares = 0 if low == 4 else 4 * (rows if on_gpu else min(rows, _SHARE_ROWS))
    return wide * (rows * low + shares)


@dataclass(frozen=True)
class StepFlops:
    """Forward FLOPs by module.

    `training` is three times their sum: a product has two gradients of its own size.
    """

    embeddings: float
    """Timesteps, and words of hypotheses."""
    latent_inputs: float
    modulation: float
    text_blocks: float
    latent_blocks: float
    attention: float
    text_head: float
    latent_head: float
    length_head: float
    inputs: float
    """Forward FLOPs of the layers that read the batch itself: no gradient goes back to it. Of
    embeddings and latent_inputs."""
    latents_behind_attention: float
    """A part of latent_blocks: the last block's layers that nothing but the latent head reads."""

    @property
    def forward(self) -> float:
        parts = ("inputs", "latents_behind_attention")
        return sum(value for name, value in vars(self).items() if name not in parts)

    @property
    def text_alone(self) -> float:
        """Forward FLOPs of text_logits for latents that are encoded already."""
        latents = (
            self.latent_inputs
            + self.latents_behind_attention
            + self.latent_head
            + self.length_head
        )
        return self.forward - latents

    @property
    def training(self) -> float:
        """Model FLOPs of forward and backward: what MFU is taken of."""
        return 3 * self.forward

    @property
    def without_input_gradients(self) -> float:
        """training, less the gradients that autograd leaves out because nothing before those
        layers learns.
        """
        return self.training - self.inputs


def step_flops(
    model: ModelConfig,
    lengths: Sequence[int],
    scored: int,
    num_latents: float | None = None,
) -> StepFlops:
    """Forward FLOPs of one batch.

    Real work: `lengths` of the real tokens (EOS included) and `scored` masked positions. Nominal
    work, what a padded batch with a dense head would cost: lengths [S] * B and scored B * S. After
    attention, the last block computes scored positions only.

    Args:
        model: its shape; latent_dim and vocab_size set. lengths: text tokens of each sample.
        scored: text positions that the head scores. num_latents: latents per sample (default:
            model.num_latents).
    """
    num_latents = model.num_latents if num_latents is None else num_latents
    width, cond, inner = (
        model.hidden_size,
        model.cond_dim,
        int(model.hidden_size * model.mlp_ratio),
    )
    batch, tokens = len(lengths), sum(lengths)
    tokens_per_latent = num_latents * _tokens_of_a_latent(model)
    a_row = 2 * width * (4 * width + 2 * inner)  # to_qkv, to_out, and the two MLP layers
    behind_attention = 2 * width * (width + 2 * inner)
    pairs = sum((length + tokens_per_latent) ** 2 for length in lengths)
    chunks = model.tokens_per_latent * width
    timesteps = 2 * (2 * 256 * cond + 2 * cond * cond)
    projected = num_latents * 2 * model.latent_dim * (chunks + cond)
    latent_in = projected + num_latents * 2 * cond * cond
    words = 0
    if (
        model.corrector != "none"
    ):  # z - ẑ beside z, and the words of the hypothesis, which are not always given
        latent_in, words = 2 * latent_in + 2 * cond * (cond + width), 4 * tokens * width * width
    first = 2 * 2 * 256 * cond + projected
    return StepFlops(
        embeddings=batch * timesteps + words,
        latent_inputs=batch * latent_in,
        modulation=batch * (model.n_blocks * 2 * 2 * cond * 6 * width + 2 * 2 * cond * 2 * width),
        text_blocks=model.n_blocks * tokens * a_row - (tokens - scored) * behind_attention,
        latent_blocks=model.n_blocks * batch * tokens_per_latent * a_row,
        attention=model.n_blocks * 4 * pairs * width,
        text_head=2 * scored * width * model.vocab_size,
        latent_head=batch * num_latents * 2 * chunks * _latent_outputs(model),
        length_head=batch * 2 * cond * (cond + model.max_seq_len),
        inputs=batch * first,
        latents_behind_attention=batch * tokens_per_latent * behind_attention,
    )


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes that a MultimodalMMDiT of this config has, for weights that between them use every
    size in it.
    """
    width, cond, vocab = config["hidden_size"], config["cond_dim"], config["vocab_size"]
    latent, tokens, heads = config["latent_dim"], config["tokens_per_latent"], config["n_heads"]
    mlp = int(width * config["mlp_ratio"])
    shapes = {
        "latent_mean": (latent,),
        "text_encoder.token_embedding.weight": (vocab, width),
        "latent_encoder.latent_position": (config["num_latents"], 1, width),
        "text_head.weight": (vocab, width),
        "length_head.3.weight": (config["max_seq_len"], cond),
        "latent_encoder.to_tokens.weight": (tokens * width, latent),
        "latent_head.to_latent.weight": (
            config.get("latent_predictions", 1) * latent,
            tokens * width,
        ),
    }
    if config.get("latent_grids") is not None:  # fixed positions
        del shapes["latent_encoder.latent_position"]
    if config.get("corrector", "none") != "none":
        shapes["hypothesis_encoder.position"] = (config["num_latents"] * tokens, width)
    for block in range(config["n_blocks"]):
        name = f"blocks.{block}"
        shapes[f"{name}.modulation.weight"] = (12 * width, cond)
        shapes[f"{name}.mlp_in.weight"] = (2 * mlp, width)
        if config["qk_rmsnorm"]:
            shapes[f"{name}.qk_norm.weight"] = (4 * (width // heads),)
    return shapes


def training_flops(
    model: ModelConfig,
    num_samples: int,
    num_tokens: float,
    num_scored: float,
    num_logits: float | None = None,
    num_latents: float | None = None,
) -> float:
    """Return forward and backward FLOPs of a global batch's real work, from its counts
    (recomputation does not count).

    num_logits: that the head computes; None: the whole vocabulary at each scored position.
    num_latents: of each sample of this batch; None: model.num_latents.

    Attention is quadratic in the length: the sum of squares is taken at the batch's mean length,
    which length-bucketed batches hold within a few percent of attention's share.
    """
    if not num_samples or not num_tokens:
        return 0.0
    num_latents = model.num_latents if num_latents is None else num_latents
    one = step_flops(model, [1], 1, num_latents)
    unread = step_flops(model, [1], 0, num_latents)
    mean = num_tokens / num_samples
    latents = num_latents * _tokens_of_a_latent(model)
    per_row = one.text_blocks  # at one token
    saved = (num_tokens - num_scored) * (one.text_blocks - unread.text_blocks)
    pairs = (mean + latents) ** 2 / (1 + latents) ** 2
    fixed = one.embeddings + one.latent_inputs + one.modulation
    fixed += one.latent_blocks + one.latent_head + one.length_head
    num_logits = num_scored * model.vocab_size if num_logits is None else num_logits
    head = 2 * num_logits * model.hidden_size
    blocks = num_samples * (fixed + per_row * mean + one.attention * pairs)
    has_words = model.corrector != "none"  # those of hypotheses; `one` has one of each
    words = 4 * (num_tokens - num_samples) * model.hidden_size**2 if has_words else 0.0
    return 3 * (blocks - saved + head + words)
