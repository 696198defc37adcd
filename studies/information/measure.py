"""Measure speed against quality without one sample: NELBO_T by schedule, and the samplers' exact
likelihoods.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from mmldlm.data.store import Store
from mmldlm.errors import UserError
from mmldlm.evaluation.sentences import Log, batch_budget, choose_sentences
from mmldlm.evaluation.statistics import mean, ratio
from mmldlm.sampling.settings import BY_CERTAINTY
from mmldlm.sampling.strategies import STRATEGIES
from mmldlm.tasks.text_task import MaskedTextTask, Pretrained
from studies.information.curve import InformationCurve, TextCurves, text_curves
from studies.information.report import InformationReport, SamplerRow, ScheduleRow
from studies.information.sampler_likelihood import sampler_likelihood
from studies.information.schedule import even_schedule, optimal_schedules

NATS = "nats/text"
PASSES = (1, 2, 4, 8, 16)
ALL = "L"  # as many passes as positions
NUM_SENTENCES = 200


@dataclass
class InformationSettings:
    """Extent and options of the measurement.

    Attributes:
        num_samples: unseen sentences; None is 200, or all if there are fewer.
        samplers: whose exact likelihood is measured; None: the first of the task whose order is
            deterministic.
        seed: of every draw.
        batch_size: texts of full length per pass; None: the default token budget.
    """

    num_samples: int | None = None
    samplers: Sequence[str] | None = None
    seed: int = 0
    batch_size: int | None = None


def measure_information(
    pretrained: Pretrained, store: Store, settings: InformationSettings, log: Log = print
) -> InformationReport:
    """Measure the curves given the right and the null latent, NELBO_T of schedules, and samplers'
    likelihoods.

    Args:
        store: whose validation split was not used in training.
        log: see `suite.Log`.

    Raises:
        UserError: a task without masked diffusion, an unknown sampler, or a store that does not
            match the model.
        MmldlmError: NaN predictions.
    """
    started = time.perf_counter()
    check_task(pretrained)
    samplers = checked_samplers(pretrained, settings.samplers)
    model, count = pretrained.model, settings.num_samples or min(NUM_SENTENCES, len(store))
    sentences = choose_sentences(store, model, count, settings.seed)
    latents = torch.from_numpy(sentences.latents) if pretrained.reads_latents else None
    given = {"null": None} if latents is None else {"right": latents, "null": None}
    main = next(iter(given))
    curves = {}
    for name, condition in given.items():
        progress = log(
            f"information curve of {count} sentences at every mask count, {name} latent"
        )
        curves[name] = text_curves(
            model,
            sentences.tokens,
            condition,
            score=partial(pretrained.task.score_texts, pretrained),
            seed=settings.seed,
            progress=progress,
            **batch_budget(model, settings.batch_size),
        )
    nelbo = {name: nelbo_of(found) for name, found in curves.items()}
    sampled = [
        row
        for name in samplers
        for row in sampler_rows(
            pretrained, sentences.tokens, given[main], name, nelbo[main], settings, log
        )
    ]
    lengths = curves[main].lengths
    nll = {name: found.length_nll for name, found in curves.items()}
    conditions = {
        "store": store.root.name,
        "num_sentences": count,
        "mean_length": float(lengths.mean()),
        "condition": main,
        "max_length": model.config.max_seq_len,
        "seed": settings.seed,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.perf_counter() - started, 1),
        "notes": _notes(pretrained, count),
    }
    return InformationReport(
        conditions,
        curves={name: InformationCurve(found.nats) for name, found in curves.items()},
        schedules=[row for name, found in curves.items() for row in schedule_rows(name, found)],
        samplers=sampled,
        nelbo={name: ratio(values, lengths, "nats/token") for name, values in nelbo.items()},
        length_nll={
            name: mean(values, NATS) for name, values in nll.items() if values is not None
        },
    )


def check_task(pretrained: Pretrained) -> None:
    """Raise a UserError for a model whose information curve is not defined or whose text was not
    trained.
    """
    task = pretrained.task
    if not isinstance(task, MaskedTextTask):
        raise UserError(
            "a model of masked diffusion, whose NELBO is a sum over numbers of known tokens",
            f"task={task.name} in {pretrained.folder or 'a model'}",
            "measure it with `mmldlm evaluate`",
        )
    if pretrained.reads_latents:
        pretrained.check_mode("l2t")


def checked_samplers(pretrained: Pretrained, names: Sequence[str] | None) -> list[str]:
    """Return the samplers to measure.

    Raises:
        UserError: a sampler that the task lacks, or whose order is drawn.
    """
    kind = "l2t" if pretrained.reads_latents else "unconditional"
    known = pretrained.task.samplers[kind]
    deterministic = [name for name in known if name in BY_CERTAINTY]
    if names is None:
        return deterministic[:1]
    for name in names:
        pretrained.check_kind(kind, name)
        if name not in deterministic:
            raise UserError(
                "--samplers whose order does not depend on random numbers, so that their"
                " likelihood is exact: " + ", ".join(deterministic),
                name,
                "omit it; NELBO_T bounds the likelihood of a random order",
            )
    return list(names)


def nelbo_of(curves: TextCurves) -> np.ndarray:
    """[N] NELBO of each text in nats: one position a pass."""
    return np.array([values.sum() for values in curves.nats])


def sampler_rows(
    pretrained: Pretrained,
    texts: Sequence[Sequence[int]],
    latents: torch.Tensor | None,
    sampler: str,
    nelbo: np.ndarray,
    settings: InformationSettings,
    log: Log,
) -> list[SamplerRow]:
    """Return the exact likelihood of a sampler at each number of passes; once if it chooses the
    number itself.

    Args:
        nelbo: [N] of the texts, for the difference.
    """
    model, rows = pretrained.model, []
    condition = "null" if latents is None else "right"
    every = model.config.max_seq_len
    steps: tuple[int | None, ...] = (None,)
    if "num_steps" in STRATEGIES[sampler].option_names():
        steps = (*(number for number in PASSES if number < every), every)
    for number in steps:
        words = "" if number is None else f" in at most {number} passes"
        found = sampler_likelihood(
            model,
            texts,
            latents,
            diffusion=pretrained.text_diffusion,
            sampler=sampler,
            seed=settings.seed,
            options={} if number is None else {"num_steps": number},
            progress=log(f"exact likelihood under {sampler}{words}, {condition} latent"),
            **batch_budget(model, settings.batch_size),
        )
        label = ALL if number == every else number
        passes, nll = mean(found.passes, "passes"), mean(found.nats, NATS)
        rows.append(
            SamplerRow(condition, sampler, label, passes, nll, mean(found.nats - nelbo, NATS))
        )
    return rows


def schedule_rows(condition: str, curves: TextCurves) -> list[ScheduleRow]:
    """Return NELBO_T of the even and of the optimal schedule, and their excess over the NELBO, per
    text.

    A schedule that is optimal for the sentences it was found on looks better there than it is. So
    each half of the sentences is measured under the schedules of the other half.
    """
    nelbo, rows = nelbo_of(curves), []
    optimal = cross_fitted(curves)
    for passes in PASSES:
        even = curves.cost([even_schedule(length, passes) for length in curves.lengths.tolist()])
        best = curves.cost([found[min(passes, len(found))] for found in optimal])
        rows.append(
            ScheduleRow(condition, "even", passes, mean(even, NATS), mean(even - nelbo, NATS))
        )
        difference = mean(best - even, NATS)
        rows.append(
            ScheduleRow(
                condition,
                "optimal",
                passes,
                mean(best, NATS),
                mean(best - nelbo, NATS),
                difference,
            )
        )
    rows.append(ScheduleRow(condition, "even", ALL, mean(nelbo, NATS), mean(nelbo - nelbo, NATS)))
    return rows


def cross_fitted(curves: TextCurves) -> list[dict[int, list[int]]]:
    """Return the optimal schedules of each text by number of passes, from the other half of the
    texts.
    """
    found: list[dict[int, list[int]]] = [{} for _ in curves.nats]
    for half in (0, 1):
        curve = InformationCurve(curves.nats[1 - half :: 2])
        by_length = {
            length: optimal_schedules(curve.fitted(length), max(PASSES))
            for length in np.unique(curves.lengths[half::2]).tolist()
        }
        for row in range(half, len(found), 2):
            found[row] = by_length[len(curves.nats[row])]
    return found


def _notes(pretrained: Pretrained, count: int) -> list[str]:
    notes = []
    if pretrained.condition_dropout == 0 and pretrained.reads_latents:
        notes.append(
            "trained with condition_dropout=0: its null latent was never trained, so its curve"
            " says nothing"
        )
    if count < 60:
        notes.append("fewer than 60 sentences: the optimal schedules rest on half of them")
    return notes
