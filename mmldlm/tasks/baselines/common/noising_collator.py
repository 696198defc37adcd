"""Noises texts by a process whose NELBO is a divergence over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mmldlm.diffusion.process import DivergenceProcess
from mmldlm.diffusion.timesteps import arcsine
from mmldlm.tasks.baselines.common.data import BaselineData
from mmldlm.tasks.baselines.common.text_collator import PaddedTexts, TextCollator


class NoisingCollator(TextCollator):
    """Adds text_tokens [B, S] int64 (noised), text_timesteps [B] fp32, and of the M scored tokens
    of real samples text_positions [M] int64 in B * S, text_weights [M] fp32 (of the training),
    text_elbo_weights [M] fp32 and the fields of the process's divergence, `text_{field}`
    (text_targets [M] int64 among them).

    Times are drawn by the arcsine law; the weights hold dt/du, so that expectations are those over
    a uniform t.

    Args:
        process: of the tokens.
        training_weights: (NELBO weights [M], t [M]) -> weights of the training [M].
        The rest as in `TextCollator`.
    """

    def __init__(
        self,
        data: BaselineData,
        process: DivergenceProcess,
        training_weights: Callable[[Tensor, Tensor], Tensor],
        condition_dropout: float | None,
        seed: int | None = None,
    ):
        super().__init__(data, condition_dropout, seed)
        self.process, self.training_weights = process, training_weights

    def noise(self, texts: PaddedTexts) -> dict[str, Tensor]:
        t, density = arcsine(texts.strata)
        noised, scored = self.process.corrupt(texts.tokens, t, texts.uniform, texts.attention)
        positions = (scored & texts.real[:, None]).flatten().nonzero()[:, 0]
        rows = positions // texts.tokens.shape[1]
        targets, states, times = (
            texts.tokens.flatten()[positions],
            noised.flatten()[positions],
            t[rows],
        )
        weights = self.process.elbo_weights(targets, states, times)
        fields = self.process.divergence(targets, states, times)._asdict()
        return {
            "text_tokens": noised,
            "text_timesteps": t.float(),
            "text_positions": positions,
            "text_weights": (self.training_weights(weights, times) * density[rows]).float(),
            "text_elbo_weights": (weights * density[rows]).float(),
            **{f"text_{name}": tensor for name, tensor in fields.items()},
        }
