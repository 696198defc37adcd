"""One MMDiT block: streams with their own weights, one joint bidirectional attention (SD3, arXiv
2403.03206).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.models.dropout import ATTENTION, MLP, RowDropout
from mmldlm.models.layers import Modulation, QKNorm, StreamLinear, has_no_hooks, modulate
from mmldlm.models.mmdit.fused_block import (
    NORM_EPS,
    BlockWeights,
    FusedBlock,
    modulation_of_rows,
    select_rows,
)
from mmldlm.models.mmdit.packing import QK_EPS, Packing, attend

KINDS = ("shift", "scale", "gate")


class MMDiTBlock(nn.Module):
    """Joint attention over [text | latent] and one MLP per stream, all under adaLN-Zero (DiT,
    arXiv 2212.09748).

    Linear layers have no biases: adaLN's shift of their inputs does the same per sample, and large
    models train more stably without them (PaLM, arXiv 2204.02311).

    Args:
        hidden_size: width H.
        n_heads: number of attention heads.
        cond_dim: width of the conditioning vector.
        mlp_ratio: MLP width over H.
        qk_rmsnorm: RMS-normalize queries and keys in every head.
        num_streams: number of streams.
    """

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        cond_dim: int,
        mlp_ratio: float,
        qk_rmsnorm: bool,
        num_streams: int = 2,
    ):
        super().__init__()
        self.n_heads = n_heads
        mlp_width = int(hidden_size * mlp_ratio)
        self.modulation = Modulation(cond_dim, hidden_size, 2 * KINDS, groups=num_streams)
        self.to_qkv = StreamLinear(hidden_size, 3 * hidden_size, num_streams)
        self.qk_norm = QKNorm(hidden_size // n_heads, QK_EPS, num_streams) if qk_rmsnorm else None
        self.to_out = StreamLinear(hidden_size, hidden_size, num_streams)
        self.mlp_in = StreamLinear(hidden_size, mlp_width, num_streams)
        self.mlp_out = StreamLinear(mlp_width, hidden_size, num_streams)

    def forward(
        self,
        rows: Tensor,
        condition: Tensor,
        packing: Packing,
        recompute: bool = False,
        output_packing: Packing | None = None,
        dropout: RowDropout | None = None,
    ) -> Tensor:
        """Run the block.

        Args:
            rows: real text tokens, then latent tokens (packing.py). [R, H]
            condition: SiLU'd conditioning vector. [B, C]
            packing: layout of the rows.
            recompute: save only the inputs for the backward pass (where `runs_fused`).
            output_packing: the Q rows whose outputs are used (`Packing.restrict_to`), for the last
                block: after attention, only these are computed. None: all.
            dropout: of the outputs of attention and MLP in this layer, for all rows. None: none.

        Returns:
            The rows after the block, [R, H]; with output_packing [Q, H].
        """
        output_packing = packing if output_packing is None else output_packing
        if dropout is not None:
            dropout = dropout.select(output_packing.kept_rows)
        if not self.runs_fused():
            return self._forward_reference(rows, condition, packing, output_packing, dropout)
        weights = BlockWeights(
            self.modulation.weight, self.modulation.bias, self.to_qkv.weight,
            None if self.qk_norm is None else self.qk_norm.weight,
            self.to_out.weight, self.mlp_in.weight, self.mlp_out.weight,
        )  # fmt: skip
        needs_grad = torch.is_grad_enabled()  # inside a Function grad mode is always off
        return FusedBlock.apply(
            rows,
            condition,
            packing,
            output_packing,
            self.n_heads,
            dropout,
            recompute,
            needs_grad,
            *weights,
        )

    def runs_fused(self) -> bool:
        """Whether the block computes as one operation.

        Not under torch.compile, which fuses and chooses what to save; and a hooked or replaced
        layer must really be called.
        """
        layers = self._modules.values()
        kinds = (Modulation, StreamLinear, QKNorm)
        return not torch.compiler.is_compiling() and all(
            layer is None or has_no_hooks(layer, *kinds) for layer in layers
        )

    def _forward_reference(
        self,
        rows: Tensor,
        condition: Tensor,
        packing: Packing,
        output_packing: Packing,
        dropout: RowDropout | None,
    ) -> Tensor:
        """The same computation with one call per layer, under autograd."""
        ends, width = packing.stream_ends, rows.shape[1]
        table = self.modulation(condition).unflatten(1, (len(ends), -1)).flatten(0, 1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation_of_rows(
            table, packing, output_packing
        )
        hidden = modulate(F.layer_norm(rows, (width,), eps=NORM_EPS), shift, scale)
        qkv = self.to_qkv(hidden, ends).view(len(rows), 3, self.n_heads, -1)
        queries_keys, values = qkv[:, :2], qkv[:, 2:]
        if self.qk_norm is not None:
            queries_keys = self.qk_norm(queries_keys, ends)
        num_turned = packing.rotation.shape[0]
        cos, sin = packing.rotation[:, 0, None, None].to(queries_keys.dtype).unbind(-1)
        even, odd = queries_keys[:num_turned].unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
        joint = torch.cat([torch.cat([rotated, queries_keys[num_turned:]]), values], dim=1)
        mixed = attend(joint.index_select(0, packing.order), packing).index_select(
            0, output_packing.inverse_order
        )
        ends = output_packing.stream_ends
        attended = self.to_out(mixed, ends)
        attended = attended if dropout is None else dropout.drop(attended, ATTENTION)
        rows = torch.addcmul(select_rows(rows, output_packing), gate, attended)
        hidden = modulate(F.layer_norm(rows, (width,), eps=NORM_EPS), mlp_shift, mlp_scale)
        outer = self.mlp_out(F.gelu(self.mlp_in(hidden, ends)), ends)
        outer = outer if dropout is None else dropout.drop(outer, MLP)
        return torch.addcmul(rows, mlp_gate, outer)

    @staticmethod
    def split_streams(
        output: Tensor, rows: Tensor, condition: Tensor, packing: Packing, recompute: bool = False,
        output_packing: Packing | None = None, dropout: RowDropout | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The result of forward(...) of these arguments, as text rows and latent rows."""
        ends = (packing if output_packing is None else output_packing).stream_ends
        return output.tensor_split(ends[:-1])
