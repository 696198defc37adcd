"""Evaluation of a baseline during training: given its latents and the null latent, or
unconditionally.
"""

from __future__ import annotations

from mmldlm.engines.base import Engine
from mmldlm.tasks.baselines.common.data import BaselineData
from mmldlm.tasks.baselines.common.task import BaselineTask
from mmldlm.tasks.validation import PassTotals, Validation


def validation(task: BaselineTask, data: BaselineData, engine: Engine) -> Validation:
    """Return the passes over the validation samples: l2t and, if it is trained, l2t_null; or
    unconditional.
    """
    config, seed = data.config, data.config.training.seed + Validation.SEED_OFFSET
    if config.model.conditioning == "none":
        passes = [("unconditional", task.collator(data, seed))]
    else:
        passes = [("l2t", task.collator(data, seed, condition_dropout=0.0))]
        if config.condition_dropout > 0:
            passes.append(("l2t_null", task.collator(data, seed, condition_dropout=1.0)))
    return Validation(task, data, engine, passes, lambda totals: figures(task, totals))


def figures(task: BaselineTask, totals: dict[str, PassTotals]) -> dict[str, float]:
    """Return `{pass}_{metric.evaluation}` of every metric, and l2t_gain_null: the first metric
    with the null minus with the right latent."""
    found = {}
    for name, total in totals.items():
        counts = total.counts | {
            "text_tokens": total.num_tokens
        }  # without samples that were left out
        for metric in task.metrics:
            value = metric.value(total.sums, counts)
            if value is not None:
                found[f"{name}_{metric.evaluation or metric.name}"] = value
    first = task.metrics[0].evaluation or task.metrics[0].name
    if f"l2t_{first}" in found and f"l2t_null_{first}" in found:
        found["l2t_gain_null"] = found[f"l2t_null_{first}"] - found[f"l2t_{first}"]
    return found
