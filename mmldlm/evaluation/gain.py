"""The conditioning gain: how much a latent helps a model with its text, and a text with its
latent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
from mmldlm.evaluation.sentences import Log, Sentences, choose_sentences, prefixed, spread
from mmldlm.evaluation.settings import GainSettings
from mmldlm.evaluation.statistics import Estimate, mean, paired_bootstrap
from mmldlm.evaluation.texts import (
    Arms,
    Scorer,
    TextArms,
    decode,
    differences,
    measure_set,
    measure_text_arms,
    written_records,
)
from mmldlm.inference.inputs import (
    encode_texts,
    encoder_identity,
    reason_without_encoder,
)
from mmldlm.inference.search import open_judge, run_search
from mmldlm.sampling.judge import Judge
from mmldlm.sampling.latents import steps_given_text
from mmldlm.sampling.model import Model
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.formatting import count_noun


def untrained_control(model: Any, seed: int, random_gates: bool) -> Any:
    """Return a fresh model with the same config and scaling of latents.

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
    fresh.normalizes_latents = model.normalizes_latents
    return fresh.to(device).eval()


def untrained_controls(model: Model, seed: int) -> Iterator[tuple[str, Model]]:
    """Yield name and model of both controls (`untrained_control`)."""
    yield "untrained", untrained_control(model, seed, random_gates=False)
    yield "untrained_random_gates", untrained_control(model, seed, random_gates=True)


# Arm, sentences, the texts that were written from their latents, and log.
Written = tuple[str, Sentences, list[list[int]], Log]


def evaluate(
    pretrained: Pretrained, store: Store, settings: GainSettings | None = None, log: Log = print
) -> EvaluationReport:
    """Measure the conditioning gain in both directions, for the model and for two untrained
    controls.

    Args:
        pretrained: Model, tokenizer and settings.
        store: Validation split that was not used in training.
        settings: Extent and options.
        log: See `sentences.Log`.

    Raises:
        UserError: the store does not match the model, or the model was trained in no mode that is
            measured.
        MmldlmError: NaN predictions.
    """
    settings = settings or GainSettings()
    started = time.perf_counter()
    pretrained.check_guidance(settings.guidance)
    _check_modes(pretrained)
    judge = _open_judge(pretrained, settings)
    sentences = choose_sentences(store, pretrained.model, settings.num_samples, settings.seed)
    few = sentences.part(range(min(settings.control_samples, len(sentences))), settings.seed)
    arms: Arms = {"model": {}, "untrained": {}, "untrained_random_gates": {}}
    notes, texts, examples = _notes(pretrained), TextArms(), []
    written: list[Written] = []
    writes = pretrained.reads_latents and pretrained.supports("l2t")
    embeds = "t2l" in pretrained.task.samplers and pretrained.supports("t2l")
    if not pretrained.reads_latents:
        arms["model"] |= likelihood_estimates(
            measure_likelihood(pretrained, sentences, None, settings, log)
        )
        made = write_unconditionally(pretrained, len(sentences), settings, log)
        texts = measure_set(pretrained, sentences, made.tokens)
        texts.conditions |= text_costs(made)
    elif writes:
        found = measure_l2t(pretrained, pretrained.model, sentences, settings, log)
        arms["model"] |= found.estimates
        texts = measure_text_arms(pretrained, store, sentences, found.written, settings.seed, log)
        texts.conditions |= found.costs
        written.append(("model", sentences, found.written, log))
        searched = None
        if judge is not None:
            searched = add_search(
                texts, pretrained, sentences, found.written, judge, settings, log
            )
            written.append((SEARCH, sentences, searched, prefixed(log, SEARCH)))
        examples = example_records(pretrained, sentences, found.written, searched)
    if embeds:
        arms["model"] |= measure_t2l(
            pretrained, pretrained.model, sentences, sentences.latents, settings, log
        )
        arms["floors"] = chance_baselines(sentences, pretrained.model)
    for name, control in untrained_controls(pretrained.model, settings.seed):
        say = prefixed(log, name)
        if not pretrained.reads_latents:
            likelihood = measure_likelihood(
                replace(pretrained, model=control), few, None, settings, say
            )
            arms[name] |= likelihood_estimates(likelihood)
        elif writes:
            found = measure_l2t(pretrained, control, few, settings, say)
            arms[name] |= found.estimates
            written.append((name, few, found.written, say))
        if embeds:
            gallery = sentences.latents
            arms[name] |= measure_t2l(pretrained, control, few, gallery, settings, say)
        del control  # before the next one is made: one at a time beside the model
    notes += _add_reencoding(pretrained, arms, written)
    for name, estimates in texts.arms.items():
        arms.setdefault(name, {}).update(estimates)
    conditions = _conditions(pretrained, store, sentences, settings) | {
        "num_control_sentences": len(few),
        "seconds": round(time.perf_counter() - started, 1),
        "notes": notes + texts.notes,
    }
    return EvaluationReport(conditions | texts.conditions, arms, examples, texts.differences)


def _add_reencoding(pretrained: Pretrained, arms: Arms, written: list[Written]) -> list[str]:
    """Embed every arm's texts again; return a note with the reason if the encoder is not
    available.
    """
    try:
        for name, sentences, texts, log in written:
            estimates = reencoded_estimates(pretrained, texts, sentences, log)
            arms.setdefault(name, {}).update(estimates)
    except (UserError, ImportError, OSError) as error:
        return [f"written texts are not embedded again: {reason_without_encoder(error)}"]
    return []


def _conditions(
    pretrained: Pretrained, store: Store, sentences: Sentences, settings: GainSettings
) -> dict[str, Any]:
    """Return how the measurements were taken."""
    task = pretrained.task
    sampler = settings.sampler or task.evaluation_decoding
    options = writing_options(pretrained, settings, settings.sampler or task.samplers["l2t"][0])
    if not pretrained.reads_latents:
        sampler = f"{task.samplers['unconditional'][0]}, without an embedding"
        options.pop("presence_penalty", None)
    latent_steps = None
    if pretrained.latent_config is not None:
        latent_steps = settings.latent_steps or steps_given_text(pretrained.latent_diffusion)
    return {
        "store": store.root.name,
        "num_sentences": len(sentences),
        "num_text_tokens": int(sum(len(text) + 1 for text in sentences.tokens)),
        "nelbo_draws": settings.num_draws,
        "text_steps": options.get("num_steps"),
        "likelihood": "exact" if task.exact_likelihood else "upper bound (NELBO)",
        "text_sampler": sampler,
        "latent_steps": latent_steps,
        "guidance": settings.guidance,
        "presence_penalty": options.get("presence_penalty"),
        "seed": settings.seed,
        "num_parameters": sum(parameter.numel() for parameter in pretrained.model.parameters()),
    }


def _check_modes(pretrained: Pretrained) -> None:
    """Raise a UserError for a model of latents that was trained in neither direction."""
    modes = [mode for mode in ("l2t", "t2l") if mode in pretrained.task.samplers]
    if pretrained.reads_latents and not any(map(pretrained.supports, modes)):
        pretrained.check_mode(modes[0])


def _open_judge(pretrained: Pretrained, settings: GainSettings) -> Judge | None:
    """The judge of --search, opened before anything is measured.

    Raises:
        UserError: a model that writes no texts from latents, or a judge that is not available.
    """
    if settings.way is None:
        return None
    pretrained.check_mode("l2t")
    return open_judge(settings, pretrained)


def _notes(pretrained: Pretrained) -> list[str]:
    """Return the limits that the model's training sets to the measurements."""
    if not pretrained.reads_latents:
        return [
            "the model reads no latents: only its likelihood and texts without a condition are"
            " measured"
        ]
    notes = []
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
    written: list[list[int]],
    searched: list[list[int]] | None = None,
) -> list[dict[str, Any]]:
    """Return ten sentences and their written texts, spread evenly over the draw and not selected
    by quality.

    Args:
        written: N lists of ids.
        searched: N texts that a search found, if there was one.
    """
    rows = spread(len(sentences), 10)
    records = [
        {"sentence": sentences.texts[row], **record}
        for row, record in zip(rows, written_records(pretrained, sentences, written, rows))
    ]
    if searched is not None:
        texts = decode(pretrained, [searched[row] for row in rows])
        for record, text in zip(records, texts):
            record["searched"] = text
    return records


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
    texts = decode(pretrained, written)
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
    cosine_before = metrics.cosine_similarity(judge.embed(written), sentences.latents)
    # A text without an embedding, which the search ranks last by -1, scores 0 as above.
    cosine_after = np.where(texts.cosine == -1, 0.0, texts.cosine)
    cosine = {"judge_cosine": mean(cosine_after, "cosine")}
    found.arms[SEARCH] = scorer.estimates(scores) | cosine
    found.arms.setdefault("model", {})["judge_cosine"] = mean(cosine_before, "cosine")
    change = differences(scores, before, settings.seed)
    change["judge_cosine"] = paired_bootstrap(
        cosine_after, cosine_before, settings.seed, unit="cosine"
    )
    found.differences[f"{SEARCH}_minus_model"] = change
    found.conditions[SEARCH] = {
        "what": description,
        "most_judge_calls": int(np.max(texts.calls)),
        **texts.cost.per_text(),
    }
    return texts.tokens
