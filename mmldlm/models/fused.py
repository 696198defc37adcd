"""The two halves of a block around attention as autograd Functions: few operations, few saved tensors.

What autograd would keep of a block (norms, modulated rows, GELU's output, rotated queries) is cheap to compute again,
so it is: saved are products of matrices only. Both streams' rows stand in one tensor (layout.py), so every
elementwise operation runs once for both; only the products with their own weights run twice.

Rows keep the dtype they come in (fp32 under autocast); matrix products run in `compute_dtype`. The plain form of the
same arithmetic stands in tests/models/plain.py, and tests compare values and gradients in fp64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.models.layers import compute_dtype, without_autocast
from mmldlm.models.layout import Layout

NORM_EPS = 1e-6
aten = torch.ops.aten


def _pair(x: Tensor, n: int, text: Tensor, latent: Tensor, biases=(None, None), out: Tensor | None = None) -> Tensor:
    """rows [R, I] times the text weight [I, O] for the first n, the latent weight for the rest: [R, O]."""
    if out is None:
        out = x.new_empty(x.shape[0], text.shape[1])
    for rows, w, bias, place in ((x[:n], text, biases[0], out[:n]), (x[n:], latent, biases[1], out[n:])):
        if bias is None:
            torch.mm(rows, w, out=place)
        else:
            torch.addmm(bias, rows, w, out=place)
    return out


def _weight_grads(ctx, first: int, grad: Tensor, x: Tensor, n: int, like: tuple[Tensor, Tensor]) -> list:
    """Gradients [O, I] of the two weights, in their own dtypes; None where none is wanted."""
    halves = ((grad[:n], x[:n]), (grad[n:], x[n:]))
    return [
        torch.mm(g.t(), rows).to(weight.dtype) if ctx.needs_input_grad[first + i] else None
        for i, ((g, rows), weight) in enumerate(zip(halves, like))
    ]


def _norm(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm without weights: normalised rows, mean, reciprocal deviation."""
    return aten.native_layer_norm(x, [x.shape[-1]], None, None, NORM_EPS)


def _norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return aten.native_layer_norm_backward(grad, x, [x.shape[-1]], mean, rstd, None, None, [True, False, False])[0]


class Modulation(torch.autograd.Function):
    """SiLU'd condition [B, C], the two streams' adaLN layers -> [2 B, 6, H], text samples first; 1 added to scales.

    On 6: shift, scale, gate of attention, then of the MLP.
    """

    @staticmethod
    def forward(ctx, condition, unit, text_weight, text_bias, latent_weight, latent_bias):
        low = compute_dtype(text_weight)
        ctx.save_for_backward(condition, text_weight, latent_weight)
        ctx.low, ctx.bias_dtype = low, text_bias.dtype
        with without_autocast(condition):
            given = condition.to(low)
            table = torch.cat(
                [
                    torch.addmm(bias.to(low), given, weight.to(low).t())
                    for weight, bias in ((text_weight, text_bias), (latent_weight, latent_bias))
                ]
            )
            return table.view(table.shape[0], 6, -1).to(unit.dtype) + unit

    @staticmethod
    def backward(ctx, grad):
        condition, text_weight, latent_weight = ctx.saved_tensors
        batch, low = condition.shape[0], ctx.low
        with without_autocast(grad):
            given = condition.to(low)
            flat = grad.reshape(2 * batch, -1)
            biases = flat.view(2, batch, -1).sum(1).to(ctx.bias_dtype).unbind(0)
            flat = flat.to(low)
            weights = [
                torch.mm(part.t(), given).to(weight.dtype) if ctx.needs_input_grad[2 + 2 * i] else None
                for i, (part, weight) in enumerate(((flat[:batch], text_weight), (flat[batch:], latent_weight)))
            ]
            to_condition = torch.mm(flat[:batch], text_weight.to(low))
            to_condition = torch.addmm(to_condition, flat[batch:], latent_weight.to(low)).to(condition.dtype)
        return to_condition, None, weights[0], biases[0], weights[1], biases[1]


class BeforeAttention(torch.autograd.Function):
    """Norm, modulate, project to queries, keys and values, normalise and rotate them, put them in attention's order.

    x [R, H], modulation [2 B, 2, H] (shift, 1 + scale), weights [3 H, H] of the two streams, and of queries and keys
    [head_dim] x 4 (text query, text key, latent query, latent key; None without QK-RMSNorm) -> [P, 3, heads, head_dim].
    """

    @staticmethod
    def forward(ctx, x, modulation, layout: Layout, heads: int, text_weight, latent_weight, *qk_weights):
        low, n, (num_rows, width) = compute_dtype(text_weight), layout.num_text, x.shape
        with without_autocast(x):
            shift, scale = modulation.index_select(0, layout.sample).unbind(1)
            rows = torch.addcmul(shift, _norm(x)[0], scale).to(low)
            qkv = _pair(rows, n, text_weight.to(low).t(), latent_weight.to(low).t())
            queries_keys = qkv[:, : 2 * width].view(num_rows, 2, heads, -1)
            normal = inverse = both = None
            if qk_weights[0] is not None:
                norm = torch.linalg.vector_norm(queries_keys, dim=-1, keepdim=True, dtype=layout.eps.dtype)
                inverse = torch.addcmul(layout.eps, norm, norm, value=heads / width).rsqrt_()
                normal = (queries_keys * inverse).to(low)
                both = torch.cat(qk_weights).view(2, 2, 1, -1).to(low)
                torch.mul(normal, both.index_select(0, layout.stream), out=queries_keys)
            turned = queries_keys.roll(width // heads // 2, -1)
            queries_keys.mul_(layout.cos.to(low)).addcmul_(turned, layout.sin.to(low))
            ordered = qkv.index_select(0, layout.order)
        ctx.save_for_backward(x, modulation, text_weight, latent_weight, normal, inverse, both)
        ctx.layout, ctx.heads, ctx.low, ctx.with_qk = layout, heads, low, qk_weights[0] is not None
        ctx.qk_dtype = None if qk_weights[0] is None else qk_weights[0].dtype
        return ordered.view(-1, 3, heads, width // heads)

    @staticmethod
    def backward(ctx, grad):
        x, modulation, text_weight, latent_weight, normal, inverse, both = ctx.saved_tensors
        layout, heads, low = ctx.layout, ctx.heads, ctx.low
        n, (num_rows, width) = layout.num_text, x.shape
        with without_autocast(x):
            d_qkv = grad.reshape(-1, 3 * width).index_select(0, layout.back)
            d_qk = d_qkv[:, : 2 * width].view(num_rows, 2, heads, -1)
            turned = d_qk.roll(width // heads // 2, -1)
            d_qk.mul_(layout.cos.to(low)).addcmul_(turned, layout.sin.to(low), value=-1)
            d_scales = [None] * 4
            if ctx.with_qk:
                along = d_qk * normal
                d_scales = [d for part in (along[:n], along[n:]) for d in part.sum((0, 2)).to(ctx.qk_dtype).unbind(0)]
                scales = both.index_select(0, layout.stream)
                along = (along * scales).sum(-1, keepdim=True)
                d_qk.mul_(scales).addcmul_(normal, along, value=-heads / width).mul_(inverse)
            shift, scale = modulation.index_select(0, layout.sample).unbind(1)
            hat, mean, rstd = _norm(x)
            rows = torch.addcmul(shift, hat, scale).to(low)
            d_text, d_latent = _weight_grads(ctx, 4, d_qkv, rows, n, (text_weight, latent_weight))
            d_modulation = x.new_empty(num_rows, 2, width)
            d_rows = _grad_rows(d_qkv, n, text_weight.to(low), latent_weight.to(low), d_modulation[:, 0])
            _mul_into(d_rows, hat, d_modulation[:, 1])
            d_x = _norm_backward(d_rows * scale, x, mean, rstd)
            d_table = layout.sum_by_sample(d_modulation.view(num_rows, -1)).view(modulation.shape)
        return d_x, d_table, None, None, d_text, d_latent, *d_scales


class AfterAttention(torch.autograd.Function):
    """Project what attention mixed, gate it onto the rows, then norm, modulate, MLP and its gated residual.

    x [R, H], mixed [P, H], modulation [2 B, 4, H] (gate, shift, 1 + scale, gate); weights of the two streams: to_out
    [H, H], mlp_in [4 H, H] and its bias, mlp_out [H, 4 H] and its bias -> [R, H].
    """

    @staticmethod
    def forward(
        ctx, x, mixed, modulation, layout: Layout,
        text_out, latent_out, text_in, latent_in, text_in_bias, latent_in_bias,
        text_mlp, latent_mlp, text_mlp_bias, latent_mlp_bias,
    ):  # fmt: skip
        low, n = compute_dtype(text_out), layout.num_text
        with without_autocast(x):
            gate, shift, scale, mlp_gate = modulation.index_select(0, layout.sample).unbind(1)
            rows = mixed.to(low).index_select(0, layout.back)
            width, inside = x.shape[1], text_in.shape[0]
            kept = rows.new_empty(x.shape[0], 2 * width + inside)
            attended, inner, outer = kept.split((width, inside, width), dim=1)
            _pair(rows, n, text_out.to(low).t(), latent_out.to(low).t(), out=attended)
            middle = torch.addcmul(x, gate, attended.to(x.dtype))
            rows = torch.addcmul(shift, _norm(middle)[0], scale).to(low)
            biases = (text_in_bias.to(low), latent_in_bias.to(low))
            _pair(rows, n, text_in.to(low).t(), latent_in.to(low).t(), biases, out=inner)
            act = F.gelu(inner, approximate="tanh")
            biases = (text_mlp_bias.to(low), latent_mlp_bias.to(low))
            _pair(act, n, text_mlp.to(low).t(), latent_mlp.to(low).t(), biases, out=outer)
            out = torch.addcmul(middle, mlp_gate, outer.to(x.dtype))
        weights = (text_out, latent_out, text_in, latent_in, text_mlp, latent_mlp)
        ctx.save_for_backward(x, mixed, modulation, kept, *weights)
        ctx.layout, ctx.low, ctx.bias_dtype = layout, low, text_in_bias.dtype
        return out

    @staticmethod
    def backward(ctx, grad):
        x, mixed, modulation, kept, *weights = ctx.saved_tensors
        layout, low = ctx.layout, ctx.low
        text_out, latent_out, text_in, latent_in, text_mlp, latent_mlp = weights
        n, (num_rows, width), inside = layout.num_text, x.shape, text_in.shape[0]
        attended, inner, outer = kept.split((width, inside, width), dim=1)
        # One buffer: what the biases sum up stands side by side.
        work = kept.new_empty(num_rows, 2 * (width + inside))
        d_outer, d_inner, d_act, d_rows_out = work.split((width, inside, inside, width), dim=1)
        with without_autocast(x):
            gate, shift, scale, mlp_gate = modulation.index_select(0, layout.sample).unbind(1)
            d_modulation = x.new_empty(num_rows, 4, width)
            _mul_into(grad, outer, d_modulation[:, 3])
            _mul_into(grad, mlp_gate, d_outer)
            act = F.gelu(inner, approximate="tanh")
            d_mlp = _weight_grads(ctx, 10, d_outer, act, n, (text_mlp, latent_mlp))
            _pair(d_outer, n, text_mlp.to(low), latent_mlp.to(low), out=d_act)
            aten.gelu_backward.grad_input(d_act, inner, approximate="tanh", grad_input=d_inner)
            # Sums, not a product with ones and zeros: 0 times a NaN of one stream would reach the other's biases.
            sums = [part[:, : width + inside].sum(0).to(ctx.bias_dtype) for part in (work[:n], work[n:])]
            d_mlp_bias, d_in_bias = [d[:width] for d in sums], [d[width:] for d in sums]
            middle = torch.addcmul(x, gate, attended.to(x.dtype))
            hat, mean, rstd = _norm(middle)
            rows = torch.addcmul(shift, hat, scale).to(low)
            d_in = _weight_grads(ctx, 6, d_inner, rows, n, (text_in, latent_in))
            d_rows = _grad_rows(d_inner, n, text_in.to(low), latent_in.to(low), d_modulation[:, 1])
            _mul_into(d_rows, hat, d_modulation[:, 2])
            d_middle = _norm_backward(d_rows * scale, middle, mean, rstd).add_(grad)
            _mul_into(d_middle, attended, d_modulation[:, 0])
            d_attended = (d_middle * gate).to(low)
            rows = mixed.to(low).index_select(0, layout.back)
            d_out = _weight_grads(ctx, 4, d_attended, rows, n, (text_out, latent_out))
            d_rows = _pair(d_attended, n, text_out.to(low), latent_out.to(low), out=d_rows_out)
            if layout.order.shape[0] == num_rows:
                d_mixed = d_rows.index_select(0, layout.order)
            else:  # padded positions are nobody's output
                d_mixed = d_rows.new_zeros(layout.order.shape[0], width).index_copy_(0, layout.back, d_rows)
            d_table = layout.sum_by_sample(d_modulation.view(num_rows, -1)).view(modulation.shape)
        return (
            d_middle, d_mixed.to(mixed.dtype), d_table, None,
            *d_out, *d_in, *d_in_bias, *d_mlp, *d_mlp_bias,
        )  # fmt: skip


def _grad_rows(grad: Tensor, n: int, text: Tensor, latent: Tensor, out: Tensor) -> Tensor:
    """Gradient of the rows that a pair of products read, in out's dtype (out may be a slice of a wider tensor)."""
    if out.dtype != grad.dtype:
        return out.copy_(_pair(grad, n, text, latent))
    return _pair(grad, n, text, latent, out=out)


def _mul_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    if not a.dtype == b.dtype == out.dtype:
        out.copy_(a * b)
    else:
        torch.mul(a, b, out=out)
