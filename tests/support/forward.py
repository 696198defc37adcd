"""A forward pass from flat arguments, under the names that batches have."""

from __future__ import annotations

from torch import Tensor, nn

from mmldlm.models.base import EncodedLatent, LatentInputs, ModelOutput, TextInputs
from mmldlm.models.token_scores import LogitsFunction, TokenQuery, TokenScores


def encode(latents: LatentInputs | None) -> EncodedLatent:
    """What a toy model makes of latents: their values in the place of chunk tokens."""
    if latents is None:
        return EncodedLatent()
    return EncodedLatent(latents.values, timesteps=latents.timesteps)


def values_of(latents: LatentInputs | EncodedLatent | None) -> Tensor | None:
    """The values of a toy model's latents, encoded or not."""
    if latents is None:
        return None
    return latents.tokens if isinstance(latents, EncodedLatent) else latents.values


def scores_of(logits: Tensor, query: TokenQuery) -> TokenScores:
    """What a toy model answers to a query whose positions have the logits [M, V]."""
    if query.targets is None:
        return TokenScores(logits)
    nll = nn.functional.cross_entropy(logits, query.targets, reduction="none")
    return TokenScores(nll=nll, correct=logits.argmax(-1) == query.targets)


def run_model(
    model: nn.Module,
    text_tokens: Tensor | None,
    latents: Tensor | EncodedLatent | None = None,
    text_timesteps: Tensor | None = None,
    latent_timesteps: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    text_is_null: Tensor | None = None,
    latent_is_null: Tensor | None = None,
    token_positions: Tensor | None = None,
    text_positions: Tensor | None = None,
    text_targets: Tensor | None = None,
    text_weights: Tensor | None = None,
    text_function: LogitsFunction | None = None,
    **more,
) -> ModelOutput:
    """model(TextInputs(...), LatentInputs(...), TokenQuery(...), **more)."""
    text = None
    if text_tokens is not None:
        text = TextInputs(
            text_tokens, text_timesteps, attention_mask, text_is_null, token_positions
        )
    if isinstance(latents, Tensor):
        latents = LatentInputs(latents, latent_timesteps, latent_is_null)
    query = TokenQuery(text_positions, text_targets, text_weights, function=text_function)
    return model(text, latents, query, **more)
