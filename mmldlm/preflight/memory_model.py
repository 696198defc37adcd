"""Elements of the model, bytes a rank needs under every engine, bytes of a checkpoint: arithmetic alone, no torch.

The engines' share follows arXiv 1910.02054 and the engines' own code. The counts of the model restate mmldlm/models
and mmldlm/tasks/translation/freezing.py, so that level 0 needs no second import of seconds; a test holds
them against the model itself on the meta device, parameters to the element.
"""

from __future__ import annotations

from collections.abc import Collection

from mmldlm.config.schema import Config
from mmldlm.models.mmdit.config import ModelConfig

GIB = 1 << 30
# A rank's interpreter with torch loaded (measured: 0.35 GiB resident on CPU); on a GPU, its context and NCCL's buffers.
BASE_CPU, BASE_GPU = int(0.4 * GIB), int(1.2 * GIB)
PLANS = ("single", "zero0", "zero1", "zero2", "zero3", "fsdp")  # from most to least memory a rank
_FREQUENCIES = 256  # models/layers.py: sinusoids of a timestep
# Of models/linear_cross_entropy.py; elements on a CPU, on a GPU.
_CHUNK_ELEMENTS, _CHUNK_ROWS, _SHARE_ROWS, _ROW_ALIGNMENT = (8 << 20, 64 << 20), 64, 64, 64
_TEXT, _LATENT = ("text_encoder", "text_head", "length_head"), ("latent_encoder", "latent_head")
_FROZEN = {"l2t": _LATENT, "t2l": _TEXT}  # under training.freeze=mode
_UNREAD = {"l2t": ("latent_head",), "t2l": ("text_head", "length_head")}  # no loss of the mode reads them


def parameter_counts(model: ModelConfig) -> dict[str, int]:
    """Parameters of each module of MultimodalMMDiT; tied embeddings count once, as the token embedding.

    Args:
        model: with latent_dim and vocab_size set.
    """
    width, cond, vocab, dim = model.hidden_size, model.cond_dim, model.vocab_size, model.latent_dim
    chunks = model.latent_tokens * width
    two_layers = cond * cond + cond  # the second layer of every small MLP
    return {
        "text_encoder": vocab * width + width,
        "latent_encoder": dim * chunks + 3 * chunks + model.max_latents * width + dim * cond + cond + two_layers + cond,
        "text_timestep": _FREQUENCIES * cond + cond + two_layers,
        "latent_timestep": _FREQUENCIES * cond + cond + two_layers,
        "blocks": model.n_blocks * block_elements(model),
        "text_head": 2 * width * (cond + 1) + vocab + (0 if model.tie_embeddings else vocab * width),
        "latent_head": 2 * width * (cond + 1) + chunks * dim + dim,
        "length_head": two_layers + (cond + 1) * model.max_seq_len,
    }


def block_elements(model: ModelConfig) -> int:
    """Parameters of one MMDiTBlock: two streams."""
    width, mlp = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    norms = 2 * (width // model.n_heads) if model.qk_rmsnorm else 0
    return 2 * (6 * width * (model.cond_dim + 1) + 4 * width * width + norms + 2 * width * mlp)


def model_sizes(config: Config, length: int) -> dict[str, int]:
    """Elements of trainable and frozen parameters, of the largest part that ZeRO-3 gathers, and of buffers; bytes that
    one micro-batch of texts of `length` tokens keeps for backward ("activations"), and of logits at once."""
    model, training = config.model, config.training
    modules = parameter_counts(model)
    frozen = set(_UNREAD.get(training.loss_type, ()))
    if training.freeze == "mode":
        frozen |= set(_FROZEN.get(training.loss_type, ()))
    num_frozen = sum(modules[name] for name in frozen)
    tied = model.vocab_size * model.hidden_size if model.tie_embeddings else 0
    gathered = (block_elements(model), modules["text_encoder"], modules["text_head"] + tied, modules["latent_encoder"])
    return {
        "trainable": sum(modules.values()) - num_frozen,
        "frozen": num_frozen,
        "largest_block": max(gathered),
        "buffers": 2 * model.latent_dim,
        "activations": activation_bytes(config, length),
        "logits_cpu": logits_bytes(config, length, False),
        "logits_gpu": logits_bytes(config, length, True),
    }


def activation_bytes(config: Config, length: int) -> int:
    """Bytes that autograd keeps for one micro-batch, attention's weights among them (a fused kernel does without).

    Counted from mmldlm/models/mmdit/fused_block.py, which keeps products of matrices only. With gradient
    checkpointing: every block's inputs, and the whole of the one block that is being computed again.
    """
    model, batch = config.model, config.training.train_batch_size
    size = 4 if config.training.dtype == "fp32" else 2
    width, mlp, heads = model.hidden_size, int(model.hidden_size * model.mlp_ratio), model.n_heads
    tokens = length + model.max_latents * model.latent_tokens
    # A row in a block: itself, queries, keys and values, what attention mixed, both branches, the MLP's hidden layer;
    # queries and keys before the weights of their norms. In low precision unfused attention copies 3 H.
    token = size * ((7 + (2 if model.qk_rmsnorm else 0) + (0 if size == 4 else 3)) * width + mlp)
    token += 4 * heads * (tokens + (2 if model.qk_rmsnorm else 0))
    block = batch * (tokens * token + size * 12 * width)
    inputs = batch * tokens * width * size
    if model.gradient_checkpointing:
        blocks = model.n_blocks * inputs + block
    else:  # in the last one, both branches and the MLP of the scored half alone
        blocks = model.n_blocks * block - batch * length / 2 * size * (2 * width + mlp)
    head = 2.5 * length * width + 8 * width  # rows of the scored half, their norm and modulation
    outside = batch * size * (head + 12 * model.cond_dim + 2 * _FREQUENCIES + model.max_latents * model.latent_dim)
    return int(blocks + outside)


def logits_bytes(config: Config, length: int, on_gpu: bool) -> int:
    """Most bytes of logits that exist at once when half of the text is scored (models/linear_cross_entropy.py)."""
    model, low = config.model, 4 if config.training.dtype == "fp32" else 2
    wide = -(-model.vocab_size // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    elements = _CHUNK_ELEMENTS[on_gpu] * (1 if on_gpu or low == 4 else 2)
    scored = max(config.training.train_batch_size * length // 2, 1)
    rows = min(max(elements // wide, _CHUNK_ROWS), scored)
    shares = 0 if low == 4 else 4 * (rows if on_gpu else min(rows, _SHARE_ROWS))
    return wide * (rows * low + shares)


def state_bytes(plan: str, sizes: dict, world_size: int, dtype: str, bucket: int, offload: Collection[str] = ()) -> int:
    """Bytes of weights, gradients, fp32 masters, AdamW's moments and communication buckets on one rank, at the peak.

    Args:
        plan: one of PLANS. sizes: of model_sizes (elements). dtype: training.dtype.
        bucket: elements of a communication bucket of DeepSpeed (engines/deepspeed_config.py); DDP and FSDP have none.
        offload: "optimizer", "param": what does not stay in this memory (see host_bytes).
    """
    trainable, weights = sizes["trainable"], sizes["trainable"] + sizes["frozen"]
    share = trainable / world_size
    low = 4 if dtype == "fp32" else 2
    buckets = min(bucket, trainable) * 4 * 2  # two with overlap_comm
    if plan in ("single", "zero0"):  # fp32 weights under autocast
        return 4 * weights + 4 * trainable + 8 * trainable + (buckets // 2 if plan == "zero0" else 0)
    # fp32 gradients, masters and two moments; gradients on their way to the host are in the low precision
    gradients, states = (low * share, 0) if "optimizer" in offload else (4 * share, 12 * share)
    if plan == "zero1":  # gradients are kept whole, in the low precision and accumulated in fp32
        return int(low * weights + (4 + (low if low == 2 else 0)) * trainable + states + buckets)
    if plan == "zero2":
        return int(low * weights + gradients + states + buckets)
    gathered = 2 * sizes["largest_block"] * low  # the block in use and the one being fetched
    if plan == "zero3":
        kept = 0 if "param" in offload else low * weights / world_size
        return int(kept + gradients + states + gathered + buckets)
    assert plan == "fsdp", plan
    return int(4 * weights / world_size + 4 * share + 8 * share + gathered)


def host_bytes(sizes: dict, world_size: int, dtype: str, offload: Collection[str]) -> int:
    """Bytes of the host's memory that one GPU rank's process takes, with what it offloads there."""
    low, weights = 4 if dtype == "fp32" else 2, sizes["trainable"] + sizes["frozen"]
    optimizer = 16 * sizes["trainable"] / world_size if "optimizer" in offload else 0
    return int(optimizer + (low * weights / world_size if "param" in offload else 0)) + BASE_CPU


def bytes_per_rank(
    plan: str, sizes: dict, world_size: int, dtype: str, on_gpu: bool, bucket: int, offload: Collection[str] = ()
) -> int:
    """Bytes one rank needs in all: states, activations and logits of a micro-batch, and what any process needs.

    benchmarks/step.py compares the activations and logits with measured peaks.
    """
    base = BASE_GPU if on_gpu else BASE_CPU
    passes = int(sizes["activations"] * 1.1) + sizes["logits_gpu" if on_gpu else "logits_cpu"]
    return state_bytes(plan, sizes, world_size, dtype, bucket, offload) + passes + base


def checkpoint_bytes(plan: str, sizes: dict, dtype: str) -> int:
    """Bytes of one checkpoint of the whole job: weights, fp32 masters where they are beside them, two moments."""
    weights, trainable = sizes["trainable"] + sizes["frozen"], sizes["trainable"]
    low = 4 if dtype == "fp32" else 2
    if plan in ("single", "zero0", "fsdp"):
        return 4 * weights + 8 * trainable
    return low * weights + 12 * trainable
