"""Losses that read the whole distribution over the vocabulary, scored chunk by chunk inside the
text head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.diffusion.process import Divergence, DivergenceProcess
from mmldlm.diffusion.timesteps import arcsine
from mmldlm.models.latent_transformer import LatentInputs, TextInputs
from mmldlm.models.token_scores import LogitsFunction, TokenQuery
from mmldlm.tasks.baselines.common.text_pass import add_length_loss, forward_text
from mmldlm.tasks.text_scores import TextScores, sum_by_row


class _Score(torch.autograd.Function):
    """d of a chunk of rows; its closed gradient is computed in the backward pass, which keeps the
    logits alone.
    """

    @staticmethod
    def forward(ctx, logits, divergence, rows):
        ctx.save_for_backward(logits)
        ctx.divergence, ctx.rows = divergence, rows
        return divergence.score(logits, rows, False)[0]

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        _, slope = ctx.divergence.score(logits, ctx.rows, True)
        return slope.mul_(grad[:, None]), None, None


def row_scores(divergence: Divergence) -> LogitsFunction:
    """For `TokenQuery.function`: d and whether the clean token is the most
    probable [R, 2].
    """

    def scores(logits: Tensor, rows: slice) -> Tensor:
        target = logits.detach().gather(1, divergence.targets[rows, None])[:, 0]
        is_best = target >= logits.detach().amax(-1)
        found = _Score.apply(logits, divergence, rows)
        return torch.stack([found, is_best.to(found.dtype)], -1)

    return scores


class DivergenceObjective:
    """(model, batch of NoisingCollator) -> loss and metric sums.

    loss = weighted divergence / text tokens + length_loss_weight * length NLL / lengths, both
    counted over the GLOBAL batch.

    Args:
        kind: class of the divergence; its fields are tensors `text_{field}` of the batch.
        length_loss_weight: of the length head's negative log-likelihood.
    """

    def __init__(self, kind: type[Divergence], length_loss_weight: float):
        self.kind, self.length_loss_weight = kind, length_loss_weight

    def __call__(self, model, batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the model.

        Returns:
            loss: fp32 scalar, this micro-batch's share of the global batch's loss.
            sums: fp32 scalars, detached: loss, text_nelbo_sum (nats, with the NELBO's weights
                whatever the training weighs by), text_correct and text_scored (scored tokens),
                length_nll_sum, length_scored.
        """
        tensors = batch.tensors
        divergence = self.kind(*(tensors[f"text_{field}"] for field in self.kind._fields))
        out = forward_text(model, tensors, TokenQuery(function=row_scores(divergence)))
        found, correct = out.text.values.unbind(-1)
        text_loss = torch.dot(found, tensors["text_weights"]) / max(batch.counts["text_tokens"], 1)
        loss, sums = add_length_loss(text_loss, out, batch, self.length_loss_weight)
        return loss, sums | {
            "text_nelbo_sum": torch.dot(found.detach(), tensors["text_elbo_weights"]),
            "text_correct": correct.detach().sum(),
            "text_scored": torch.full_like(loss.detach(), float(len(found))),
        }


def divergence_scores(
    model: nn.Module,
    process: DivergenceProcess,
    tokens: Tensor,
    real: Tensor,
    latents: Tensor | None,
    uniform: Tensor,
    stratum: tuple[int, int],
) -> TextScores:
    """One draw of the exact NELBO of every text; the arguments are those of
    `TextTask.score_texts`.
    """
    width, (draw, draws) = tokens.shape[1], stratum
    t, density = arcsine((draw + uniform[:, -1]) / draws)
    noised, scored = process.corrupt(tokens, t, uniform[:, :width], real)
    positions = scored.flatten().nonzero()[:, 0]
    owner = positions // width
    targets, states = tokens.flatten()[positions], noised.flatten()[positions]
    weights = process.elbo_weights(targets, states, t[owner]) * density[owner]
    divergence = process.divergence(targets, states, t[owner])
    out = model(
        TextInputs(noised, t.float(), real),
        None if latents is None else LatentInputs(latents),
        TokenQuery(positions, function=row_scores(divergence)),
    )
    found, correct = out.text.values.double().unbind(-1)
    return TextScores(
        sum_by_row(found * weights, owner, len(tokens)),
        sum_by_row(correct, owner, len(tokens)),
        scored.sum(1),
        F.cross_entropy(out.length_logits, real.sum(1) - 1, reduction="none"),
    )
