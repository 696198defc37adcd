"""A whole block as one autograd Function: few operations, few saved tensors.

What autograd would keep of a block (norms, modulated rows, GELU's output, rotated queries) is cheap to compute again,
so it is: saved are products of matrices only. Both streams' rows stand in one tensor (layout.py), so every
elementwise operation runs once for both, and a product with their two weights is one grouped product on a CPU.

Rows keep the dtype they come in (fp32 under autocast); matrix products run in `compute_dtype`. The plain form of the
same arithmetic stands in tests/models/plain.py, and tests compare values and gradients in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmldlm.models.layers import compute_dtype, without_autocast
from mmldlm.models.mmdit.packing import Packing, attend, attention_dtype

NORM_EPS = 1e-6
aten = torch.ops.aten


class BlockWeights(NamedTuple):
    """Parameters of a block of width H under a condition of width C; text's half first in each.

    modulation [2 x 6 H, C] and its bias [2 x 6 H] (shift, scale, gate of attention, then of the MLP), qkv [2 x 3 H, H],
    qk_norm [2 x 2 x head_dim] (of queries, of keys; None without QK-RMSNorm), out [2 H, H], mlp_in [2 x 4 H, H],
    mlp_out [2 H, 4 H].
    """

    modulation: Tensor
    modulation_bias: Tensor
    qkv: Tensor
    qk_norm: Tensor | None
    out: Tensor
    mlp_in: Tensor
    mlp_out: Tensor


class SavedTensors(NamedTuple):
    """What the backward pass needs of a block's forward pass beside its inputs.

    table [2 B, 6 H]; unit [R, 2, heads, head_dim] queries and keys of length 1, length [R, 2, heads, 1] what they were
    divided by; joint [P, 3, heads, head_dim] and mixed [P, H], attention's ends in a graph of its own; attended [Q, H],
    inner [Q, 4 H], outer [Q, H] results of to_out and the MLP's two layers, for the Q rows that are read.
    """

    table: Tensor
    unit: Tensor | None
    length: Tensor | None
    joint: Tensor
    mixed: Tensor
    attended: Tensor
    inner: Tensor
    outer: Tensor


def _find_grouped_mm():
    """torch's grouped product where it is known to work on a CPU: not in every version that is supported."""
    function = getattr(F, "grouped_mm", None)
    x = torch.arange(12, dtype=torch.float32, device="cpu").view(3, 4)
    halves = torch.arange(32, dtype=torch.float32, device="cpu").view(2, 4, 4)
    try:
        found = function(x, halves, offs=torch.tensor([2, 3], dtype=torch.int32, device="cpu"))
    except (TypeError, RuntimeError, NotImplementedError):
        return None
    return function if torch.equal(found, torch.cat([x[:2] @ halves[0], x[2:] @ halves[1]])) else None


_grouped_mm = _find_grouped_mm()


def _is_grouped(layout: Packing, x: Tensor, weight: Tensor) -> bool:
    """Whether grouped_mm takes this product: rows of both must start at multiples of 16 bytes."""
    if _grouped_mm is None or layout.ends is None or x.dtype == torch.float64:
        return False
    return not any(size * x.element_size() % 16 for size in (x.shape[1], weight.shape[0] // 2, weight.shape[1]))


def _product(x: Tensor, weight: Tensor, layout: Packing) -> Tensor:
    """x [R, I] @ weight [2 x O, I].T of each row's stream: [R, O]."""
    halves = weight.view(2, -1, weight.shape[1])
    return _by_stream(x, halves.transpose(1, 2), layout, _is_grouped(layout, x, weight), None)


def _product_back(grad: Tensor, weight: Tensor, layout: Packing, out: Tensor | None = None) -> Tensor:
    """grad [R, O] @ weight [2 x O, I] of each row's stream: [R, I]. With out (in any dtype), written there."""
    halves = weight.view(2, -1, weight.shape[1])
    return _by_stream(grad, halves, layout, _is_grouped(layout, grad, weight), out)


def _by_stream(x: Tensor, halves: Tensor, layout: Packing, is_grouped: bool, out: Tensor | None) -> Tensor:
    if out is not None and out.dtype != x.dtype:
        return out.copy_(_by_stream(x, halves, layout, is_grouped, None))
    if out is None and is_grouped:
        return _grouped_mm(x, halves, offs=layout.ends)
    if out is None:
        out = x.new_empty(x.shape[0], halves.shape[2])
    n = layout.num_text
    torch.mm(x[:n], halves[0], out=out[:n])
    torch.mm(x[n:], halves[1], out=out[n:])
    return out


def _weight_grad(grad: Tensor, x: Tensor, weight: Tensor, layout: Packing) -> Tensor:
    """Gradient [2 x O, I] of a weight that took x [R, I] to where grad [R, O] stands, in the weight's dtype."""
    if _is_grouped(layout, x, weight):
        found = _grouped_mm(grad.t(), x, offs=layout.ends)
        return found.view(weight.shape).to(weight.dtype)
    found, n = grad.new_empty(2, grad.shape[1], x.shape[1]), layout.num_text
    torch.mm(grad[:n].t(), x[:n], out=found[0])
    torch.mm(grad[n:].t(), x[n:], out=found[1])
    return found.view(weight.shape).to(weight.dtype)


def _norm(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm without weights: normalised rows, mean, reciprocal deviation."""
    return aten.native_layer_norm(x, [x.shape[-1]], None, None, NORM_EPS)


def _norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return aten.native_layer_norm_backward(grad, x, [x.shape[-1]], mean, rstd, None, None, [True, False, False])[0]


def _rotate(rows: Tensor, layout: Packing, back: bool = False) -> None:
    """RoPE on text rows [N, 2, heads, head_dim], in place: neighbouring dimensions turn together as complex numbers."""
    turn = torch.view_as_complex(layout.rotation[:, int(back)])[:, None, None]
    torch.view_as_complex(rows.unflatten(-1, (-1, 2))).mul_(turn)


def _multiply_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    if not a.dtype == b.dtype == out.dtype:
        out.copy_(a * b)
    else:
        torch.mul(a, b, out=out)


def _forward(
    x: Tensor, condition: Tensor, layout: Packing, after: Packing, heads: int, low: torch.dtype, weights: BlockWeights,
    keeps: bool,
) -> tuple[Tensor, SavedTensors]:  # fmt: skip
    n, (num_rows, width) = layout.num_text, x.shape
    bias = weights.modulation_bias.to(low)
    table = torch.addmm(bias, condition.to(low), weights.modulation.to(low).t()).to(x.dtype).view(-1, 6 * width)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation_of_rows(table, layout, after)

    qkv = _product(torch.addcmul(shift, _norm(x)[0], scale).to(low), weights.qkv.to(low), layout)
    qkv = qkv.to(attention_dtype(low, x.device))
    queries_keys = qkv[:, : 2 * width].view(num_rows, 2, heads, -1)
    exact = layout.eps.dtype
    unit = length = softmax_scale = None
    turned = queries_keys if qkv.dtype == exact else torch.empty_like(queries_keys, dtype=exact)
    if weights.qk_norm is not None:
        # Of length 1 here, of mean square 1 in the model: the softmax's scale makes up for it.
        softmax_scale = (width // heads) ** 0.5
        length = torch.linalg.vector_norm(queries_keys, dim=-1, keepdim=True, dtype=exact).hypot(layout.eps)
        unit = queries_keys / length
        learned = weights.qk_norm.to(exact).view(2, 2, 1, -1)
        torch.mul(unit[:n], learned[0], out=turned[:n])
        torch.mul(unit[n:], learned[1], out=turned[n:])
        unit = unit.to(low)
    elif turned is not queries_keys:
        turned.copy_(queries_keys)
    _rotate(turned[:n], layout)
    if turned is not queries_keys:
        queries_keys.copy_(turned)

    joint = qkv.index_select(0, layout.order).view(-1, 3, heads, width // heads)
    with torch.set_grad_enabled(keeps):  # inside a Function nothing records but this
        mixed = attend(joint.requires_grad_(keeps), layout, softmax_scale)

    attended = _product(mixed.detach().to(low).index_select(0, after.back), weights.out.to(low), after)
    middle = torch.addcmul(select_rows(x, after), gate, attended.to(x.dtype))
    rows = torch.addcmul(mlp_shift, _norm(middle)[0], mlp_scale).to(low)
    inner = _product(rows, weights.mlp_in.to(low), after)
    outer = _product(F.gelu(inner), weights.mlp_out.to(low), after)
    out = torch.addcmul(middle, mlp_gate, outer.to(x.dtype))
    return out, SavedTensors(table, unit, length, joint, mixed, attended, inner, outer)


def modulation_of_rows(table: Tensor, layout: Packing, after: Packing) -> tuple[Tensor, ...]:
    """[2 B, 6 H] -> shift, scale of attention [R, H]; its gate, the MLP's shift, scale and gate [Q, H]."""
    if after is layout:
        return table.index_select(0, layout.owner).view(-1, 6, table.shape[1] // 6).unbind(1)
    before, behind = table.tensor_split((table.shape[1] // 3,), 1)
    return *before.index_select(0, layout.owner).chunk(2, 1), *behind.index_select(0, after.owner).chunk(4, 1)


def select_rows(x: Tensor, after: Packing) -> Tensor:
    """[R, H] -> [Q, H]."""
    return x if after.read is None else x.index_select(0, after.read)


class FusedBlock(torch.autograd.Function):
    """x [R, H], condition [B, C] (SiLU'd), layouts before and after, the number of heads, `BlockWeights` -> [Q, H].

    The layout after is that of the Q rows that somebody reads (`Layout.reading`), or the one before: then Q = R.
    With recompute only the inputs are kept, and the backward pass begins with the forward pass.
    """

    @staticmethod
    def forward(
        ctx, x, condition, layout: Packing, after: Packing, heads: int, recompute: bool, needs_grad: bool, *weights
    ):
        keeps, low = needs_grad and not recompute, compute_dtype(weights[2])
        with without_autocast(x):
            out, kept = _forward(x, condition, layout, after, heads, low, BlockWeights(*weights), keeps)
        ctx.layouts, ctx.heads, ctx.low, ctx.attention, tensors = (layout, after), heads, low, None, ()
        if keeps:
            ctx.attention = kept.joint, torch.autograd.graph.get_gradient_edge(kept.mixed)
            tensors = (kept.table, kept.unit, kept.length, kept.mixed.detach(), *kept[5:])
        ctx.save_for_backward(x, condition, *weights, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, condition, *saved = ctx.saved_tensors
        num_weights = len(BlockWeights._fields)
        weights, tensors = BlockWeights(*saved[:num_weights]), saved[num_weights:]
        low = ctx.low
        with without_autocast(x):
            if tensors:
                if ctx.attention is None:  # its graph is freed with the first pass, as torch frees any
                    raise RuntimeError("a block's graph goes backward once: run the forward pass again")
                (joint, edge), ctx.attention = ctx.attention, None
                kept = SavedTensors(*tensors[:3], joint, *tensors[3:])
            else:
                kept = _forward(x, condition, *ctx.layouts, ctx.heads, low, weights, True)[1]
                joint, edge = kept.joint, torch.autograd.graph.get_gradient_edge(kept.mixed)
            needs = dict(zip(BlockWeights._fields, ctx.needs_input_grad[7:]))
            return _backward(grad, x, condition, *ctx.layouts, low, weights, needs, kept, edge)


def _backward(
    grad,
    x,
    condition,
    layout: Packing,
    after: Packing,
    low: torch.dtype,
    weights: BlockWeights,
    needs,
    kept: SavedTensors,
    edge,
):
    """Gradients of FusedBlock's inputs."""
    n, (num_rows, width) = layout.num_text, x.shape
    heads = kept.joint.shape[2]
    found: dict[str, Tensor | None] = dict.fromkeys(BlockWeights._fields)

    def weight_grad(name: str, d: Tensor, rows: Tensor, where: Packing) -> None:
        if needs[name]:
            found[name] = _weight_grad(d, rows, getattr(weights, name), where)

    # What is summed over the rows of a sample stands side by side: norms of queries and keys, attention's shift and
    # scale, then the other four modulations (of another number of rows where not all are read).
    with_norm = kept.unit is not None
    widths = ((4 if with_norm else 2) * width, 4 * width)
    if after is layout:
        columns = x.new_empty(num_rows, sum(widths))
        before, behind = columns.split(widths, dim=1)
    else:
        before, behind = x.new_empty(num_rows, widths[0]), x.new_empty(grad.shape[0], widths[1])
    *d_norms, d_shift, d_scale = before.split((*((2 * width,) if with_norm else ()), width, width), dim=1)
    d_gate, d_mlp_shift, d_mlp_scale, d_mlp_gate = behind.chunk(4, dim=1)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation_of_rows(kept.table, layout, after)

    # The MLP and its residual branch.
    _multiply_out(grad, kept.outer, d_mlp_gate)
    d_outer = (grad * mlp_gate).to(low)
    weight_grad("mlp_out", d_outer, F.gelu(kept.inner), after)
    d_inner = _product_back(d_outer, weights.mlp_out.to(low), after)
    d_inner = aten.gelu_backward(d_inner, kept.inner)
    middle = torch.addcmul(select_rows(x, after), gate, kept.attended.to(x.dtype))
    hat, mean, rstd = _norm(middle)
    weight_grad("mlp_in", d_inner, torch.addcmul(mlp_shift, hat, mlp_scale).to(low), after)
    _product_back(d_inner, weights.mlp_in.to(low), after, out=d_mlp_shift)
    torch.mul(d_mlp_shift, hat, out=d_mlp_scale)
    d_middle = _norm_backward(d_mlp_shift * mlp_scale, middle, mean, rstd).add_(grad)

    # Attention's output.
    _multiply_out(d_middle, kept.attended, d_gate)
    d_attended = (d_middle * gate).to(low)
    weight_grad("out", d_attended, kept.mixed.to(low).index_select(0, after.back), after)
    d_rows = _product_back(d_attended, weights.out.to(low), after)
    if layout.order.shape[0] == d_rows.shape[0] and after.read is None:
        d_mixed = d_rows.index_select(0, layout.order)
    else:  # padded positions are nobody's output
        d_mixed = d_rows.new_zeros(layout.order.shape[0], width)
        put = d_mixed.index_copy_ if after.read is None else d_mixed.index_add_  # a row may be read twice
        put(0, after.back, d_rows)
    (d_joint,) = torch.autograd.grad((edge,), (kept.joint,), (d_mixed.to(kept.mixed.dtype),))

    # Queries, keys and values.
    d_qkv = d_joint.view(-1, 3 * width).index_select(0, layout.back)
    d_queries_keys = d_qkv[:, : 2 * width].view(num_rows, 2, heads, -1)
    d = d_queries_keys.to(layout.eps.dtype)
    _rotate(d[:n], layout, back=True)
    if with_norm:
        unit = kept.unit.to(d.dtype)
        torch.mul(d, unit, out=d_norms[0].view(d.shape))
        learned = weights.qk_norm.to(d.dtype).view(2, 2, 1, -1)
        d[:n].mul_(learned[0])
        d[n:].mul_(learned[1])
        along = (d * unit).sum(-1, keepdim=True)
        d.addcmul_(unit, along, value=-1).div_(kept.length)
    if d.dtype != d_queries_keys.dtype:
        d_queries_keys.copy_(d)
    d_qkv = d_qkv.to(low)
    hat, mean, rstd = _norm(x)
    weight_grad("qkv", d_qkv, torch.addcmul(shift, hat, scale).to(low), layout)
    _product_back(d_qkv, weights.qkv.to(low), layout, out=d_shift)
    torch.mul(d_shift, hat, out=d_scale)
    d_x = _norm_backward(d_shift * scale, x, mean, rstd)
    d_x = d_x.add_(d_middle) if after.read is None else d_x.index_add_(0, after.read, d_middle)

    # Over samples.
    if after is layout:
        sums = layout.sum_by_sample(columns)
        d_table = sums[:, -6 * width :].contiguous()
    else:
        sums = layout.sum_by_sample(before)
        d_table = torch.cat([sums[:, -2 * width :], after.sum_by_sample(behind)], dim=1)
    d_table = d_table.view(layout.batch, -1)
    found["modulation_bias"] = d_table.sum(0).to(weights.modulation_bias.dtype)
    if with_norm:
        d_norm = sums[:, : 2 * width].view(layout.batch, 2, 2, heads, -1).sum((0, 3))
        found["qk_norm"] = d_norm.view(-1).to(weights.qk_norm.dtype)
    d_table = d_table.to(low)
    if needs["modulation"]:
        d_weight = torch.mm(d_table.t(), condition.to(low))
        found["modulation"] = d_weight.to(weights.modulation.dtype)
    d_condition = torch.mm(d_table, weights.modulation.to(low)).to(condition.dtype)
    return d_x, d_condition, None, None, None, None, None, *found.values()
