"""Cross-entropy of a linear head without ever holding [positions, vocabulary]."""

from __future__ import annotations

import torch
from torch import Tensor

from mmldlm.models.buffer_reuse import gradient_memory, reusable_buffer
from mmldlm.models.layers import compute_dtype, without_autocast

# Logits that exist at once: a GPU wants large products, on a CPU they are as fast in small ones (fp32 elements; of low
# precision twice as many).
CHUNK_ELEMENTS = {"cpu": 8 << 20, "cuda": 64 << 20}
MIN_ROWS = 64
# Rows whose softmax exists at once in fp32 beside logits in low precision on a CPU: few, so that it stays in the cache.
MIN_SHARED_ROWS = 64
# Rows of logits start at multiples of this: with a row of 30,522 the product that makes them takes 1.4 times as long on
# a CPU (stores cross cache lines), and leaves the aligned kernels on a GPU.
ROW_ALIGNMENT = 64


class _LinearCrossEntropy(torch.autograd.Function):
    """Weighted sum of token NLLs; gradients are made chunk by chunk in the forward pass.

    The loss is linear in the NLLs, so their gradients are known as soon as a chunk's softmax is: keeping them (as large
    as the inputs) replaces keeping the logits (V / H times as large). Idea: Cut Cross-Entropy, arXiv 2411.09009.

    With P = softmax, t the target and w the row's weight, the gradient of the logits is w (P - onehot(t)). P - onehot
    is made in P's place; w scales the rows of the small factors and is never written into [rows, V].
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, loss_weights, forbidden_id, chunk_rows, want_grads):
        needs = [want_grads and ctx.needs_input_grad[i] for i in range(3)]
        num_rows = hidden.shape[0]
        low = compute_dtype(hidden)
        with without_autocast(hidden):
            rows_low, weight_low = hidden.to(low), weight.to(low)
            # A forbidden id has no probability and so no gradient: its logit is -inf by its bias.
            bias_low = bias.to(low, copy=True)
            bias_low[forbidden_id].fill_(float("-inf"))  # an assignment would make the host wait for a GPU
            exact = torch.float64 if low == torch.float64 else torch.float32
            weights = loss_weights.to(exact)[:, None]
            nll = torch.empty(num_rows, dtype=exact, device=hidden.device)
            correct = torch.empty(num_rows, dtype=torch.bool, device=hidden.device)
            vocab, on_cpu = weight.shape[0], hidden.device.type == "cpu"
            logits = reusable_buffer(weight, "logits", (min(chunk_rows, num_rows), _aligned(vocab)), low)
            part_rows = MIN_SHARED_ROWS if on_cpu and low != exact else chunk_rows
            shares = logits  # the softmax is written over its logits where it has their dtype
            if low != exact:
                shares = reusable_buffer(weight, "shares", (min(part_rows, len(logits)), _aligned(vocab)), exact)
            grad_hidden = torch.empty_like(rows_low) if needs[0] else None
            # Each chunk's part of the weight's gradient comes rounded to the compute dtype. Two of them are summed with
            # one more rounding, more of them in fp32.
            sums = low if weight.dtype == low and num_rows <= 2 * chunk_rows else exact
            grad_weight = gradient_memory(weight, sums) if needs[1] else None
            product = reusable_buffer(weight, "product", weight.shape, low) if needs[1] and sums != low else None
            grad_bias = torch.zeros(bias.shape, dtype=exact, device=bias.device) if needs[2] else None
            minus_one = weights.new_full((1, 1), -1.0)
            for start in range(0, num_rows, chunk_rows):
                rows = slice(start, min(start + chunk_rows, num_rows))
                chunk = rows_low[rows]
                wide = logits[: len(chunk)]
                wide[:, vocab:].fill_(float("-inf"))
                scores = torch.addmm(bias_low, chunk, weight_low.t(), out=wide[:, :vocab])
                for first in range(0, len(chunk), part_rows):
                    part = wide[first : first + part_rows]
                    here = slice(start + first, start + first + len(part))
                    target, wide_share = targets[here, None], part if low == exact else shares[: len(part)]
                    if low != exact:  # softmax would take memory for a copy of its own
                        part = wide_share.copy_(part)
                    largest = part.amax(-1, keepdim=True)  # far cheaper than max, which finds the places, too
                    target_score = part.gather(1, target)
                    torch.ge(target_score, largest, out=correct[here, None])
                    share = torch.softmax(part, -1, exact, out=wide_share)[:, :vocab]
                    # log of the normaliser from the largest share, which is at least 1 / V
                    log_normaliser = largest - share.amax(-1, keepdim=True).log_()
                    torch.sub(log_normaliser, target_score, out=nll[here, None])
                    if not any(needs):
                        continue
                    share.scatter_add_(1, target, minus_one.expand(len(part), 1))
                    if needs[2]:
                        grad_bias.addmv_(share.t(), weights[here, 0])
                    if low != exact:
                        scores[first : first + len(part)] = share
                if needs[0]:
                    torch.mm(scores, weight_low, out=grad_hidden[rows]).mul_(weights[rows])
                if needs[1]:
                    weighted = (chunk * weights[rows]).to(low)
                    if product is None and start:
                        torch.addmm(grad_weight, scores.t(), weighted, out=grad_weight)
                    else:
                        torch.mm(scores.t(), weighted, out=grad_weight if product is None else product)
                    if product is not None:
                        _add(grad_weight, product, is_first=start == 0)
            if num_rows == 0 and needs[1]:
                grad_weight.zero_()
        ctx.grads = (
            grad_hidden.to(hidden.dtype) if needs[0] else None,
            _in_dtype_of(weight, grad_weight) if needs[1] else None,
            grad_bias.to(bias.dtype) if needs[2] else None,
        )
        ctx.mark_non_differentiable(nll, correct)
        return (nll * loss_weights).sum(), nll, correct

    @staticmethod
    def backward(ctx, grad_sum, _nll, _correct):
        if ctx.grads is None:
            raise RuntimeError("the text head's graph goes backward once: run the forward pass again")
        # In place: the weight's gradient is the largest tensor of a small model's step, and nothing else holds it.
        grads = [None if g is None else g.mul_(grad_sum.to(g.dtype)) for g in ctx.grads]
        ctx.grads = None
        return (*grads, None, None, None, None, None)


def _add(total: Tensor, part: Tensor, is_first: bool) -> None:
    """Add to a total of another dtype; on a CPU by rows, for torch makes a copy of all that it converts there."""
    if is_first:
        total.copy_(part)
        return
    rows = 4096 if total.device.type == "cpu" else len(total)
    for mine, more in zip(total.split(rows), part.split(rows)):
        mine.add_(more)


def _in_dtype_of(weight: Tensor, grad: Tensor) -> Tensor:
    return grad if grad.dtype == weight.dtype else gradient_memory(weight, weight.dtype).copy_(grad)


def _aligned(vocab_size: int) -> int:
    return -(-vocab_size // ROW_ALIGNMENT) * ROW_ALIGNMENT


def rows_of_a_chunk(vocab_size: int, device_type: str, low_bytes: int) -> int:
    """Rows whose logits exist at once. low_bytes: of an element in the compute dtype."""
    elements = CHUNK_ELEMENTS.get(device_type, CHUNK_ELEMENTS["cuda"])
    if device_type == "cpu" and low_bytes < 4:
        elements *= 2
    return max(elements // _aligned(vocab_size), MIN_ROWS)


def logits_bytes(num_rows: int, vocab_size: int, device_type: str, low_bytes: int) -> int:
    """Most bytes of logits and shares that exist at once; bounded, however many rows are scored.

    low_bytes: of an element in the compute dtype; below 4 the shares stand beside the logits in fp32.
    """
    rows = min(rows_of_a_chunk(vocab_size, device_type, low_bytes), num_rows)
    shares = 0 if low_bytes >= 4 else 4 * (min(rows, MIN_SHARED_ROWS) if device_type == "cpu" else rows)
    return _aligned(vocab_size) * (rows * low_bytes + shares)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    loss_weights: Tensor,
    forbidden_id: int,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """NLL of targets under softmax(hidden @ weight.T + bias) with one id given probability zero.

    Args:
        hidden: [M, H] rows to score (M may be 0).
        weight: [V, H], bias: [V].
        targets: [M] int64 token ids, none of them forbidden_id.
        loss_weights: [M] fp32 weight of each row in the sum.
        forbidden_id: id that is never predicted ([MASK], the zero-mask-probability half of SUBS).
        chunk_rows: rows whose logits exist at once. None: as many as fit CHUNK_ELEMENTS.

    Returns:
        sum of loss_weights * nll (fp32 scalar, differentiable once), nll [M] fp32 and correct [M] bool (both detached).
    """
    if chunk_rows is None:
        chunk_rows = rows_of_a_chunk(weight.shape[0], hidden.device.type, compute_dtype(hidden).itemsize)
    # Inside a Function's forward grad mode is always off, so whether gradients are wanted is asked here.
    want_grads = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, loss_weights, forbidden_id, chunk_rows, want_grads)
