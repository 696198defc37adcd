"""Small parts of the networks: linear layers per stream, norms, adaLN, timestep and token
embeddings, rotary positions, null conditions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mmldlm.models.flops import FREQUENCIES

# t in [0, 1] is stretched before the sinusoids: unscaled, t = 0 and t = 0.01 are 0.027 apart and
# nearly all of the FREQUENCIES dimensions are constant.
TIMESTEP_SCALE = 1000.0
# Ratio of the longest period to the shortest, of a timestep's sinusoids and of rotary positions.
MAX_PERIOD = 1e4
# Added to the variance of layer norms, and to the mean square of queries and keys.
NORM_EPS = QK_EPS = 1e-6
# Tables that `cache_tensor` keeps of each function.
MAX_CACHED = 8


def random_parameter(*shape: int) -> nn.Parameter:
    """Return a learned token, position or table; normal, of standard deviation 0.02.

    On the meta device it has no values, and none are drawn (`meta_device`).
    """
    values = torch.empty(shape)
    return nn.Parameter(values if values.is_meta else torch.randn(shape) * 0.02)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of matrix products with this tensor: autocast's where it is on, else the
    tensor's.
    """
    device_type = tensor.device.type
    if not tensor.is_meta and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return tensor.dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context for code that casts by itself (the meta device has no autocast)."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def has_no_hooks(layer: nn.Module, *kinds: type) -> bool:
    """Whether a layer is exactly one of these classes, without hooks and with its own forward.

    Then its result may be computed without calling it.
    """
    return (
        type(layer) in kinds
        and "forward" not in vars(layer)
        and not (
            layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
        )
        and not _has_any_global_hook()
    )


def cache_tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator: keep the constant tensors that a function of hashable arguments makes.

    Not a buffer: engines that cast a module to bf16 would cast it too.
    """
    cached: dict[tuple[Any, ...], Tensor] = {}

    @functools.wraps(make)
    def wrapper(*args: Any) -> Tensor:
        if args in cached:
            return cached[args]
        # An inference tensor could not be saved for a backward pass.
        with torch.inference_mode(False):
            tensor = make(*args)
        # A FakeTensor is of no use outside its mode.
        if type(tensor) is Tensor:
            if len(cached) == MAX_CACHED:
                cached.clear()
            cached[args] = tensor
        return tensor

    return wrapper


class StreamLinear(nn.Module):
    """One linear layer without bias per stream (text rows, latent rows), their weights in one
    parameter.

    One parameter, so that a grouped product takes all; two-dimensional, so that FSDP cuts it into
    even shards.

    Args:
        inputs: Width I of a row before.
        outputs: Width O of a row after.
        num_streams: Number of streams.
    """

    def __init__(self, inputs: int, outputs: int, num_streams: int = 2):
        super().__init__()
        self.num_streams = num_streams
        self.weight = nn.Parameter(torch.empty(num_streams * outputs, inputs))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Xavier's bounds (Glorot and Bengio, 2010) for each stream."""
        for weight in self.weight.chunk(self.num_streams):
            nn.init.xavier_uniform_(weight)

    def forward(self, rows: Tensor, stream_ends: tuple[int, ...]) -> Tensor:
        """[R, I], stream by stream, the streams ending at these rows -> [R, O]."""
        weights = self.weight.chunk(self.num_streams)
        return torch.cat(
            [
                F.linear(rows[part], weight)
                for part, weight in zip(stream_slices(stream_ends), weights)
            ]
        )


def stream_slices(stream_ends: tuple[int, ...]) -> list[slice]:
    """The rows of each stream."""
    return [slice(start, end) for start, end in zip((0, *stream_ends), stream_ends)]


class QKNorm(nn.Module):
    """RMS norms of the queries and the keys of every stream (arXiv 2010.04245, 2302.05442).

    Args:
        head_dim: Width of a query.
        eps: Added to the mean square.
        num_streams: Number of streams.
    """

    def __init__(self, head_dim: int, eps: float, num_streams: int = 2):
        super().__init__()
        self.head_dim, self.eps, self.num_streams = head_dim, eps, num_streams
        # Of stream 0's queries, its keys, of stream 1's queries, ...
        self.weight = nn.Parameter(torch.ones(num_streams * 2 * head_dim))

    def forward(self, rows: Tensor, stream_ends: tuple[int, ...]) -> Tensor:
        """Queries and keys [R, 2, heads, head_dim], stream by stream -> the same, in rows'
        dtype.
        """
        weights = self.weight.to(rows.dtype).view(self.num_streams, 2, 1, -1)
        normal = F.rms_norm(rows, (self.head_dim,), None, self.eps)
        return torch.cat(
            [normal[part] * weight for part, weight in zip(stream_slices(stream_ends), weights)]
        )


class Modulation(nn.Linear):
    """adaLN: condition [B, C] -> [B, groups x kinds x H]; starts as the identity for every
    condition.

    Args:
        cond_dim: C.
        hidden_size: H.
        kinds: Outputs in order: "shift" (starts at 0), "scale" (1), "gate" (0).
        groups: Number of repetitions (streams).
    """

    def __init__(self, cond_dim: int, hidden_size: int, kinds: tuple[str, ...], groups: int = 1):
        self.kinds, self.groups = kinds, groups
        super().__init__(cond_dim, groups * len(kinds) * hidden_size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """adaLN-Zero (arXiv 2212.09748): scales of 1, all else 0."""
        nn.init.zeros_(self.weight)
        starts = self.bias.new_tensor([float(kind == "scale") for kind in self.kinds])
        self.bias.view(self.groups, len(self.kinds), -1).copy_(starts[:, None])


@cache_tensor
def _frequencies(device: torch.device) -> Tensor:
    """[FREQUENCIES / 2] angles of t = 1, falling from TIMESTEP_SCALE by the factor MAX_PERIOD."""
    count = FREQUENCIES // 2
    step = -math.log(MAX_PERIOD) / count
    return TIMESTEP_SCALE * torch.exp(
        step * torch.arange(count, dtype=torch.float32, device=device)
    )


class TimestepEmbedding(nn.Module):
    """Sinusoids of 1000 t, then a two-layer MLP (DiT, arXiv 2212.09748).

    Args:
        cond_dim: Width of the result.
    """

    def __init__(self, cond_dim: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(FREQUENCIES, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim)
        )

    def sinusoids(self, t: Tensor) -> Tensor:
        """[B] timesteps in [0, 1] -> [B, FREQUENCIES] in fp32 (bf16 holds only half of 1000
        distinct t).
        """
        angles = t.float()[:, None] * _frequencies(t.device)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def forward(self, t: Tensor) -> Tensor:
        """[B] timesteps in [0, 1] -> [B, cond_dim] in the MLP's dtype."""
        return self.mlp(self.sinusoids(t).to(next(self.mlp.parameters()).dtype))


def rotary_table(length: int, head_dim: int, device: torch.device) -> Tensor:
    """cos and sin of RoPE (arXiv 2104.09864), [length, head_dim / 2, 2] in fp32; dimensions 2 d
    and 2 d + 1 turn together."""
    inverse = MAX_PERIOD ** (
        -torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    )
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inverse
    return torch.stack([angles.cos(), angles.sin()], -1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x [..., H] * scale + shift; both [..., H], of x's shape or broadcast to it."""
    return torch.addcmul(shift, x, scale)


def apply_null_condition(
    x: Tensor, null: Tensor, is_null: Tensor, rows: Tensor | None = None
) -> Tensor:
    """x with the null embedding in place of some samples' values, in the wider dtype of both (with
    `rows` in x's).

    Args:
        x: Values of samples [B, ...]; with `rows` [N, H].
        null: Null embedding, broadcast to the values of a sample.
        is_null: bool, samples without a condition. [B]
        rows: Row of each sample that is replaced; None: all its values are. [B]
    """
    mask = is_null.view(-1, *(1,) * (x.dim() - 1))
    if rows is None:
        return torch.where(mask, null, x)
    return x.index_copy(0, rows, torch.where(mask, null.to(x.dtype), x.index_select(0, rows)))


class _Embedding(torch.autograd.Function):
    """Embedding whose gradient is summed in fp32 on a CPU."""

    @staticmethod
    def forward(ctx, weight, ids):
        ctx.save_for_backward(ids)
        ctx.num_embeddings = len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        table = grad.new_zeros(ctx.num_embeddings, grad.shape[1])
        if grad.dtype in (torch.float32, torch.float64):
            return table.index_add_(0, ids, grad), None
        # Summed in fp32: added one by one in bf16, the many rows of [MASK] would each be rounded.
        unique_ids, inverse = ids.unique(return_inverse=True)
        sums = torch.zeros(len(unique_ids), grad.shape[1], device=grad.device).index_add_(
            0, inverse, grad.float()
        )
        return table.index_copy_(0, unique_ids, sums.to(grad.dtype)), None


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """F.embedding of ids [N]: weight [V, H] -> [N, H]."""
    # Elsewhere the additions of its backward pass would race.
    if weight.device.type != "cpu":
        return F.embedding(ids, weight)
    return _Embedding.apply(weight, ids)


def embed_ids(table: nn.Embedding, ids: Tensor) -> Tensor:
    """Rows [N, H] of a table for ids [N], by `embedding` where the module need not be called."""
    return embedding(table.weight, ids) if has_no_hooks(table, nn.Embedding) else table(ids)
