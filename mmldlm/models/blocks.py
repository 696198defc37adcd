"""One MMDiT block: two streams with their own weights, one joint bidirectional attention (SD3, arXiv 2403.03206)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.models.layers import RMSNorm, apply_rotary, modulate


class Stream(nn.Module):
    """The weights of one modality in one block.

    Args:
        hidden_size: width H.
        n_heads: attention heads.
        cond_dim: width of the conditioning vector.
        mlp_ratio: MLP width over H.
        qk_rmsnorm: RMS-normalise queries and keys in every head.
    """

    def __init__(self, hidden_size: int, n_heads: int, cond_dim: int, mlp_ratio: float, qk_rmsnorm: bool):
        super().__init__()
        self.n_heads = n_heads
        head_dim = hidden_size // n_heads
        mlp_width = int(hidden_size * mlp_ratio)
        self.modulation = nn.Linear(cond_dim, 6 * hidden_size)
        self.norm_attention = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.norm_mlp = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.to_qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.to_out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.query_norm = RMSNorm(head_dim, eps=1e-6) if qk_rmsnorm else None
        self.key_norm = RMSNorm(head_dim, eps=1e-6) if qk_rmsnorm else None
        self.mlp_in = nn.Linear(hidden_size, mlp_width)
        self.mlp_out = nn.Linear(mlp_width, hidden_size)

    def modulations(self, condition: Tensor) -> tuple[Tensor, ...]:
        """SiLU'd conditioning [B, C] -> shift, scale, gate of attention and of the MLP, each [B, 1, H]."""
        return self.modulation(condition)[:, None].chunk(6, dim=-1)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, H] -> three [B, heads, T, head_dim]."""
        batch, length, _ = x.shape
        qkv = self.to_qkv(x).view(batch, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value

    def mlp(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        return self.mlp_out(F.gelu(self.mlp_in(x), approximate="tanh"))


class MMDiTBlock(nn.Module):
    """Joint attention over [text | latent] and an MLP a stream, all under adaLN-Zero (DiT, arXiv 2212.09748)."""

    def __init__(self, hidden_size: int, n_heads: int, cond_dim: int, mlp_ratio: float, qk_rmsnorm: bool):
        super().__init__()
        self.text = Stream(hidden_size, n_heads, cond_dim, mlp_ratio, qk_rmsnorm)
        self.latent = Stream(hidden_size, n_heads, cond_dim, mlp_ratio, qk_rmsnorm)

    def forward(
        self, text: Tensor, latent: Tensor, condition: Tensor, cos: Tensor, sin: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One block.

        Args:
            text: [B, S, H] text stream.
            latent: [B, L, H] latent stream.
            condition: [B, C] SiLU'd conditioning vector.
            cos, sin: [S, head_dim / 2] rotary table of the text positions.
            key_mask: [B, 1, 1, S + L] bool, True where a key may be attended to; None when nothing is padded.

        Returns:
            The two streams, same shapes.
        """
        length = text.shape[1]
        t_shift, t_scale, t_gate, t_mlp_shift, t_mlp_scale, t_mlp_gate = self.text.modulations(condition)
        l_shift, l_scale, l_gate, l_mlp_shift, l_mlp_scale, l_mlp_gate = self.latent.modulations(condition)

        t_query, t_key, t_value = self.text.queries_keys_values(
            modulate(self.text.norm_attention(text), t_shift, t_scale)
        )
        l_query, l_key, l_value = self.latent.queries_keys_values(
            modulate(self.latent.norm_attention(latent), l_shift, l_scale)
        )
        mixed = F.scaled_dot_product_attention(
            torch.cat([apply_rotary(t_query, cos, sin), l_query], dim=2),
            torch.cat([apply_rotary(t_key, cos, sin), l_key], dim=2),
            torch.cat([t_value, l_value], dim=2),
            attn_mask=key_mask,
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        text = torch.addcmul(text, t_gate, self.text.to_out(mixed[:, :length]))
        latent = torch.addcmul(latent, l_gate, self.latent.to_out(mixed[:, length:]))

        text = torch.addcmul(
            text, t_mlp_gate, self.text.mlp(modulate(self.text.norm_mlp(text), t_mlp_shift, t_mlp_scale))
        )
        latent = torch.addcmul(
            latent, l_mlp_gate, self.latent.mlp(modulate(self.latent.norm_mlp(latent), l_mlp_shift, l_mlp_scale))
        )
        return text, latent
