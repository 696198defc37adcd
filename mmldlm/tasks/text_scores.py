"""How probable texts are under a model, one batch and one draw at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.models.latent_transformer import LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery


@dataclass
class TextScores:
    """Scores of B texts.

    Attributes:
        nats: [B] fp64, the negative log-likelihood of a text (EOS counted) or one draw of an upper
            bound on it.
        correct: [B] fp64, scored tokens that are the most probable.
        scored: [B] scored tokens.
        length_nll: [B] nats of the length, or None for a model that writes EOS itself.
    """

    nats: Tensor
    correct: Tensor
    scored: Tensor
    length_nll: Tensor | None


def masked_text_scores(
    model: nn.Module,
    tokens: Tensor,
    real: Tensor,
    latents: Tensor | None,
    uniform: Tensor,
    stratum: tuple[int, int],
    *,
    diffusion: MaskedDiffusion,
) -> TextScores:
    """Draw the NELBO of masked diffusion with fixed mask counts (`MaskedDiffusion.corrupt_count`).

    Unbiased for every schedule: the masked positions count 1 / their fraction.

    Args:
        model: with the forward contract of MultimodalMMDiT.
        diffusion: masking process of training.
        The rest as in `TextTask.score_texts`.
    """
    width, (draw, draws) = tokens.shape[1], stratum
    strata = (draw + uniform[:, -1]) / draws
    mask_token_id = diffusion.mask_token_id
    noised, masked, fraction = diffusion.corrupt_count(
        tokens, strata, uniform[:, :width], real, mask_token_id
    )
    t = diffusion.timestep_of(fraction)
    positions = masked.flatten().nonzero()[:, 0]
    owner = positions // width
    weight = (1 / fraction)[owner]
    out = model(
        TextInputs(noised, t.float(), real),
        None if latents is None else LatentInputs(latents),
        TokenQuery(positions, tokens.flatten()[positions], weight.float()),
    )
    return TextScores(
        sum_by_row(out.text.nll.double() * weight, owner, len(tokens)),
        sum_by_row(out.text.correct.double(), owner, len(tokens)),
        masked.sum(1),
        F.cross_entropy(out.length_logits, real.sum(1) - 1, reduction="none"),
    )


def sum_by_row(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """Return [count] fp64 sums of values [M] fp64, which belong to rows `owner` [M]."""
    return torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(
        0, owner, values
    )
