"""Measure one model in each direction: text from latents (l2t) and latents from text (t2l)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mmldlm.evaluation import metrics
from mmldlm.evaluation.nelbo import Likelihood, measure
from mmldlm.evaluation.sentences import Log, Sentences, batch_budget
from mmldlm.evaluation.settings import GainSettings, ImageSettings
from mmldlm.evaluation.statistics import Estimate, mean, ratio
from mmldlm.sampling.latents import sample_latents, steps_given_text
from mmldlm.sampling.model import Model
from mmldlm.sampling.records import TextSamples
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.formatting import count_noun
from mmldlm.utils.settings import options_of

NATS = "nats/token"
# Names of nelbo.CONDITIONS in reports (JSON keys such as nelbo_right).
_REPORT_NAMES = {"matched": "right", "shuffled": "shuffled", "null": "null"}


@dataclass
class TextResult:
    """The texts that a model wrote from latents, and its likelihood of the right ones.

    Attributes:
        estimates: Estimates by name.
        written: Token ids of the written texts.
        costs: Costs of these texts, as entries of the report's conditions.
    """

    estimates: dict[str, Estimate]
    written: list[list[int]]
    costs: dict[str, float | None] = field(default_factory=dict)


def measure_l2t(
    pretrained: Pretrained,
    model: Model,
    sentences: Sentences,
    settings: GainSettings,
    log: Log,
) -> TextResult:
    """Measure NELBO, lengths and sampled texts of one model.

    A sampled text depends on its latent only. The shuffled condition therefore reuses the text
    sampled from the other sentence's latent and compares it with this sentence's reference.
    """
    latents, shuffled_index = torch.from_numpy(sentences.latents), sentences.shuffled_index
    task, arm = pretrained.task, replace(pretrained, model=model)
    likelihood = measure_likelihood(arm, sentences, latents, settings, log)
    estimates = likelihood_estimates(likelihood)
    sampler, steps = settings.sampler or task.samplers["l2t"][0], ""
    options = writing_options(arm, settings, sampler)
    if "num_steps" in options:
        steps = f" in {settings.num_steps} {sampler} steps"
    # Writing takes longer, and may be interrupted: what is measured is said before.
    progress = log(
        f"{_describe_gain(estimates)}; writing {len(sentences)} texts from their embeddings{steps}"
    )
    samples = task.write_texts(
        arm, latents, sampler=sampler, seed=settings.seed, progress=progress, **options
    )
    estimates |= text_estimates(samples, sentences.tokens, shuffled_index, likelihood.num_tokens)
    flops = task.writing_flops(model.config, samples)
    costs = text_costs(samples) | {"gflops_per_text": flops and flops / len(sentences) / 1e9}
    return TextResult(estimates, samples.tokens, costs)


def _describe_gain(estimates: dict[str, Estimate]) -> str:
    gains = [
        f"{estimates[key].value:.3f} +- {estimates[key].se:.3f} {estimates[key].unit} over {other}"
        for key, other in (("gain_null", "none"), ("gain_shuffled", "another text's"))
    ]
    return f"gain of the text's own embedding: {', '.join(gains)}"


def writing_options(
    pretrained: Pretrained, settings: GainSettings, sampler: str
) -> dict[str, Any]:
    """Return options of `TextTask.write_texts` that the task and a sampler read."""
    known = pretrained.task.sampling_options - pretrained.task.unread_options("l2t", sampler)
    keys = known & options_of(GainSettings).keys() - {"sampler"}
    options = {key: getattr(settings, key) for key in sorted(keys)}
    return options | batch_budget(pretrained.model, settings.batch_size)


def text_costs(samples: TextSamples) -> dict[str, float]:
    """Return what the texts cost: passes one after the other, and rows of passes (guidance counts
    twice).
    """
    passes = samples.passes.double()
    return {
        "passes_per_text": float(passes.mean()),
        "most_passes": float(passes.max()),
        "rows_per_text": samples.num_rows / len(samples.tokens),
        "threads": torch.get_num_threads(),
    }


def write_unconditionally(
    pretrained: Pretrained, count: int, settings: GainSettings, log: Log
) -> TextSamples:
    """Write texts without a latent, by the task's default sampler."""
    task, steps = pretrained.task, {}
    if "num_steps" in task.sampling_options:
        steps = {"num_steps": settings.num_steps}
    return task.write_texts(
        pretrained,
        None,
        num_samples=count,
        sampler=task.samplers["unconditional"][0],
        seed=settings.seed,
        progress=log(f"writing {count_noun(count, 'text')} without an embedding"),
        **steps,
        **batch_budget(pretrained.model, settings.batch_size),
    )


def measure_likelihood(
    pretrained: Pretrained,
    sentences: Sentences,
    latents: torch.Tensor | None,
    settings: GainSettings | ImageSettings,
    log: Log,
) -> Likelihood:
    """Score the sentences under each latent of `CONDITIONS`; without latents, under the null
    condition alone.
    """
    task = pretrained.task
    draws = 1 if task.exact_likelihood else settings.num_draws
    what = "exact NLL" if task.exact_likelihood else "NELBO"
    conditions = "" if latents is None else ", right / shuffled / null latent"
    progress = log(f"{what} of {len(sentences)} texts, {draws} draws{conditions}")
    return measure(
        pretrained.model,
        sentences.tokens,
        latents,
        sentences.shuffled_index,
        score=partial(task.score_texts, pretrained),
        draws=draws,
        seed=settings.seed,
        progress=progress,
        **batch_budget(pretrained.model, settings.batch_size),
    )


def likelihood_estimates(likelihood: Likelihood) -> dict[str, Estimate]:
    """Return per-token estimates (sum over sentences / sum of their tokens, EOS counted) and
    paired differences.
    """
    nelbo, tokens = likelihood.nelbo, likelihood.num_tokens
    result = {
        f"nelbo_{_REPORT_NAMES[name]}": ratio(values, tokens, NATS)
        for name, values in nelbo.items()
    }
    if "matched" in nelbo:
        difference = nelbo["shuffled"] - nelbo["matched"]
        result["gain_null"] = ratio(nelbo["null"] - nelbo["matched"], tokens, NATS)
        result["gain_shuffled"] = ratio(difference, tokens, NATS)
        # Not a quality measure: shows whether the model reads its latent at all, so that a gain of
        # 0 is meaningful.
        result["latent_sensitivity"] = mean(np.abs(difference) / tokens, NATS)
    for name, correct in likelihood.correct.items():
        result[f"token_accuracy_{_REPORT_NAMES[name]}"] = ratio(
            correct, likelihood.masked, "share of masked"
        )
    for name, nll in likelihood.length_nll.items():
        result[f"length_nll_{_REPORT_NAMES[name]}"] = mean(nll, "nats/text")
    return result


def text_estimates(
    samples: TextSamples,
    references: Sequence[Sequence[int]],
    shuffled_index: np.ndarray,
    num_tokens: np.ndarray,
) -> dict[str, Estimate]:
    """Compare the ids of sampled texts, and of those sampled from another sentence's latent, with
    the references.

    `text_arms` compares strings.
    """
    shuffled = [samples.tokens[other] for other in shuffled_index]
    f1 = metrics.token_f1(samples.tokens, references)
    shuffled_f1 = metrics.token_f1(shuffled, references)
    lengths = samples.lengths.numpy()
    return {
        "f1_right": mean(f1, "points", 100),
        "f1_shuffled": mean(shuffled_f1, "points", 100),
        "f1_gap": mean(f1 - shuffled_f1, "points", 100),
        "passes": mean(samples.passes.numpy(), "passes/text"),
        "length_error": mean(np.abs(lengths - num_tokens), "tokens"),
        "length_error_shuffled": mean(np.abs(lengths[shuffled_index] - num_tokens), "tokens"),
    }


def measure_t2l(
    pretrained: Pretrained,
    model: Model,
    sentences: Sentences,
    gallery: np.ndarray,
    settings: GainSettings,
    log: Log,
) -> dict[str, Estimate]:
    """Compare latents sampled from text with the encoder's.

    Args:
        gallery: [N, D] (or [N, M, D]) latents for retrieval; the first rows are those of the
            sentences.
    """
    steps = settings.latent_steps or steps_given_text(pretrained.latent_diffusion)
    words = f"{count_noun(len(sentences), 'text')} in {count_noun(steps, 'step')}"
    progress = log(f"embedding {words}, retrieval among {len(gallery)}")
    latents = sample_latents(
        model,
        sentences.tokens,
        diffusion=pretrained.latent_diffusion,
        steps=steps,
        guidance=settings.guidance,
        renormalize=pretrained.renormalize,
        clamp=pretrained.clamp_x0,
        seed=settings.seed,
        progress=progress,
        **batch_budget(model, settings.batch_size),
    ).numpy()
    return latent_estimates(latents, sentences, gallery)


def latent_estimates(
    predictions: np.ndarray, sentences: Sentences, gallery: np.ndarray
) -> dict[str, Estimate]:
    """Return cosine, recall and norm ratio of predicted latents [Q, D].

    With several latents per text, [Q, M, D], cosine and norm ratio are means over them; retrieval
    uses their mean.
    """
    pooled, pooled_gallery = metrics.pool_latents(predictions), metrics.pool_latents(gallery)
    ranks = metrics.ranks(pooled, pooled_gallery, np.arange(len(predictions)))
    norm_ratio = np.linalg.norm(predictions, axis=-1) / np.linalg.norm(sentences.latents, axis=-1)
    shuffled = predictions[sentences.shuffled_index]
    return {
        "cosine": mean(metrics.cosine_similarity(predictions, sentences.latents), "cosine"),
        "cosine_shuffled": mean(metrics.cosine_similarity(shuffled, sentences.latents), "cosine"),
        "recall_at_1": mean(ranks < 1, f"share, of {len(gallery)}"),
        "recall_at_10": mean(ranks < 10, f"share, of {len(gallery)}"),
        "norm_ratio": mean(metrics.mean_over_latents(norm_ratio), "made / true"),
    }


def chance_baselines(sentences: Sentences, model: Model) -> dict[str, Estimate]:
    """Return t2l results without reading the text: the mean training latent for every sentence,
    and chance.
    """
    average = model.unscale_latents(
        torch.zeros(1, model.config.latent_dim, device=model.latent_mean.device)
    )
    constant = np.broadcast_to(average.cpu().numpy(), sentences.latents.shape)
    estimates = latent_estimates(constant, sentences, sentences.latents)
    result = {f"mean_embedding_{name}": value for name, value in estimates.items()}
    result["chance_recall_at_1"] = Estimate(1 / len(sentences), 0.0, f"share, of {len(sentences)}")
    return result
