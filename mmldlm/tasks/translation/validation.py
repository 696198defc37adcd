"""Evaluation of the translation task: a pass per trained mode, and one with the null condition."""

from __future__ import annotations

from mmldlm.tasks.translation.config import TranslationConfig
from mmldlm.tasks.validation import PassTotals


def passes_of(config: TranslationConfig) -> list[tuple[str, str, float]]:
    """Return name, mode and fraction of null conditions of each pass over the validation
    samples.
    """
    found = []
    for mode, weight in config.training.mode_weights().items():
        if weight > 0:
            found.append((mode, mode, 0.0))
            if mode == "l2t" and config.training.condition_dropout > 0:
                found.append(("l2t_null", "l2t", 1.0))
    return found


def figures(totals: dict[str, PassTotals]) -> dict[str, float]:
    """Return the validation metrics.

    Returns:
        {mode}_nelbo (nats per token, EOS counted), {mode}_token_accuracy (at masked positions),
        {mode}_length_nll, {mode}_latent_mse, {mode}_latent_cosine; l2t_gain_null: NELBO with the
        null minus with the right latent. A figure without anything scored is left out.
    """
    found: dict[str, float] = {}
    for name, total in totals.items():
        sums = total.sums
        if not name.startswith("t2l") and total.num_tokens:
            found[f"{name}_nelbo"] = sums["text_nelbo_sum"] / total.num_tokens
            found[f"{name}_token_accuracy"] = sums["text_correct"] / max(sums["text_masked"], 1)
            found[f"{name}_length_nll"] = sums["length_nll_sum"] / max(sums["length_scored"], 1)
        if sums["latent_scored"]:
            found[f"{name}_latent_mse"] = sums["latent_error_sum"] / sums["latent_scored"]
            found[f"{name}_latent_cosine"] = sums["latent_cosine_sum"] / sums["latent_scored"]
    if "l2t_null_nelbo" in found:
        found["l2t_gain_null"] = found["l2t_null_nelbo"] - found["l2t_nelbo"]
    return found
