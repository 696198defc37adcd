"""Small parts of the MMDiT: timestep embedding, rotary positions, modulation."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

# t in [0, 1] is stretched before the sinusoids: unscaled, t=0 and t=0.01 are 0.027 apart and nearly all of the 256
# dimensions are constant (facts: earlier-system 7.A.5).
TIMESTEP_SCALE = 1000.0


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of matrix products with this tensor: autocast's where it is on, else the tensor's."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def without_autocast(tensor: Tensor):
    """A context for code that casts by itself (the meta device has no autocast)."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def has_no_hooks(layer: nn.Module, *kinds: type) -> bool:
    """Whether a layer is just one of these classes: then what it computes may be computed in its place.

    Nobody hooks it (or all modules), and nobody replaced its forward.
    """
    return (
        type(layer) in kinds
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
        and not _has_any_global_hook()
    )


_FAKE = torch._C._TorchDispatchModeKey.FAKE
_caches: dict = {}


def cache_tensors(make):
    """A function of hashable arguments that makes tensors: what it gave for the last four arguments is given again.

    Not where tensors are fake or made under inference mode, for those are of no use elsewhere.
    """
    if torch.is_inference_mode_enabled() or torch._C._get_dispatch_mode(_FAKE) is not None:
        return make
    if make not in _caches:
        _caches[make] = lru_cache(maxsize=4)(make)
    return _caches[make]


class StreamLinear(nn.Module):
    """Two linear layers without bias, one for text rows, one for latent rows, their weights in one parameter.

    One parameter, so that a grouped product takes both; two-dimensional, so that FSDP cuts it into even shares.

    Args:
        inputs, outputs: widths I, O of a row before and after.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * outputs, inputs))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Xavier's bounds (Glorot and Bengio, 2010) of each of the two."""
        for half in self.weight.chunk(2):
            nn.init.xavier_uniform_(half)

    def forward(self, rows: Tensor, num_text: int) -> Tensor:
        """[R, I], the first num_text of text -> [R, O]."""
        text, latent = self.weight.chunk(2)
        return torch.cat([F.linear(rows[:num_text], text), F.linear(rows[num_text:], latent)])


class QKNorm(nn.Module):
    """RMS norms of the queries and the keys of both streams (arXiv 2010.04245, 2302.05442).

    Args:
        head_dim: width of a query. eps: added to the mean square.
    """

    def __init__(self, head_dim: int, eps: float):
        super().__init__()
        self.head_dim, self.eps = head_dim, eps
        self.weight = nn.Parameter(torch.ones(2 * 2 * head_dim))  # of text's queries, its keys, of latents'

    def forward(self, rows: Tensor, num_text: int) -> Tensor:
        """Queries and keys [R, 2, heads, head_dim], the first num_text of text -> the same, in rows' dtype."""
        weight = self.weight.to(rows.dtype).view(2, 2, 1, -1)
        normal = F.rms_norm(rows, (self.head_dim,), None, self.eps)
        return torch.cat([normal[:num_text] * weight[0], normal[num_text:] * weight[1]])


class Modulation(nn.Linear):
    """adaLN: condition [B, C] -> [B, groups x kinds x H]; starts as no change whatever the condition.

    Args:
        cond_dim: C. hidden_size: H. kinds: what is put out, in order, of shift (starts at 0), scale (1), gate (0).
        groups: how often.
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


def _frequencies(count: int, max_period: float, device: torch.device) -> Tensor:
    """[count] angles of t = 1, falling from TIMESTEP_SCALE by the factor max_period."""
    step = -math.log(max_period) / count
    return TIMESTEP_SCALE * torch.exp(step * torch.arange(count, dtype=torch.float32, device=device))


class TimestepEmbedding(nn.Module):
    """Sinusoids of 1000 t, then a two-layer MLP (DiT, arXiv 2212.09748).

    Args:
        cond_dim: width of the result.
        frequency_dim: number of sinusoids (even).
        max_period: longest period in units of 1000 t.
    """

    def __init__(self, cond_dim: int, frequency_dim: int = 256, max_period: float = 1e4):
        super().__init__()
        self.frequency_dim, self.max_period = frequency_dim, max_period
        self.mlp = nn.Sequential(nn.Linear(frequency_dim, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim))

    def sinusoids(self, t: Tensor) -> Tensor:
        """[B] timesteps in [0, 1] -> [B, frequency_dim] in fp32 (bf16 holds only half of 1000 distinct t)."""
        angles = t.float()[:, None] * cache_tensors(_frequencies)(self.frequency_dim // 2, self.max_period, t.device)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def forward(self, t: Tensor) -> Tensor:
        """[B] timesteps in [0, 1] -> [B, cond_dim] in the MLP's dtype."""
        return self.mlp(self.sinusoids(t).to(self.mlp[0].weight.dtype))


def rotary_table(length: int, head_dim: int, device, theta: float = 1e4) -> Tensor:
    """cos and sin of RoPE (arXiv 2104.09864), [length, head_dim / 2, 2] in fp32; dimensions 2 d and 2 d + 1 turn
    together.

    Not kept as a buffer: engines that cast a module to bf16 would cast it too.
    """
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inverse
    return torch.stack([angles.cos(), angles.sin()], -1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x [..., H] * scale + shift; both [..., H], of x's shape or broadcast to it."""
    return torch.addcmul(shift, x, scale)
