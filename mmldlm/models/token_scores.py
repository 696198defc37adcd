"""What a head over tokens is asked (`TokenQuery`) and what it returns (`TokenScores`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmldlm.models.layers import product_dtype
from mmldlm.models.linear_cross_entropy import Candidates, linear_cross_entropy, linear_logits
from mmldlm.models.memory import rows_of_a_chunk

LogitsFunction = Callable[[Tensor, slice], Tensor]
"""(fp32 logits [m, V] with -inf for [MASK], which of the M rows they are) -> [m, ...]."""


class TokenQuery(NamedTuple):
    """Positions whose tokens are predicted, and what is wanted of them.

    By itself a query asks for logits; with targets, or with a function, for their scores. These
    never hold [M, V], forward or backward.

    Attributes:
        positions: Indices into B * S of real tokens; None: all of B * S. [M] int64
        targets: Clean tokens at these positions. [M] int64
        weights: Weight of each target in loss_sum. [M] fp32
        candidates: Columns that stand for the whole vocabulary.
        function: Function of chunks of the logits, which must read no random numbers.
    """

    positions: Tensor | None = None
    targets: Tensor | None = None
    weights: Tensor | None = None
    candidates: Candidates | None = None
    function: LogitsFunction | None = None


class TokenScores(NamedTuple):
    """Answer to a `TokenQuery`.

    Attributes:
        logits: Logits in fp32, -inf for an excluded token; without targets or a function. [M, V],
            or [B, S, V] without positions.
        loss_sum: Sum of weights * nll, differentiable once; with targets. fp32 scalar
        nll: Negative log-likelihood of each target, detached; with targets. [M] fp32
        correct: Whether the target is the most probable token; with targets. [M] bool
        values: Results of the function. [M, ...]
    """

    logits: Tensor | None = None
    loss_sum: Tensor | None = None
    nll: Tensor | None = None
    correct: Tensor | None = None
    values: Tensor | None = None


def score_tokens(
    rows: Tensor, weight: Tensor, bias: Tensor, query: TokenQuery, excluded_token_id: int
) -> TokenScores:
    """Answer a query whose positions have the rows [M, H], under a head of weight [V, H] and bias
    [V]; the excluded token has probability 0.
    """
    if query.targets is not None:
        assert query.weights is not None, "targets have weights"
        loss_sum, nll, correct = linear_cross_entropy(
            rows,
            weight,
            bias,
            query.targets,
            query.weights,
            excluded_token_id,
            candidates=query.candidates,
        )
        return TokenScores(loss_sum=loss_sum, nll=nll, correct=correct)

    def logits_of(rows: Tensor) -> Tensor:
        logits = linear_logits(rows, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        # Not an assignment, which would make the host wait for a GPU.
        logits[:, excluded_token_id].fill_(float("-inf"))
        return logits

    if query.function is None:
        return TokenScores(logits=logits_of(rows))
    function, parts = query.function, []
    size = rows_of_a_chunk(len(bias), rows.device.type, product_dtype(rows).itemsize)
    for first in range(0, max(len(rows), 1), size):
        which = slice(first, min(first + size, len(rows)))
        # The backward pass computes a chunk's logits again.
        parts.append(
            checkpoint(
                lambda chunk, which: function(logits_of(chunk), which),
                rows[which],
                which,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return TokenScores(values=torch.cat(parts))
