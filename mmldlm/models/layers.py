"""Small parts of the MMDiT: timestep embedding, rotary positions, modulation."""

from __future__ import annotations

import math
from contextlib import nullcontext

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


def is_bare(layer: nn.Module, *kinds: type) -> bool:
    """Whether a layer is just one of these classes: then what it computes may be computed in its place.

    Nobody hooks it (or all modules), and nobody replaced its forward.
    """
    return (
        type(layer) in kinds
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
        and not _has_any_global_hook()
    )


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm whose weight follows its input's dtype: under autocast torch otherwise leaves the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], in x's dtype."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


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
        half = self.frequency_dim // 2
        step = -math.log(self.max_period) / half
        frequencies = torch.exp(step * torch.arange(half, dtype=torch.float32, device=t.device))
        angles = (TIMESTEP_SCALE * t.float())[:, None] * frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def forward(self, t: Tensor) -> Tensor:
        """[B] timesteps in [0, 1] -> [B, cond_dim] in the MLP's dtype."""
        return self.mlp(self.sinusoids(t).to(self.mlp[0].weight.dtype))


def rotary_table(length: int, head_dim: int, device, theta: float = 1e4) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE (arXiv 2104.09864), each [length, head_dim / 2] in fp32.

    Computed once a forward pass instead of kept as a buffer: engines that cast a module to bf16 would cast it too.
    """
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inverse
    return angles.cos(), angles.sin()


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x [..., H] * (1 + scale) + shift; both [..., H], of x's shape or broadcast to it."""
    return torch.addcmul(shift, x, 1 + scale)
