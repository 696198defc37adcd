"""One MMDiT block: two streams with their own weights, one joint bidirectional attention (SD3, arXiv 2403.03206)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.models.layers import Modulation, QKNorm, StreamLinear, has_no_hooks, modulate
from mmldlm.models.mmdit.fused_block import NORM_EPS, BlockWeights, FusedBlock, modulation_of_rows, select_rows
from mmldlm.models.mmdit.packing import QK_EPS, Packing, attend

KINDS = ("shift", "scale", "gate")


class MMDiTBlock(nn.Module):
    """Joint attention over [text | latent] and an MLP a stream, all under adaLN-Zero (DiT, arXiv 2212.09748).

    Products have no biases: what adaLN adds to their inputs does the same, a sample at a time; leaving them out made
    large models steadier (PaLM, arXiv 2204.02311).

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
        mlp_width = int(hidden_size * mlp_ratio)
        self.modulation = Modulation(cond_dim, hidden_size, 2 * KINDS, groups=2)
        self.to_qkv = StreamLinear(hidden_size, 3 * hidden_size)
        self.qk_norm = QKNorm(hidden_size // n_heads, QK_EPS) if qk_rmsnorm else None
        self.to_out = StreamLinear(hidden_size, hidden_size)
        self.mlp_in = StreamLinear(hidden_size, mlp_width)
        self.mlp_out = StreamLinear(mlp_width, hidden_size)

    def forward(
        self, rows: Tensor, condition: Tensor, layout: Packing, recompute: bool = False, after: Packing | None = None
    ) -> Tensor:
        """One block.

        Args:
            rows: [R, H] real text tokens, then latent tokens (layout.py).
            condition: [B, C] SiLU'd conditioning vector.
            layout: where the rows stand.
            recompute: keep only the inputs for the backward pass (where `runs_fused`).
            after: the Q rows that somebody reads of the last block (`Layout.reading`): behind attention, no others are
                computed. None: all.

        Returns:
            The rows after the block, [R, H]; with after [Q, H], those that are read.
        """
        after = layout if after is None else after
        if not self.runs_fused():
            return self._forward_reference(rows, condition, layout, after)
        weights = BlockWeights(
            self.modulation.weight, self.modulation.bias, self.to_qkv.weight,
            None if self.qk_norm is None else self.qk_norm.weight,
            self.to_out.weight, self.mlp_in.weight, self.mlp_out.weight,
        )  # fmt: skip
        # Inside a Function grad mode is always off, so whether gradients are wanted is asked here.
        return FusedBlock.apply(
            rows, condition, layout, after, self.n_heads, recompute, torch.is_grad_enabled(), *weights
        )

    def runs_fused(self) -> bool:
        """Whether the block computes as one operation.

        Not under torch.compile, which fuses and chooses what to keep; and a layer that somebody hooks or replaces
        must really be called.
        """
        layers = self._modules.values()
        kinds = (Modulation, StreamLinear, QKNorm)
        return not torch.compiler.is_compiling() and all(
            layer is None or has_no_hooks(layer, *kinds) for layer in layers
        )

    def _forward_reference(self, rows: Tensor, condition: Tensor, layout: Packing, after: Packing) -> Tensor:
        """The same with one call a layer, under autograd."""
        n, (num_rows, width) = layout.num_text, rows.shape
        table = self.modulation(condition).unflatten(1, (2, -1)).flatten(0, 1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation_of_rows(table, layout, after)
        hidden = modulate(F.layer_norm(rows, (width,), eps=NORM_EPS), shift, scale)
        qkv = self.to_qkv(hidden, n).view(num_rows, 3, self.n_heads, -1)
        queries_keys, values = qkv[:, :2], qkv[:, 2:]
        if self.qk_norm is not None:
            queries_keys = self.qk_norm(queries_keys, n)
        cos, sin = layout.rotation[:, 0, None, None].to(queries_keys.dtype).unbind(-1)
        even, odd = queries_keys[:n].unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
        joint = torch.cat([torch.cat([turned, queries_keys[n:]]), values], dim=1).index_select(0, layout.order)
        n = after.num_text
        mixed = attend(joint, layout).index_select(0, after.back)
        rows = torch.addcmul(select_rows(rows, after), gate, self.to_out(mixed, n))
        hidden = modulate(F.layer_norm(rows, (width,), eps=NORM_EPS), mlp_shift, mlp_scale)
        inner = F.gelu(self.mlp_in(hidden, n))
        return torch.addcmul(rows, mlp_gate, self.mlp_out(inner, n))

    @staticmethod
    def streams(
        output: Tensor, rows: Tensor, condition: Tensor, layout: Packing, recompute: bool = False,
        after: Packing | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """What forward(...) of these arguments gave, as text rows and latent rows."""
        num_text = (layout if after is None else after).num_text
        return output[:num_text], output[num_text:]
