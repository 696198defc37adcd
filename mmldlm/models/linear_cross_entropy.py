"""Cross-entropy of a linear head that never holds [positions, vocabulary]."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mmldlm.models.layers import product_dtype, without_autocast
from mmldlm.models.memory import MIN_SHARED_ROWS, aligned, rows_of_a_chunk


class Candidates(NamedTuple):
    """Columns that stand for the whole vocabulary in training: sampled softmax (arXiv 1412.2007).

    The normalizer of a row is the sum over the frequent tokens, its own target, and the sampled
    tokens, each weighted by population / num_sampled: an unbiased estimate of the sum over all
    tokens. It does not depend on the other rows of the batch.

    Attributes:
        tokens: Ids of the columns: frequent ones, sampled ones, and the targets that are not
            frequent. [C] int64
        columns: Column of each row's target, which is frequent or the last of its id. [M] int64
        num_frequent: Number of columns of frequent tokens.
        num_sampled: Number of columns of sampled tokens.
        population: Number of tokens that are not frequent, from which the sampled ones were drawn
            without replacement.
    """

    tokens: Tensor
    columns: Tensor
    num_frequent: int
    num_sampled: int
    population: int

    def weights(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of weight [V, H] and bias [V] of the columns; the sampled ones' bias with their log
        weight.
        """
        bias = bias.index_select(0, self.tokens)
        sampled = slice(self.num_frequent, self.num_frequent + self.num_sampled)
        if self.num_sampled:
            log_weights = torch.zeros_like(bias)
            log_weights[sampled].fill_(math.log(self.population / self.num_sampled))
            bias = bias + log_weights
        return weight.index_select(0, self.tokens), bias

    def hide_duplicates(self, scores: Tensor, rows: slice) -> None:
        """Set logits [rows, C] to -inf where a sampled column is the row's target, or a target is
        another row's.
        """
        targets = self.tokens.index_select(0, self.columns[rows])[:, None]
        hidden = self.tokens[self.num_frequent :] == targets
        hidden[:, self.num_sampled :].logical_not_()
        scores[:, self.num_frequent :].masked_fill_(hidden, float("-inf"))


class _ChunkedHead:
    """Scores chunks of rows and sums up gradients.

    With P = softmax, t the target and w the row's weight, the gradient of the logits is w (P -
    onehot(t)). P - onehot replaces P in place; w scales the rows of the small factors and is never
    written into [rows, V].

    Args:
        hidden: Rows to score. [M, H]
        weight: [V, H].
        bias: [V].
        targets: [M].
        loss_weights: [M].
        excluded_token_id: Id with probability zero; None: none.
        candidates: What the columns are, if they are not the vocabulary.
        chunk_rows: Number of rows whose logits exist at once.
        needs: Whether gradients of hidden, weight and bias are wanted.
    """

    def __init__(
        self,
        hidden,
        weight,
        bias,
        targets,
        loss_weights,
        excluded_token_id,
        candidates,
        chunk_rows,
        needs,
    ):
        low = product_dtype(hidden)
        exact = torch.float64 if low == torch.float64 else torch.float32
        num_rows, device = len(hidden), hidden.device
        self.vocab_size = len(weight)
        self.chunk_rows = chunk_rows
        self.low = low
        self.exact = exact
        self.targets, self.weights = targets, loss_weights.to(exact)[:, None]
        self.hidden, self.weight = hidden.to(low), weight.to(low)
        # An excluded id has neither probability nor gradient: its bias, and so its logit, is -inf.
        self.bias = bias.to(low, copy=True)
        if excluded_token_id is not None:
            # Not an assignment, which would make the host wait for a GPU.
            self.bias[excluded_token_id].fill_(float("-inf"))
        self.candidates = candidates
        self.nll = torch.empty(num_rows, dtype=exact, device=device)
        self.correct = torch.empty(num_rows, dtype=torch.bool, device=device)
        width = aligned(self.vocab_size)
        self.logits = torch.empty(min(chunk_rows, num_rows), width, dtype=low, device=device)
        self.part_rows = MIN_SHARED_ROWS if device.type == "cpu" and low != exact else chunk_rows
        # The softmax is written over its logits if it has their dtype.
        self.softmax = self.logits
        if low != exact:
            self.softmax = torch.empty(
                min(self.part_rows, len(self.logits)), width, dtype=exact, device=device
            )
        self.grad_hidden = torch.empty_like(self.hidden) if needs[0] else None
        # Each chunk's share of the weight's gradient is rounded to the compute dtype. Two shares
        # are summed with one more rounding, more of them in fp32.
        sums = low if weight.dtype == low and num_rows <= 2 * chunk_rows else exact
        self.grad_weight = (
            torch.zeros(weight.shape, dtype=sums, device=device) if needs[1] else None
        )
        self.grad_bias = torch.zeros(bias.shape, dtype=exact, device=device) if needs[2] else None
        self.needs_any = any(needs)

    def run(self) -> None:
        """Score all rows and sum the gradients that are wanted."""
        for start in range(0, len(self.nll), self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, len(self.nll)))
            grad_logits = self._score(rows)
            if self.grad_hidden is not None:
                torch.mm(grad_logits, self.weight, out=self.grad_hidden[rows]).mul_(
                    self.weights[rows]
                )
            if self.grad_weight is not None:
                weighted = (self.hidden[rows] * self.weights[rows]).to(self.low)
                if self.grad_weight.dtype == self.low:
                    total = self.grad_weight
                    torch.addmm(total, grad_logits.t(), weighted, out=total)
                else:
                    product = grad_logits.t() @ weighted
                    # By rows on a CPU, where torch copies all that it converts.
                    step = 4096 if product.device.type == "cpu" else len(product)
                    for total, part in zip(self.grad_weight.split(step), product.split(step)):
                        total.add_(part)

    def _score(self, rows: slice) -> Tensor:
        """NLL and correctness of a chunk; returns P - onehot(t) of it [rows, V], if gradients are
        wanted.
        """
        chunk = self.hidden[rows]
        logits = self.logits[: len(chunk)]
        logits[:, self.vocab_size :].fill_(float("-inf"))
        scores = torch.addmm(self.bias, chunk, self.weight.t(), out=logits[:, : self.vocab_size])
        if self.candidates is not None:
            self.candidates.hide_duplicates(scores, rows)
        for first in range(0, len(chunk), self.part_rows):
            part = logits[first : first + self.part_rows]
            part_rows = slice(rows.start + first, rows.start + first + len(part))
            target, softmax = self.targets[part_rows, None], part
            if self.low != self.exact:
                # Softmax would allocate a copy of its own.
                softmax = self.softmax[: len(part)]
                part = softmax.copy_(part)
            # Far cheaper than max, which finds the indices, too.
            largest = part.amax(-1, keepdim=True)
            target_score = part.gather(1, target)
            torch.ge(target_score, largest, out=self.correct[part_rows, None])
            probs = torch.softmax(part, -1, self.exact, out=softmax)[:, : self.vocab_size]
            # log of the normalizer from the largest probability, which is at least 1 / V
            log_normalizer = largest - probs.amax(-1, keepdim=True).log_()
            torch.sub(log_normalizer, target_score, out=self.nll[part_rows, None])
            if not self.needs_any:
                continue
            probs.scatter_add_(1, target, probs.new_full((len(part), 1), -1.0))
            if self.grad_bias is not None:
                self.grad_bias.addmv_(probs.t(), self.weights[part_rows, 0])
            if self.low != self.exact:
                # With the zeros behind the vocabulary: oneDNN's products on CPUs with AMX read
                # what stands there, and made NaN of -inf.
                logits[first : first + len(part)] = softmax
        return scores


class _LinearCrossEntropy(torch.autograd.Function):
    """Weighted sum of token NLLs; gradients are computed chunk by chunk in the forward pass.

    The loss is linear in the NLLs, so their gradients are known as soon as a chunk's softmax is.
    Saving them (as large as the inputs) replaces saving the logits (V / H times as large). Idea:
    Cut Cross-Entropy, arXiv 2411.09009.
    """

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        targets,
        loss_weights,
        excluded,
        candidates,
        chunk_rows,
        wants_grads,
    ):
        needs = [wants_grads and ctx.needs_input_grad[i] for i in range(3)]
        with without_autocast(hidden):
            head = _ChunkedHead(
                hidden,
                weight,
                bias,
                targets,
                loss_weights,
                excluded,
                candidates,
                chunk_rows,
                needs,
            )
            head.run()
        grads = (head.grad_hidden, head.grad_weight, head.grad_bias)
        ctx.grads = [
            None if g is None else g.to(x.dtype) for g, x in zip(grads, (hidden, weight, bias))
        ]
        ctx.mark_non_differentiable(head.nll, head.correct)
        return (head.nll * loss_weights).sum(), head.nll, head.correct

    @staticmethod
    def backward(ctx, grad_sum, _nll, _correct):
        if ctx.grads is None:
            raise RuntimeError(
                "the text head's graph goes backward once: run the forward pass again"
            )
        # In place: the weight's gradient is the largest tensor of a small model's step, and only
        # ctx holds it.
        grads = [None if g is None else g.mul_(grad_sum.to(g.dtype)) for g in ctx.grads]
        ctx.grads = None
        return (*grads, *[None] * 6)


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Logits of hidden [M, H] under a head of weight [V, H] and bias [V]: [M, V], in the compute
    dtype.

    Without gradients their rows are apart by a multiple of ROW_ALIGNMENT.
    """
    # Autograd takes no `out`.
    if torch.is_grad_enabled():
        return torch.addmm(bias, hidden, weight.t())
    low = product_dtype(hidden)
    logits = hidden.new_empty(len(hidden), aligned(len(weight)), dtype=low)[:, : len(weight)]
    return torch.addmm(bias.to(low), hidden.to(low), weight.t().to(low), out=logits)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    loss_weights: Tensor,
    excluded_token_id: int | None,
    chunk_rows: int | None = None,
    candidates: Candidates | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """NLL of targets under softmax(hidden @ weight.T + bias) with one id given probability zero.

    Args:
        hidden: Rows to score (M may be 0). [M, H]
        weight: [V, H].
        bias: [V].
        targets: Target ids, none of them excluded_token_id. [M] int64
        loss_weights: Weight of each row in the sum. [M] fp32
        excluded_token_id: Id that is never predicted ([MASK], the zero-mask-probability half of
            SUBS); None: none.
        chunk_rows: Number of rows whose logits exist at once; None: as many as fit CHUNK_ELEMENTS.
        candidates: Tokens from which the normalizer is estimated, without excluded_token_id;
            None: all.

    Returns:
        sum of loss_weights * nll (fp32 scalar, differentiable once), nll [M] fp32 and correct [M]
        bool (both detached).
    """
    if candidates is not None:
        weight, bias = candidates.weights(weight, bias)
        targets, excluded_token_id = candidates.columns, None
    if chunk_rows is None:
        chunk_rows = rows_of_a_chunk(
            weight.shape[0], hidden.device.type, product_dtype(hidden).itemsize
        )
    # Inside a Function's forward grad mode is always off, so it is passed on from here.
    wants_grads = torch.is_grad_enabled()
    arguments = (targets, loss_weights, excluded_token_id, candidates, chunk_rows, wants_grads)
    return _LinearCrossEntropy.apply(hidden, weight, bias, *arguments)
