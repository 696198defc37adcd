"""The exact likelihood of texts under a sampler whose order does not depend on its draws.

Where the positions of each pass are a function of latent and tokens that stand, a text can come
about in one way only. Its probability is then the product, over passes and the positions that each
fills, of p(token | what stood).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.diffusion import MaskedDiffusion
from mmldlm.errors import MmldlmError
from mmldlm.sampling.latents import pad_texts
from mmldlm.sampling.settings import DrawSettings
from mmldlm.sampling.strategies import TextStrategy
from mmldlm.sampling.text import Denoiser, start_decoding


@dataclass
class SamplerLikelihood:
    """Results per text, [N] each.

    Attributes:
        nats: fp64, -log p(text | latent, length) of the sampler at temperature 1, without guidance
            and penalties.
        passes: int64, passes that wrote the text.
    """

    nats: np.ndarray
    passes: np.ndarray


@torch.inference_mode()
def sampler_likelihood(
    model: nn.Module,
    texts: Sequence[Sequence[int]],
    latents: Tensor | None,
    *,
    diffusion: MaskedDiffusion,
    sampler: str,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    batch_tokens: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> SamplerLikelihood:
    """Run a sampler with the true tokens in place of its draws, and add up what it gave them.

    With a sampler in `BY_CERTAINTY` the result is exact. With a drawn order it is that of
    one order: its mean over orders is an upper bound on the sampler's negative log-likelihood
    (Jensen).

    Args:
        model: with the forward contract of MultimodalMMDiT.
        texts: N lists of ids without EOS. The sampler writes their EOS, at no cost: lengths are
            scored apart.
        latents: [N, D] (or [N, M, D]) in the encoder's space, or None.
        diffusion: masking process of training.
        sampler: a name of STRATEGIES.
        options: of the sampler (`TextStrategy.settings_class`).
        seed: of a drawn order; that of a text depends on the seed and its index only.
        progress: called after every pass with the number of tokens scored and in total.

    Raises:
        MmldlmError: NaN logits.
        ValueError: unknown sampler.
        UserError: an option that the sampler does not read, or out of range.
    """
    lengths = np.array([len(text) + 1 for text in texts])
    nats, passes = np.zeros(len(texts)), np.zeros(len(texts), np.int64)
    done, total = 0, int((lengths - 1).sum())
    for rows in token_budget_batches(lengths, batch_tokens):
        index = torch.from_numpy(rows.copy())
        strategy = start_decoding(
            sampler,
            model,
            torch.from_numpy(lengths[rows]),
            rows.tolist(),
            diffusion=diffusion,
            seed=seed,
            options=options,
            draw=DrawSettings(temperature=1.0),
        )
        state = strategy.state
        tokens, _ = pad_texts(
            [texts[row] for row in rows],
            state.eos_token_id,
            state.pad_token_id,
            state.tokens.device,
        )
        denoiser = Denoiser(model, None if latents is None else latents[index])
        sums = torch.zeros(len(rows), dtype=torch.float64, device=tokens.device)
        while len(positions := strategy.positions()):
            done += _score_pass(denoiser, strategy, positions, tokens, sums)
            if progress is not None:
                progress(done, total)
        nats[rows], passes[rows] = sums.cpu().numpy(), strategy.passes.cpu().numpy()
    if not np.isfinite(nats).all():
        raise MmldlmError(
            "the model returned a NaN or infinite likelihood on validation text: its weights are"
            " corrupt"
        )
    return SamplerLikelihood(nats, passes)


def _score_pass(
    denoiser: Denoiser, strategy: TextStrategy, positions: Tensor, tokens: Tensor, sums: Tensor
) -> int:
    """Take one pass, write the true tokens [B, S], and add -log p to sums [B]; return the number
    of tokens written.
    """
    logits = denoiser(strategy.state, strategy.timesteps(), positions)
    strategy.prepare(positions, logits)
    chosen = strategy.choose(positions, logits)
    at = positions[chosen]
    targets = tokens.flatten()[at]
    nll = nn.functional.cross_entropy(logits[chosen].float(), targets, reduction="none")
    sums.index_add_(0, at // tokens.shape[1], nll.double())
    strategy.commit(at, targets)
    return len(at)
