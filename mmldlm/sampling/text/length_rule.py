"""Choose the length of a text from the model's own p(length | latent); sampling never uses the
true length.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mmldlm.models.base import LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.device import device_of
from mmldlm.utils.counter_rng import Stream, uniforms

RULES = ("median", "mode", "sample")


def choose_lengths(logits: Tensor, rule: str = "median", uniform: Tensor | None = None) -> Tensor:
    """Choose lengths from the length head's logits.

    The median minimizes the expected absolute error and is the default with a latent. Without a
    latent the distribution is broad, and only drawing from it gives texts of different lengths.

    Args:
        logits: [B, L] for lengths 1 .. L, EOS counted.
        rule: one of RULES.
        uniform: [B] in [0, 1), required by `sample`.

    Returns:
        [B] int64 in 1 .. L.
    """
    if rule not in RULES:
        raise ValueError(f"length rule {rule!r}: expected one of {', '.join(RULES)}")
    if rule == "mode":
        return logits.argmax(-1) + 1
    cumulative = logits.double().softmax(-1).cumsum(-1)
    point = torch.full_like(cumulative[:, 0], 0.5) if rule == "median" else uniform.to(cumulative)
    below = (cumulative <= (point * cumulative[:, -1])[:, None]).sum(-1)
    return below.clamp_max(logits.shape[-1] - 1) + 1


@torch.inference_mode()
def predict_lengths(
    model: nn.Module,
    latents: Tensor | None,
    count: int | None = None,
    rule: str | None = None,
    seed: int = 0,
    batch_size: int = 512,
) -> Tensor:
    """Predict lengths with the model's length head; see `choose_lengths`.

    Args:
        latents: [count, D] (or [count, M, D]) in the encoder's space, or None.
        count: needed without latents.
        rule: None takes the median of p(length | latent), or a draw from p(length) without a
            latent.

    Returns:
        [count] int64 lengths, EOS counted.
    """
    if latents is not None:
        count = len(latents)
    assert count is not None, "count is needed without latents"
    rule = rule or ("sample" if latents is None else "median")
    device = device_of(model)
    uniform = uniforms(seed, Stream.LENGTH, range(count), (1,))[:, 0].to(device)
    if latents is None:
        start = torch.full((1, 1), model.config.mask_token_id, dtype=torch.int64, device=device)
        out = model(TextInputs(start), None, TokenQuery(start.new_empty(0)))
        logits = out.length_logits.expand(count, -1)
        return choose_lengths(logits, rule, uniform).cpu()
    parts = []
    for logits, part_uniform in zip(
        _length_logits(model, latents, batch_size), uniform.split(batch_size)
    ):
        parts.append(choose_lengths(logits, rule, part_uniform))
    return torch.cat(parts).cpu()


def _length_logits(model: nn.Module, latents: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Yield the length head's logits [B, L], batch by batch."""
    device = device_of(model)
    for part in latents.split(batch_size):
        yield model(None, LatentInputs(model.scale_latents(part.to(device)))).length_logits


@torch.inference_mode()
def most_probable_lengths(
    model: nn.Module, latents: Tensor, number: int, batch_size: int = 512
) -> tuple[Tensor, Tensor]:
    """Return the most probable lengths of each text, the best first, and their log-probabilities.

    Args:
        latents: [N, D] (or [N, M, D]) in the encoder's space.
        number: K; no more than there are lengths.

    Returns:
        [N, K] int64, EOS counted, and [N, K] fp64, both on the CPU.
    """
    parts = []
    for logits in _length_logits(model, latents, batch_size):
        top = logits.double().log_softmax(-1).topk(min(number, logits.shape[-1]), dim=-1)
        parts.append((top.indices.cpu() + 1, top.values.cpu()))
    lengths, scores = zip(*parts)
    return torch.cat(lengths), torch.cat(scores)
