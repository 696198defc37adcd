"""One MMDiT block: two streams with their own weights, one joint bidirectional attention (SD3, arXiv 2403.03206)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.models.fused import NORM_EPS, AfterAttention, BeforeAttention, Modulation
from mmldlm.models.layers import RMSNorm, is_bare, modulate
from mmldlm.models.layout import QK_EPS, Layout, attend


class Stream(nn.Module):
    """The weights of one modality in one block; the block computes with both streams' at once (fused.py).

    Args:
        hidden_size: width H.
        n_heads: attention heads.
        cond_dim: width of the conditioning vector.
        mlp_ratio: MLP width over H.
        qk_rmsnorm: RMS-normalise queries and keys in every head.
    """

    def __init__(self, hidden_size: int, n_heads: int, cond_dim: int, mlp_ratio: float, qk_rmsnorm: bool):
        super().__init__()
        head_dim = hidden_size // n_heads
        mlp_width = int(hidden_size * mlp_ratio)
        self.modulation = nn.Linear(cond_dim, 6 * hidden_size)
        self.to_qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.to_out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.query_norm = RMSNorm(head_dim, eps=QK_EPS) if qk_rmsnorm else None
        self.key_norm = RMSNorm(head_dim, eps=QK_EPS) if qk_rmsnorm else None
        self.mlp_in = nn.Linear(hidden_size, mlp_width)
        self.mlp_out = nn.Linear(mlp_width, hidden_size)

    def qk_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """[head_dim] weights of the query and the key norm; None without qk_rmsnorm."""
        if self.query_norm is None:
            return None, None
        return self.query_norm.weight, self.key_norm.weight


class MMDiTBlock(nn.Module):
    """Joint attention over [text | latent] and an MLP a stream, all under adaLN-Zero (DiT, arXiv 2212.09748)."""

    def __init__(self, hidden_size: int, n_heads: int, cond_dim: int, mlp_ratio: float, qk_rmsnorm: bool):
        super().__init__()
        self.n_heads = n_heads
        self.text = Stream(hidden_size, n_heads, cond_dim, mlp_ratio, qk_rmsnorm)
        self.latent = Stream(hidden_size, n_heads, cond_dim, mlp_ratio, qk_rmsnorm)

    def forward(self, rows: Tensor, condition: Tensor, layout: Layout) -> Tensor:
        """One block.

        Args:
            rows: [R, H] real text tokens, then latent tokens (layout.py).
            condition: [B, C] SiLU'd conditioning vector.
            layout: where the rows stand.

        Returns:
            The rows after the block, [R, H].
        """
        # Under torch.compile the compiler fuses and chooses what to keep. A layer that somebody hooks or
        # replaces must really be called.
        if torch.compiler.is_compiling() or not self._is_bare():
            return self._through_layers(rows, condition, layout)
        return self._fused(rows, condition, layout)

    def _is_bare(self) -> bool:
        """Whether every layer is still nn.Linear or RMSNorm, and nobody hooks it or all modules."""
        layers = [layer for stream in (self.text, self.latent) for layer in stream._modules.values()]
        return all(layer is None or is_bare(layer, nn.Linear, RMSNorm) for layer in layers)

    def _fused(self, rows: Tensor, condition: Tensor, layout: Layout) -> Tensor:
        text, latent = self.text, self.latent
        modulations = [stream.modulation for stream in (text, latent)]
        table = Modulation.apply(condition, layout.unit, *(p for m in modulations for p in (m.weight, m.bias)))
        before, after = table.split((2, 4), dim=1)
        qkv = BeforeAttention.apply(
            rows, before, layout, self.n_heads, text.to_qkv.weight, latent.to_qkv.weight,
            *text.qk_weights(), *latent.qk_weights(),
        )  # fmt: skip
        mixed = attend(qkv, layout)
        return AfterAttention.apply(
            rows, mixed, after, layout,
            text.to_out.weight, latent.to_out.weight, text.mlp_in.weight, latent.mlp_in.weight,
            text.mlp_in.bias, latent.mlp_in.bias, text.mlp_out.weight, latent.mlp_out.weight,
            text.mlp_out.bias, latent.mlp_out.bias,
        )  # fmt: skip

    def _through_layers(self, rows: Tensor, condition: Tensor, layout: Layout) -> Tensor:
        """The same with one call a layer, under autograd."""
        n, width = layout.num_text, rows.shape[-1]
        streams = ((self.text, rows[:n], layout.sample[:n]), (self.latent, rows[n:], layout.sample[n:] - layout.batch))
        modulations, projected = [], []
        for stream, x, sample in streams:
            shift, scale, *rest = stream.modulation(condition).index_select(0, sample).chunk(6, dim=-1)
            modulations.append(rest)
            hidden = modulate(F.layer_norm(x, (width,), eps=NORM_EPS), shift, scale)
            query, key, value = stream.to_qkv(hidden).view(len(x), 3, self.n_heads, -1).unbind(1)
            if stream.query_norm is not None:
                query, key = stream.query_norm(query), stream.key_norm(key)
            projected.append(torch.stack([query, key, value], dim=1))
        joint = torch.cat(projected)
        turned = joint[:, :2]
        turned = turned * layout.cos.to(joint.dtype) + turned.roll(width // self.n_heads // 2, -1) * layout.sin.to(
            joint.dtype
        )
        joint = torch.cat([turned, joint[:, 2:]], dim=1).index_select(0, layout.order)
        mixed = attend(joint, layout).index_select(0, layout.back)
        out = []
        for (stream, x, _), (gate, shift, scale, mlp_gate), given in zip(streams, modulations, (mixed[:n], mixed[n:])):
            x = torch.addcmul(x, gate, stream.to_out(given))
            hidden = modulate(F.layer_norm(x, (width,), eps=NORM_EPS), shift, scale)
            inner = F.gelu(stream.mlp_in(hidden), approximate="tanh")
            out.append(torch.addcmul(x, mlp_gate, stream.mlp_out(inner)))
        return torch.cat(out)

    @staticmethod
    def streams(output: Tensor, rows: Tensor, condition: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """What forward(rows, condition, layout) gave, as text rows and latent rows."""
        return output[: layout.num_text], output[layout.num_text :]
