"""NELBO, or exact NLL, of texts given the matched, a shuffled and the null latent, on the same
draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.errors import MmldlmError
from mmldlm.sampling.latents import pad_texts
from mmldlm.sampling.model import Model, device_of, rows_of_latents
from mmldlm.tasks.text_task import TextScores
from mmldlm.utils.counter_rng import Stream, uniforms

CONDITIONS = ("matched", "shuffled", "null")


@dataclass
class Likelihood:
    """Results per sentence, [N] fp64, and per condition of CONDITIONS (without latents, of "null"
    alone).

    Attributes:
        nelbo: Nats per text, EOS counted: exact, or an upper bound as the mean over the draws.
        correct: Correctly predicted positions over all draws.
        length_nll: Nats (matched and null only); {} for a model that writes EOS itself.
        masked: Scored positions over all draws.
        num_tokens: Tokens per text, EOS counted.
    """

    nelbo: dict[str, np.ndarray]
    correct: dict[str, np.ndarray]
    length_nll: dict[str, np.ndarray]
    masked: np.ndarray
    num_tokens: np.ndarray


Score = Callable[[Tensor, Tensor, Tensor | None, Tensor, tuple[int, int]], TextScores]
"""(tokens, attention_mask, latents, uniform, stratum) -> scores; see `TextTask.score_texts`."""


@torch.inference_mode()
def measure(
    model: Model,
    texts: Sequence[Sequence[int]],
    latents: Tensor | None,
    shuffled_index: np.ndarray,
    *,
    score: Score,
    draws: int = 4,
    seed: int = 0,
    batch_tokens: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> Likelihood:
    """Score every text under all conditions, by Monte Carlo where the model only bounds its
    likelihood.

    A text's draws are spread over as many equal strata of noise levels. All conditions share their
    random numbers, so differences are paired.

    Args:
        model: Model; its config says what pads and ends a text, and its `scale_latents` is used.
        texts: N lists of ids without EOS.
        latents: [N, D] (or [N, M, D]) in the encoder's space; None: only the null condition is
            measured.
        shuffled_index: [N] index of the latent under condition "shuffled".
        score: Function that scores one batch.
        draws: Draws of every text; 1 is enough for an exact likelihood.
        progress: Callback after every draw of a batch, with the number of draws done and in total,
            over all texts.

    Raises:
        MmldlmError: NaN predictions.
    """
    count, config, device = len(texts), model.config, device_of(model)
    conditions = CONDITIONS if latents is not None else ("null",)
    lengths = np.array([len(text) + 1 for text in texts])
    sums = {name: np.zeros(count) for name in conditions}
    num_correct = {name: np.zeros(count) for name in conditions}
    length_nll: dict[str, np.ndarray] = {}
    num_scored = np.zeros(count)
    done = 0
    shuffled = torch.from_numpy(shuffled_index)
    latent_rows = 0 if latents is None else rows_of_latents(config)
    for rows in token_budget_batches(lengths + latent_rows, batch_tokens):
        index = torch.from_numpy(rows.copy())
        tokens, real = pad_texts(
            [texts[row] for row in rows], config.eos_token_id, config.pad_token_id, device
        )
        given: dict[str, Tensor | None] = {"null": None}
        if latents is not None:
            given["matched"] = model.scale_latents(latents[index].to(device))
            given["shuffled"] = model.scale_latents(latents[shuffled[index]].to(device))
        # One more column than positions: the last is the sample's offset within the strata.
        uniform = uniforms(seed, Stream.LIKELIHOOD, rows, (draws, config.max_seq_len + 1)).to(
            device
        )
        for draw in range(draws):
            own = torch.cat([uniform[:, draw, : tokens.shape[1]], uniform[:, 0, -1:]], dim=1)
            for name in conditions:
                found = score(tokens, real, given[name], own, (draw, draws))
                sums[name][rows] += found.nats.cpu().numpy() / draws
                num_correct[name][rows] += found.correct.cpu().numpy()
                if draw == 0 and name != "shuffled" and found.length_nll is not None:
                    length_nll.setdefault(name, np.zeros(count))[rows] = (
                        found.length_nll.double().cpu().numpy()
                    )
            num_scored[rows] += found.scored.cpu().numpy()
            done += len(rows)
            if progress is not None:
                progress(done, count * draws)
    if not all(np.isfinite(values).all() for values in (*sums.values(), *length_nll.values())):
        raise MmldlmError(
            "the model returned a NaN or infinite likelihood on validation text: its weights are"
            " corrupt"
        )
    return Likelihood(sums, num_correct, length_nll, num_scored, lengths.astype(np.float64))
