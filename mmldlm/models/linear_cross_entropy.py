"""Cross-entropy of a linear head without ever holding [positions, vocabulary]."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ROWS = 512


class _LinearCrossEntropy(torch.autograd.Function):
    """Weighted sum of token NLLs; gradients are made chunk by chunk in the forward pass.

    The loss is linear in the NLLs, so their gradients are known as soon as a chunk's softmax is: keeping them (as large
    as the inputs) replaces keeping the logits (V / H times as large). Idea: Cut Cross-Entropy, arXiv 2411.09009.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, loss_weights, forbidden_id, chunk_rows, want_grads):
        needs = [want_grads and ctx.needs_input_grad[i] for i in range(3)]
        num_rows = hidden.shape[0]
        nll = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
        correct = torch.empty(num_rows, dtype=torch.bool, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs[1] else None
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if needs[2] else None
        for start in range(0, num_rows, chunk_rows):
            rows = slice(start, min(start + chunk_rows, num_rows))
            chunk, target = hidden[rows], targets[rows, None]
            logits = torch.addmm(bias, chunk, weight.t()).float()
            logits[:, forbidden_id] = float("-inf")
            # Few passes over [rows, V]: the maximum serves the softmax and the accuracy, the exponentials serve the
            # normaliser and, scaled in place, the gradient.
            target_logit, largest = logits.gather(1, target), logits.amax(-1, keepdim=True)
            correct[rows] = (target_logit >= largest)[:, 0]
            grad = logits.sub_(largest).exp_()
            normaliser = grad.sum(-1, keepdim=True)
            nll[rows] = (normaliser.log() + largest - target_logit)[:, 0]
            if any(needs):
                row_weights = loss_weights[rows, None]
                grad.mul_(row_weights / normaliser).scatter_add_(1, target, -row_weights)
                grad_low = grad.to(hidden.dtype)
                if needs[0]:
                    torch.mm(grad_low, weight, out=grad_hidden[rows])
                if needs[1]:
                    if grad_low.dtype == torch.float32:
                        grad_weight.addmm_(grad_low.t(), chunk)
                    else:
                        grad_weight.add_(torch.mm(grad_low.t(), chunk))
                if needs[2]:
                    grad_bias.add_(grad.sum(0))
        ctx.grads = (
            grad_hidden,
            grad_weight.to(weight.dtype) if needs[1] else None,
            grad_bias.to(bias.dtype) if needs[2] else None,
        )
        ctx.mark_non_differentiable(nll, correct)
        return (nll * loss_weights).sum(), nll, correct

    @staticmethod
    def backward(ctx, grad_sum, _nll, _correct):
        grads = [None if g is None else g * grad_sum.to(g.dtype) for g in ctx.grads]
        ctx.grads = None
        return (*grads, None, None, None, None, None)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    loss_weights: Tensor,
    forbidden_id: int,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor, Tensor]:
    """NLL of targets under softmax(hidden @ weight.T + bias) with one id given probability zero.

    Args:
        hidden: [M, H] rows to score (M may be 0).
        weight: [V, H], bias: [V].
        targets: [M] int64 token ids, none of them forbidden_id.
        loss_weights: [M] fp32 weight of each row in the sum.
        forbidden_id: id that is never predicted ([MASK], the zero-mask-probability half of SUBS).
        chunk_rows: rows whose logits exist at once.

    Returns:
        sum of loss_weights * nll (fp32 scalar, differentiable once), nll [M] fp32 and correct [M] bool (both detached).
    """
    # Inside a Function's forward grad mode is always off, so whether gradients are wanted is asked here.
    want_grads = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, loss_weights, forbidden_id, chunk_rows, want_grads)
