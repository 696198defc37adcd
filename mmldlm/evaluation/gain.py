"""The conditioning gain: how much a latent helps a model with its text, and a text with its
latent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from mmldlm.data.sentences import split_into_parts
from mmldlm.data.store import Store
from mmldlm.errors import UserError
from mmldlm.evaluation import metrics
from mmldlm.evaluation.directions import (
    DirectionResult,
    chance_baselines,
    likelihood_estimates,
    measure_l2t,
    measure_likelihood,
    measure_t2l,
    text_costs,
    write_unconditionally,
    writing_options,
)
from mmldlm.evaluation.gain_report import EvaluationReport
from mmldlm.evaluation.sentences import Log, Sentences, choose_sentences
from mmldlm.evaluation.settings import GainSettings
from mmldlm.evaluation.statistics import Estimate, mean, paired_bootstrap
from mmldlm.evaluation.texts import (
    Scorer,
    TextArms,
    decode,
    differences,
    measure_set,
    measure_text_arms,
)
from mmldlm.inference.inputs import (
    encode_texts,
    encoder_identity,
    reason_without_encoder,
)
from mmldlm.inference.search import open_judge, run_search
from mmldlm.sampling.judge import Judge, cosines
from mmldlm.sampling.latents import steps_given_text
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.formatting import count_noun


def untrained_control(model: nn.Module, seed: int, random_gates: bool) -> nn.Module:
    """Return a fresh model with the same config and buffers (latent statistics).

    Args:
        random_gates: Whether to initialize the weights that start at zero, too. Without it,
            adaLN-Zero makes the model the identity: it ignores its latent, and its gain is 0 by
            construction. With it, the text depends on the latent and a gain of 0 is a finding.
    """
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = type(model)(model.config)
        if random_gates:
            for name, parameter in fresh.named_parameters():
                if (parameter.dim() == 2 or name.endswith(".gate")) and not parameter.any():
                    nn.init.normal_(parameter, std=0.1)
    for name, buffer in model.named_buffers():
        fresh.get_buffer(name).copy_(buffer)
    return fresh.to(device).eval()


def evaluate(
    pretrained: Pretrained, store: Store, settings: GainSettings | None = None, log: Log = print
) -> EvaluationReport:
    """Measure the conditioning gain in both directions, for the model and for two untrained
    controls.

    Args:
        pretrained: Model, tokenizer and settings.
        store: Validation split that was not used in training.
        settings: Extent and options.
        log: See `suite.Log`.

    Raises:
        UserError: the store does not match the model.
        MmldlmError: NaN predictions.
    """
    settings = settings or GainSettings()
    started = time.perf_counter()
    model = pretrained.model
    pretrained.check_guidance(settings.guidance)
    judge = _open_judge(pretrained, settings)
    sentences = choose_sentences(store, model, settings.num_samples, settings.seed)
    control_sentences = sentences.first(
        min(settings.control_samples, len(sentences)), settings.seed
    )
    controls = {
        "untrained": untrained_control(model, settings.seed, random_gates=False),
        "untrained_random_gates": untrained_control(model, settings.seed, random_gates=True),
    }
    arms: dict[str, dict[str, Any]] = {"model": {}, **{name: {} for name in controls}}
    examples: list[dict[str, Any]] = []
    notes, texts = _notes(pretrained), TextArms()
    if not pretrained.reads_latents:
        for name, module in {"model": model, **controls}.items():
            arm, own = (
                replace(pretrained, model=module),
                sentences if name == "model" else control_sentences,
            )
            found = measure_likelihood(
                arm, own, None, settings, log if name == "model" else _prefixed(log, name)
            )
            arms[name].update(likelihood_estimates(found))
        made = write_unconditionally(pretrained, len(sentences), settings, log)
        texts = measure_set(pretrained, sentences, made.tokens)
        texts.conditions |= text_costs(made)
    elif pretrained.supports("l2t"):
        written = measure_l2t(pretrained, model, sentences, settings, log)
        arms["model"].update(written.estimates)
        texts = measure_text_arms(
            pretrained, store, sentences, written.written, settings.seed, log
        )
        texts.conditions |= written.costs
        searched = None
        if judge is not None:
            searched = add_search(
                texts, pretrained, sentences, written.written, judge, settings, log
            )
        examples = example_records(
            pretrained, sentences, written, searched and decode(pretrained, searched)
        )
        results = [("model", written.written, sentences)]
        results += [(SEARCH, searched, sentences)] if searched else []
        for name, control in controls.items():
            result = measure_l2t(
                pretrained, control, control_sentences, settings, _prefixed(log, name)
            )
            arms[name].update(result.estimates)
            results.append((name, result.written, control_sentences))
        notes += _add_reencoding(pretrained, arms, results, log)
    if "t2l" in pretrained.task.samplers and pretrained.supports("t2l"):
        gallery = sentences.latents
        arms["model"].update(
            measure_t2l(pretrained, model, sentences, gallery, settings, log).estimates
        )
        arms["floors"] = chance_baselines(sentences, model)
        for name, control in controls.items():
            result = measure_t2l(
                pretrained, control, control_sentences, gallery, settings, _prefixed(log, name)
            )
            arms[name].update(result.estimates)
    conditions = _conditions(pretrained, store, sentences, settings) | {
        "num_control_sentences": len(control_sentences),
        "seconds": round(time.perf_counter() - started, 1),
        "notes": notes + texts.notes,
    }
    for name, estimates in texts.arms.items():
        arms.setdefault(name, {}).update(estimates)
    return EvaluationReport(conditions | texts.conditions, arms, examples, texts.differences)


def _add_reencoding(
    pretrained: Pretrained,
    arms: dict[str, dict[str, Any]],
    results: list[tuple[str, list[list[int]], Sentences]],
    log: Log,
) -> list[str]:
    """Embed every arm's texts again; return a note with the reason if the encoder is not
    available.
    """
    try:
        for name, written, sentences in results:
            say = log if name == "model" else _prefixed(log, name)
            arms.setdefault(name, {}).update(
                reencoded_estimates(pretrained, written, sentences, say)
            )
    except (UserError, ImportError, OSError) as error:
        return [f"written texts are not embedded again: {reason_without_encoder(error)}"]
    return []


def _conditions(
    pretrained: Pretrained, store: Store, sentences: Sentences, settings: GainSettings
) -> dict[str, Any]:
    """Return how the measurements were taken."""
    task = pretrained.task
    sampler = settings.sampler or task.evaluation_decoding
    has_penalty = "presence_penalty" in task.sampling_options
    reads_steps = "num_steps" in task.sampling_options
    if settings.sampler is not None:
        reads_steps = reads_steps and "num_steps" not in task.unread_options(
            "l2t", settings.sampler
        )
    if not pretrained.reads_latents:
        sampler, has_penalty = f"{task.samplers['unconditional'][0]}, without an embedding", False
    return {
        "store": store.root.name,
        "num_sentences": len(sentences),
        "num_text_tokens": int(sum(len(text) + 1 for text in sentences.tokens)),
        "nelbo_draws": settings.num_draws,
        "text_steps": settings.num_steps if reads_steps else None,
        "likelihood": "exact" if task.exact_likelihood else "upper bound (NELBO)",
        "text_sampler": sampler,
        "latent_steps": _latent_steps(pretrained, settings),
        "guidance": settings.guidance,
        "presence_penalty": settings.presence_penalty if has_penalty else None,
        "seed": settings.seed,
        "num_parameters": sum(parameter.numel() for parameter in pretrained.model.parameters()),
    }


def _open_judge(pretrained: Pretrained, settings: GainSettings) -> Judge | None:
    """The judge of --search, opened before anything is measured.

    Raises:
        UserError: a model that writes no texts from latents, or a judge that is not available.
    """
    if settings.way is None:
        return None
    pretrained.check_mode("l2t")
    return open_judge(settings, pretrained)


def _latent_steps(pretrained: Pretrained, settings: GainSettings) -> int | None:
    """Steps of t2l; None for a task without it."""
    if pretrained.latent_config is None:
        return None
    return settings.latent_steps or steps_given_text(pretrained.latent_diffusion)


def _prefixed(log: Log, name: str) -> Log:
    """Return a log that names the model."""
    return lambda line: log(f"{name.replace('_', ' ')}: {line}")


def _notes(pretrained: Pretrained) -> list[str]:
    """Return the limits that the model's training sets to the measurements."""
    notes = []
    if not pretrained.reads_latents:
        return [
            *notes,
            (
                "the model reads no latents: only its likelihood and texts without a condition are"
                " measured"
            ),
        ]
    if not pretrained.supports("l2t"):
        notes.append(
            "the model was not trained in mode l2t: text from embeddings is not evaluated"
        )
    if "t2l" in pretrained.task.samplers and not pretrained.supports("t2l"):
        notes.append(
            "the model was not trained in mode t2l: embeddings from text are not evaluated"
        )
    if pretrained.condition_dropout == 0:
        notes.append(
            "trained with condition_dropout=0: its null latent was never trained, so gain_null is"
            " not informative"
        )
    return notes


def example_records(
    pretrained: Pretrained,
    sentences: Sentences,
    result: DirectionResult,
    searched: list[str] | None = None,
    count: int = 10,
) -> list[dict]:
    """Return sentences and sampled texts, spread evenly over the draw and not selected by quality.

    Args:
        searched: N texts that a search found, if there was one.
    """
    rows = np.unique(
        np.linspace(0, len(sentences) - 1, min(count, len(sentences))).astype(int)
    ).tolist()
    written = pretrained.tokenizer.batch_decode(
        [result.written[row] for row in rows], skip_special_tokens=True
    )
    return [
        {
            "sentence": sentences.texts[row],
            "written": text,
            "set_f1": round(float(result.f1[row]), 3),
        }
        | ({} if searched is None else {"searched": searched[row]})
        for row, text in zip(rows, written)
    ]


def reencoded_estimates(
    pretrained: Pretrained, written: Sequence[Sequence[int]], sentences: Sentences, log: Log
) -> dict[str, Estimate]:
    """Compare the encoder's embeddings of written texts with the embeddings that they were written
    from.

    A text too short to be embedded (no character, or fewer than the model has latents per text)
    scores 0.

    Args:
        written: N lists of ids, one for each sentence.

    Raises:
        UserError, ImportError, OSError: as `encode_texts`, if the encoder is not available.
    """
    encoder_identity(pretrained)  # before the line of progress
    texts = [
        text.strip()
        for text in pretrained.tokenizer.batch_decode(written, skip_special_tokens=True)
    ]
    count = pretrained.model.config.num_latents
    rows = [
        row for row, text in enumerate(texts) if text and split_into_parts(text, count) is not None
    ]
    encoded = np.zeros_like(sentences.latents)
    progress = log(f"embedding {count_noun(len(rows), 'written text')} again with the encoder")
    if rows:
        encoded[rows] = encode_texts([texts[row] for row in rows], pretrained, progress)
    targets, others = sentences.latents, sentences.latents[sentences.shuffled_index]
    return {
        "reencoded_cosine": mean(metrics.cosine_similarity(encoded, targets), "cosine"),
        "reencoded_cosine_shuffled": mean(metrics.cosine_similarity(encoded, others), "cosine"),
    }


SEARCH = "search"


def add_search(
    found: TextArms,
    pretrained: Pretrained,
    sentences: Sentences,
    written: Sequence[Sequence[int]],
    judge: Judge,
    settings: GainSettings,
    log: Log,
) -> list[list[int]]:
    """Add the arm `search` and its paired differences to the model's texts; the search never reads
    the sentences.

    Args:
        found: Figures of the model's texts, which are completed here.
        written: N lists of ids, the model's texts.
        judge: Result of `open_judge`.

    Returns:
        N texts as lists of ids.
    """
    latents, description = torch.from_numpy(sentences.latents), settings.describe_search()
    progress = log(f"{description}, for {len(sentences)} embeddings")
    own = writing_options(pretrained, settings, pretrained.task.samplers["l2t"][0])
    texts = run_search(
        settings, pretrained, latents, judge, seed=settings.seed, progress=progress, **own
    )
    scorer = Scorer(pretrained, sentences, "bleu" in found.conditions, settings.seed)
    scores, before = scorer.overlap(texts.tokens), scorer.overlap(written)
    cosine_before = cosines(judge.embed(written), sentences.latents)
    cosine = {"judge_cosine": mean(texts.cosine, "cosine")}
    found.arms[SEARCH] = scorer.estimates(scores) | cosine
    found.arms.setdefault("model", {})["judge_cosine"] = mean(cosine_before, "cosine")
    change = differences(scores[0], before[0], settings.seed)
    change["judge_cosine"] = paired_bootstrap(
        texts.cosine, cosine_before, settings.seed, unit="cosine"
    )
    found.differences[f"{SEARCH}_minus_model"] = change
    found.conditions[SEARCH] = {
        "what": description,
        "most_judge_calls": int(np.max(texts.calls)),
        **texts.cost.per_text(),
    }
    return texts.tokens
