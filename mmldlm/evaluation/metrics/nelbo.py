"""NELBO of texts given the matched, a shuffled and the null latent, on the same masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.diffusion import MaskedDiffusion
from mmldlm.errors import MmldlmError
from mmldlm.sampling.device import device_of
from mmldlm.sampling.latent_sampler import pad_texts
from mmldlm.utils.counter_rng import Stream, uniforms

CONDITIONS = ("matched", "shuffled", "null")


@dataclass
class Likelihood:
    """Results per sentence, [N] fp64, and per condition of CONDITIONS.

    Attributes:
        nelbo: nats per text, EOS counted, mean over the draws.
        correct: correctly predicted masked positions over all draws.
        length_nll: nats (matched and null only).
        masked: masked positions over all draws.
        num_tokens: tokens per text, EOS counted.
    """

    nelbo: dict[str, np.ndarray]
    correct: dict[str, np.ndarray]
    length_nll: dict[str, np.ndarray]
    masked: np.ndarray
    num_tokens: np.ndarray


@torch.inference_mode()
def measure(
    model: nn.Module,
    texts: Sequence[Sequence[int]],
    latents: Tensor,
    shuffled_index: np.ndarray,
    *,
    diffusion: MaskedDiffusion,
    draws: int = 4,
    seed: int = 0,
    batch_tokens: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> Likelihood:
    """Estimate the NELBO of every text by Monte Carlo with fixed mask counts (`MaskedDiffusion.corrupt_count`).

    The estimate is unbiased for every schedule. Every text gets `draws` mask counts, one in each of as many equal
    strata of 1 .. length. All conditions share the masks, so their differences are paired.

    Args:
        texts: N lists of ids without EOS.
        latents: [N, D] in the encoder's space.
        shuffled_index: [N] index of the latent under condition "shuffled".
        progress: called after every draw of a batch with the number of draws done and in total, over all texts.

    Raises:
        MmldlmError: NaN predictions.
    """
    count, config, device = len(texts), model.config, device_of(model)
    lengths = np.array([len(text) + 1 for text in texts])
    sums = {name: np.zeros(count) for name in CONDITIONS}
    num_correct = {name: np.zeros(count) for name in CONDITIONS}
    length_nll = {name: np.zeros(count) for name in ("matched", "null")}
    masked_count = np.zeros(count)
    done = 0
    shuffled = torch.from_numpy(shuffled_index)
    for rows in token_budget_batches(lengths, batch_tokens):
        index = torch.from_numpy(rows.copy())
        tokens, real = pad_texts([texts[row] for row in rows], config.eos_token_id, config.pad_token_id, device)
        width = tokens.shape[1]
        given = {
            "matched": model.scale_latents(latents[index].to(device)),
            "shuffled": model.scale_latents(latents[shuffled[index]].to(device)),
            "null": None,
        }
        # One more column than positions: the last is the sample's offset within the strata.
        uniform = uniforms(seed, Stream.LIKELIHOOD, rows, (draws, config.max_seq_len + 1)).to(device)
        for draw in range(draws):
            strata = (draw + uniform[:, 0, -1]) / draws
            noised, masked, fraction = diffusion.corrupt_count(
                tokens, strata, uniform[:, draw, :width], real, config.mask_token_id
            )
            t = diffusion.timestep_of(fraction)
            positions = masked.flatten().nonzero()[:, 0]
            owner = positions // width
            weight = (1 / fraction)[owner]
            targets = tokens.flatten()[positions]
            masked_count[rows] += masked.sum(1).cpu().numpy()
            for name in CONDITIONS:
                out = model(
                    noised, given[name], t.float(), None, real,
                    text_positions=positions, text_targets=targets, text_weights=weight.float(),
                )  # fmt: skip
                nll, correct = out["text_nll"].double() * weight, out["text_correct"].double()
                sums[name][rows] += _by_row(nll, owner, len(rows)) / draws
                num_correct[name][rows] += _by_row(correct, owner, len(rows))
                if draw == 0 and name in length_nll:
                    nll = F.cross_entropy(out["length_logits"], real.sum(1) - 1, reduction="none")
                    length_nll[name][rows] = nll.double().cpu().numpy()
            done += len(rows)
            if progress is not None:
                progress(done, count * draws)
    if not all(np.isfinite(values).all() for values in (*sums.values(), *length_nll.values())):
        raise MmldlmError("the model returned a NaN or infinite likelihood on validation text: its weights are corrupt")
    return Likelihood(sums, num_correct, length_nll, masked_count, lengths.astype(np.float64))


def _by_row(values: Tensor, owner: Tensor, count: int) -> np.ndarray:
    return torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(0, owner, values).cpu().numpy()
