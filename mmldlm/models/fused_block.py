"""A complete MMDiT block as one autograd Function. It saves 7 to 21 % of a training step on CPUs
and three fifths of the activations (13 H values per row are kept, by the layers one by one 33 H),
and results are those of `MMDiTBlock.forward`.

Most of what autograd would save of a block (norms, modulated rows, GELU's output, rotated queries)
is cheap to recompute, so only results of matrix products are saved. The rows of all streams are in
one tensor (packing.py), so every elementwise operation runs once, and the product with the
streams' weights is one grouped product on a CPU.

Rows keep their dtype (fp32 under autocast); matrix products run in `product_dtype`. Tests compare
values and gradients with the block layer by layer and with plain padded PyTorch
(tests/models/reference_mmdit.py), in fp64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from mmldlm.models.dropout import ATTENTION, MLP, RowDropout
from mmldlm.models.layers import NORM_EPS, stream_slices, without_autocast
from mmldlm.models.packing import (
    Packing,
    attend,
    attention_dtype,
    modulation_of_rows,
    select_rows,
)

aten = torch.ops.aten


class BlockWeights(NamedTuple):
    """Parameters of a block of width H under a condition of width C, with T streams; stream by
    stream in each.

    Attributes:
        modulation: Shift, scale and gate of attention, then of the MLP. [T * 6 H, C]
        modulation_bias: Bias of the modulation. [T * 6 H]
        qkv: [T * 3 H, H].
        qk_norm: Scales of queries, then of keys; None without QK-RMSNorm. [T * 2 * head_dim]
        out: [T * H, H].
        mlp_in: [T * M, H]; M is the MLP's width.
        mlp_out: [T * H, M].
    """

    modulation: Tensor
    modulation_bias: Tensor
    qkv: Tensor
    qk_norm: Tensor | None
    out: Tensor
    mlp_in: Tensor
    mlp_out: Tensor


class BlockCall(NamedTuple):
    """What a block is given beside the tensors that get gradients.

    Attributes:
        packing: Layout of the R rows.
        output_packing: Layout of the Q rows whose outputs are used (`Packing.restrict_to`), or
            `packing` itself: then Q = R.
        heads: Number of attention heads.
        dropout: Dropout of the Q rows, whose masks are computed again in the backward pass.
        low: Dtype of matrix products.
    """

    packing: Packing
    output_packing: Packing
    heads: int
    dropout: RowDropout | None
    low: torch.dtype


class SavedTensors(NamedTuple):
    """What the backward pass needs of a block's forward pass, in addition to its inputs.

    Attributes:
        table: Modulation of each sample's streams. [T * B, 6 H]
        unit: Queries and keys of length 1; None without QK-RMSNorm. [R, 2, heads, head_dim]
        length: Lengths that they were divided by. [R, 2, heads, 1]
        joint: Attention's input, the start of a graph of its own. [P, 3, heads, head_dim]
        mixed: Attention's output, the end of that graph. [P, H]
        attended: Result of `out`, after dropout, for the Q rows whose outputs are used. [Q, H]
        inner: Result of `mlp_in`. [Q, M]
        outer: Result of `mlp_out`, after dropout. [Q, H]
    """

    table: Tensor
    unit: Tensor | None
    length: Tensor | None
    joint: Tensor
    mixed: Tensor
    attended: Tensor
    inner: Tensor
    outer: Tensor


# -- products with one weight per stream ----------------------------------------------------------


def _is_grouped(packing: Packing, x: Tensor, weight: Tensor) -> bool:
    """Whether grouped_mm takes this product: rows of both must start at multiples of 16 bytes."""
    if packing.group_offsets is None or x.dtype == torch.float64:
        return False
    sizes = (x.shape[1], weight.shape[0] // len(packing.stream_ends), weight.shape[1])
    return not any(size * x.element_size() % 16 for size in sizes)


def _stream_matmul(x: Tensor, weight: Tensor, packing: Packing) -> Tensor:
    """x [R, I] @ weight [T x O, I].T of each row's stream: [R, O]."""
    weights = weight.view(len(packing.stream_ends), -1, weight.shape[1])
    return _matmul(x, weights.transpose(1, 2), packing, _is_grouped(packing, x, weight))


def _stream_matmul_transposed(
    grad: Tensor, weight: Tensor, packing: Packing, out: Tensor | None = None
) -> Tensor:
    """grad [R, O] @ weight [T x O, I] of each row's stream: [R, I].

    With out (in any dtype), written there.
    """
    weights = weight.view(len(packing.stream_ends), -1, weight.shape[1])
    is_grouped = _is_grouped(packing, grad, weight)
    if out is not None and out.dtype != grad.dtype:
        return out.copy_(_matmul(grad, weights, packing, is_grouped))
    return _matmul(grad, weights, packing, is_grouped, out)


def _matmul(
    x: Tensor, weights: Tensor, packing: Packing, is_grouped: bool, out: Tensor | None = None
) -> Tensor:
    if out is None and is_grouped:
        return F.grouped_mm(x, weights, offs=packing.group_offsets)
    if out is None:
        out = x.new_empty(x.shape[0], weights.shape[2])
    for rows, weight in zip(stream_slices(packing.stream_ends), weights):
        torch.mm(x[rows], weight, out=out[rows])
    return out


def _weight_grad(grad: Tensor, x: Tensor, weight: Tensor, packing: Packing) -> Tensor:
    """Gradient [T x O, I], in the weight's dtype, of a weight that took x [R, I] to outputs of
    gradient [R, O].
    """
    if _is_grouped(packing, x, weight):
        result = F.grouped_mm(grad.t(), x, offs=packing.group_offsets)
        return result.view(weight.shape).to(weight.dtype)
    result = grad.new_empty(len(packing.stream_ends), grad.shape[1], x.shape[1])
    for rows, part in zip(stream_slices(packing.stream_ends), result):
        torch.mm(grad[rows].t(), x[rows], out=part)
    return result.view(weight.shape).to(weight.dtype)


# -- small parts ----------------------------------------------------------------------------------


def _norm(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm without weights: normalized rows, mean, reciprocal deviation."""
    return aten.native_layer_norm(x, [x.shape[-1]], None, None, NORM_EPS)


def _norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return aten.native_layer_norm_backward(
        grad, x, [x.shape[-1]], mean, rstd, None, None, [True, False, False]
    )[0]


def _rotate(rows: Tensor, packing: Packing, inverse: bool = False) -> None:
    """RoPE on rows [R, 2, heads, head_dim], in place: neighboring dimensions turn together as
    complex numbers.
    """
    turn = torch.view_as_complex(packing.rotation[:, int(inverse)])[:, None, None]
    torch.view_as_complex(rows[: len(turn)].unflatten(-1, (-1, 2))).mul_(turn)


def _scale_streams(rows: Tensor, weights: Tensor, packing: Packing, out: Tensor) -> None:
    """out = rows [R, 2, heads, head_dim] times the norm weights [T, 2, 1, head_dim] of each row's
    stream.
    """
    for part, weight in zip(stream_slices(packing.stream_ends), weights):
        torch.mul(rows[part], weight, out=out[part])


# -- the block ------------------------------------------------------------------------------------


def _forward(
    x: Tensor, condition: Tensor, call: BlockCall, weights: BlockWeights, saves: bool
) -> tuple[Tensor, SavedTensors]:
    packing, output_packing, heads, dropout, low = call
    num_rows, width = x.shape
    bias = weights.modulation_bias.to(low)
    table = (
        torch.addmm(bias, condition.to(low), weights.modulation.to(low).t())
        .to(x.dtype)
        .view(-1, 6 * width)
    )
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation_of_rows(
        table, packing, output_packing
    )

    qkv = _stream_matmul(
        torch.addcmul(shift, _norm(x)[0], scale).to(low), weights.qkv.to(low), packing
    )
    qkv = qkv.to(attention_dtype(low, x.device))
    queries_keys = qkv[:, : 2 * width].view(num_rows, 2, heads, -1)
    exact = packing.eps.dtype
    unit = length = softmax_scale = None
    rotated = queries_keys if qkv.dtype == exact else torch.empty_like(queries_keys, dtype=exact)
    if weights.qk_norm is not None:
        # Unit-norm here, unit-RMS in the model; the softmax scale compensates.
        softmax_scale = (width // heads) ** 0.5
        length = torch.linalg.vector_norm(queries_keys, dim=-1, keepdim=True, dtype=exact).hypot(
            packing.eps
        )
        unit = queries_keys / length
        norm_weights = weights.qk_norm.to(exact).view(len(packing.stream_ends), 2, 1, -1)
        _scale_streams(unit, norm_weights, packing, out=rotated)
        unit = unit.to(low)
    elif rotated is not queries_keys:
        rotated.copy_(queries_keys)
    _rotate(rotated, packing)
    if rotated is not queries_keys:
        queries_keys.copy_(rotated)

    joint = qkv.index_select(0, packing.order).view(-1, 3, heads, width // heads)
    # Inside a Function nothing else records a graph.
    with torch.set_grad_enabled(saves):
        mixed = attend(joint.requires_grad_(saves), packing, softmax_scale)

    rows = mixed.detach().to(low).index_select(0, output_packing.inverse_order)
    attended = _stream_matmul(rows, weights.out.to(low), output_packing)
    if dropout is not None:
        attended = dropout.drop(attended, ATTENTION)
    middle = torch.addcmul(select_rows(x, output_packing), gate, attended.to(x.dtype))
    rows = torch.addcmul(mlp_shift, _norm(middle)[0], mlp_scale).to(low)
    inner = _stream_matmul(rows, weights.mlp_in.to(low), output_packing)
    outer = _stream_matmul(F.gelu(inner), weights.mlp_out.to(low), output_packing)
    if dropout is not None:
        outer = dropout.drop(outer, MLP)
    out = torch.addcmul(middle, mlp_gate, outer.to(x.dtype))
    return out, SavedTensors(table, unit, length, joint, mixed, attended, inner, outer)


class FusedBlock(torch.autograd.Function):
    """x [R, H], condition [B, C] (SiLU'd), `BlockCall`, whether to save for a backward pass,
    `BlockWeights` -> [Q, H].

    Without saving, the inputs alone are kept, and a backward pass begins with the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        condition: Tensor,
        call: BlockCall,
        saves: bool,
        *parameters: Tensor,
    ) -> Tensor:
        weights = BlockWeights(*parameters)
        with without_autocast(x):
            out, saved = _forward(x, condition, call, weights, saves)
        ctx.call, ctx.attention = call, None
        tensors: tuple[Tensor | None, ...] = ()
        if saves:
            ctx.attention = saved.joint, torch.autograd.graph.get_gradient_edge(saved.mixed)
            tensors = (saved.table, saved.unit, saved.length, saved.mixed.detach(), *saved[5:])
        ctx.save_for_backward(x, condition, *weights, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, condition, *stored = ctx.saved_tensors
        num_weights = len(BlockWeights._fields)
        weights, tensors = BlockWeights(*stored[:num_weights]), stored[num_weights:]
        with without_autocast(x):
            if tensors:
                # Its graph is freed with the first pass, as torch frees any.
                if ctx.attention is None:
                    raise RuntimeError(
                        "a block's graph goes backward once: run the forward pass again"
                    )
                (joint, edge), ctx.attention = ctx.attention, None
                saved = SavedTensors._make((*tensors[:3], joint, *tensors[3:]))
            else:
                saved = _forward(x, condition, ctx.call, weights, saves=True)[1]
                edge = torch.autograd.graph.get_gradient_edge(saved.mixed)
            needs = dict(zip(BlockWeights._fields, ctx.needs_input_grad[4:]))
            return _Backward(x, condition, ctx.call, weights, needs, saved).run(grad, edge)


class _Backward:
    """The backward pass of one block, from its output to its inputs; gradients of weights collect
    in `grads`.
    """

    def __init__(
        self,
        x: Tensor,
        condition: Tensor,
        call: BlockCall,
        weights: BlockWeights,
        needs: dict[str, bool],
        saved: SavedTensors,
    ):
        self.x, self.condition = x, condition
        self.packing, self.output_packing, _, self.dropout, self.low = call
        self.weights, self.needs, self.saved = weights, needs, saved
        self.grads: dict[str, Tensor | None] = dict.fromkeys(BlockWeights._fields)
        # Gradients that are summed over the rows of a sample are columns of one tensor: norms of
        # queries and keys, then attention's shift and scale; the other four modulations (which may
        # have fewer rows).
        width = x.shape[1]
        self.has_norm = saved.unit is not None
        widths = ((4 if self.has_norm else 2) * width, 4 * width)
        if self.output_packing is self.packing:
            self.columns = x.new_empty(x.shape[0], sum(widths))
            self.input_columns, self.output_columns = self.columns.split(widths, dim=1)
        else:
            self.input_columns = x.new_empty(x.shape[0], widths[0])
            self.output_columns = x.new_empty(saved.outer.shape[0], widths[1])

    def run(self, grad: Tensor, edge: GradientEdge) -> tuple[Tensor | None, ...]:
        """Gradients of FusedBlock's inputs."""
        modulation = modulation_of_rows(self.saved.table, self.packing, self.output_packing)
        shift, scale, gate, *mlp_modulation = modulation
        d_middle = self._mlp(grad, gate, *mlp_modulation)
        d_joint = self._attention(d_middle, gate, edge)
        d_x = self._queries_keys_values(d_joint, shift, scale, d_middle)
        d_condition = self._modulation()
        return d_x, d_condition, None, None, *self.grads.values()

    def _weight_grad(self, name: str, grad: Tensor, rows: Tensor, packing: Packing) -> None:
        if self.needs[name]:
            self.grads[name] = _weight_grad(grad, rows, getattr(self.weights, name), packing)

    def _mlp(
        self, grad: Tensor, gate: Tensor, mlp_shift: Tensor, mlp_scale: Tensor, mlp_gate: Tensor
    ) -> Tensor:
        """The MLP and its residual branch: the gradient of the rows before it. [Q, H]"""
        saved, packing = self.saved, self.output_packing
        _, d_shift, d_scale, d_gate = self.output_columns.chunk(4, dim=1)
        torch.mul(grad, saved.outer, out=d_gate)
        d_outer = (grad * mlp_gate).to(self.low)
        if self.dropout is not None:
            d_outer = self.dropout.drop(d_outer, MLP)
        self._weight_grad("mlp_out", d_outer, F.gelu(saved.inner), packing)
        d_inner = _stream_matmul_transposed(d_outer, self.weights.mlp_out.to(self.low), packing)
        d_inner = aten.gelu_backward(d_inner, saved.inner)
        middle = torch.addcmul(select_rows(self.x, packing), gate, saved.attended.to(self.x.dtype))
        normal, mean, rstd = _norm(middle)
        self._weight_grad(
            "mlp_in", d_inner, torch.addcmul(mlp_shift, normal, mlp_scale).to(self.low), packing
        )
        _stream_matmul_transposed(d_inner, self.weights.mlp_in.to(self.low), packing, out=d_shift)
        torch.mul(d_shift, normal, out=d_scale)
        return _norm_backward(d_shift * mlp_scale, middle, mean, rstd).add_(grad)

    def _attention(self, d_middle: Tensor, gate: Tensor, edge: GradientEdge) -> Tensor:
        """Attention and its output layer: the gradient of its input. [P, 3, heads, head_dim]"""
        saved, packing, width = self.saved, self.output_packing, self.x.shape[1]
        order = self.packing.order
        torch.mul(d_middle, saved.attended, out=self.output_columns[:, :width])
        d_attended = (d_middle * gate).to(self.low)
        if self.dropout is not None:
            d_attended = self.dropout.drop(d_attended, ATTENTION)
        self._weight_grad(
            "out",
            d_attended,
            saved.mixed.to(self.low).index_select(0, packing.inverse_order),
            packing,
        )
        d_rows = _stream_matmul_transposed(d_attended, self.weights.out.to(self.low), packing)
        if order.shape[0] == d_rows.shape[0] and packing.kept_rows is None:
            d_mixed = d_rows.index_select(0, order)
        else:
            # The outputs of padded positions are not used, so their gradients are 0.
            d_mixed = d_rows.new_zeros(order.shape[0], width)
            # A kept row may be listed twice.
            put = d_mixed.index_copy_ if packing.kept_rows is None else d_mixed.index_add_
            put(0, packing.inverse_order, d_rows)
        return torch.autograd.grad((edge,), (saved.joint,), (d_mixed.to(saved.mixed.dtype),))[0]

    def _queries_keys_values(
        self, d_joint: Tensor, shift: Tensor, scale: Tensor, d_middle: Tensor
    ) -> Tensor:
        """Queries, keys and values, and the first norm: the gradient of the block's input.
        [R, H]
        """
        saved, packing, (num_rows, width) = self.saved, self.packing, self.x.shape
        d_shift, d_scale = self.input_columns[:, -2 * width :].chunk(2, dim=1)
        d_qkv = d_joint.view(-1, 3 * width).index_select(0, packing.inverse_order)
        d_queries_keys = d_qkv[:, : 2 * width].view(num_rows, 2, saved.joint.shape[2], -1)
        d = d_queries_keys.to(packing.eps.dtype)
        _rotate(d, packing, inverse=True)
        if saved.unit is not None and saved.length is not None:
            assert self.weights.qk_norm is not None
            unit = saved.unit.to(d.dtype)
            torch.mul(d, unit, out=self.input_columns[:, : 2 * width].view(d.shape))
            norm_weights = self.weights.qk_norm.to(d.dtype).view(
                len(packing.stream_ends), 2, 1, -1
            )
            _scale_streams(d, norm_weights, packing, out=d)
            along = (d * unit).sum(-1, keepdim=True)
            d.addcmul_(unit, along, value=-1).div_(saved.length)
        if d.dtype != d_queries_keys.dtype:
            d_queries_keys.copy_(d)
        d_qkv = d_qkv.to(self.low)
        normal, mean, rstd = _norm(self.x)
        self._weight_grad("qkv", d_qkv, torch.addcmul(shift, normal, scale).to(self.low), packing)
        _stream_matmul_transposed(d_qkv, self.weights.qkv.to(self.low), packing, out=d_shift)
        torch.mul(d_shift, normal, out=d_scale)
        d_x = _norm_backward(d_shift * scale, self.x, mean, rstd)
        kept_rows = self.output_packing.kept_rows
        return d_x.add_(d_middle) if kept_rows is None else d_x.index_add_(0, kept_rows, d_middle)

    def _modulation(self) -> Tensor:
        """Sums over the rows of each sample: gradients of norms and modulation, and of the
        condition. [B, C]
        """
        weights, packing, width = self.weights, self.packing, self.x.shape[1]
        if self.output_packing is packing:
            sums = packing.sum_by_sample(self.columns)
            d_table = sums[:, -6 * width :].contiguous()
        else:
            sums = packing.sum_by_sample(self.input_columns)
            outputs = self.output_packing.sum_by_sample(self.output_columns)
            d_table = torch.cat([sums[:, -2 * width :], outputs], dim=1)
        d_table = d_table.view(packing.batch, -1)
        self.grads["modulation_bias"] = d_table.sum(0).to(weights.modulation_bias.dtype)
        if weights.qk_norm is not None:
            heads, num_streams = self.saved.joint.shape[2], len(packing.stream_ends)
            d_norm = (
                sums[:, : 2 * width].view(packing.batch, num_streams, 2, heads, -1).sum((0, 3))
            )
            self.grads["qk_norm"] = d_norm.view(-1).to(weights.qk_norm.dtype)
        d_table = d_table.to(self.low)
        if self.needs["modulation"]:
            d_weight = torch.mm(d_table.t(), self.condition.to(self.low))
            self.grads["modulation"] = d_weight.to(weights.modulation.dtype)
        return torch.mm(d_table, weights.modulation.to(self.low)).to(self.condition.dtype)
