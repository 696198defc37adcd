"""The report of the information curve: tables, JSON and plot."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from mmldlm.evaluation.report import write_report
from mmldlm.evaluation.statistics import Estimate
from mmldlm.utils.screen import open_console
from studies.information.curve import InformationCurve

SCHEDULE_TITLE = (
    "NELBO_T: bound on -log p(text) if T passes fill random positions, nats/text; excess: minus"
    " the NELBO"
)
SCHEDULE_COLUMNS = ("latent", "T", "even", "excess", "optimal", "excess", "minus even")
SAMPLER_TITLE = (
    "exact -log p(text) of samplers with a deterministic order at temperature 1, nats/text"
)
SAMPLER_COLUMNS = ("latent", "sampler", "at most", "passes", "-log p", "minus NELBO")


@dataclass(frozen=True)
class ScheduleRow:
    """NELBO_T of one schedule.

    Attributes:
        condition: right or null.
        schedule: even or optimal.
        passes: T, or "L" for as many as positions.
        nats: NELBO_T per text.
        excess: NELBO_T - NELBO per text, paired.
        against_even: NELBO_T minus that of the even schedule, paired; None for the even one.
    """

    condition: str
    schedule: str
    passes: int | str
    nats: Estimate
    excess: Estimate
    against_even: Estimate | None = None


@dataclass(frozen=True)
class SamplerRow:
    """The exact negative log-likelihood under one sampler.

    Attributes:
        condition: right or null.
        sampler: its name.
        limit: most passes, "L" for as many as positions, None for a sampler that decides itself.
        passes: that a text took.
        nats: per text.
        excess: minus the NELBO, paired; below 0 where its order is better than a random one.
    """

    condition: str
    sampler: str
    limit: int | str | None
    passes: Estimate
    nats: Estimate
    excess: Estimate


@dataclass
class InformationReport:
    """What parallel decoding costs a model.

    Attributes:
        conditions: how it was measured.
        curves: by condition.
        schedules, samplers: rows of the tables.
        nelbo: nats per token by condition.
        length_nll: nats of the length of a text by condition; {} for a model that does not predict
            it.
    """

    conditions: dict[str, Any]
    curves: dict[str, InformationCurve]
    schedules: list[ScheduleRow]
    samplers: list[SamplerRow]
    nelbo: dict[str, Estimate]
    length_nll: dict[str, Estimate]

    def as_dict(self) -> dict[str, Any]:
        """Return {"conditions", "claims", "details"}, JSON-ready."""
        details = {
            "nelbo": {name: value.as_dict() for name, value in self.nelbo.items()},
            "length_nll": {name: value.as_dict() for name, value in self.length_nll.items()},
            "schedules": [asdict(row) for row in self.schedules],
            "samplers": [asdict(row) for row in self.samplers],
            "curves": {name: _curve_records(curve) for name, curve in self.curves.items()},
        }
        return {"conditions": self.conditions, "claims": [], "details": details}

    def write(self, path: str | os.PathLike) -> None:
        """Write the JSON atomically."""
        write_report(path, self.as_dict())

    def show(self, console=None) -> None:
        """Print the tables and where the curve rises."""

        console = console or open_console()
        conditions = self.conditions
        console.print(
            f"{conditions['num_sentences']} unseen sentences, {conditions['mean_length']:.1f}"
            " tokens on average (with EOS), +- one standard error"
        )
        for name, value in self.nelbo.items():
            length = self.length_nll.get(name)
            words = "" if length is None else f"; length {_cell(length)} nats/text"
            console.print(
                f"{name} latent: NELBO {value.value:.3f} +- {value.se:.3f} nats/token{words}"
            )
        console.print(_table(SCHEDULE_TITLE, SCHEDULE_COLUMNS, self.schedule_cells()))
        if self.samplers:
            console.print(_table(SAMPLER_TITLE, SAMPLER_COLUMNS, self.sampler_cells()))
        for line in self.rise_lines():
            console.print(line)
        for note in conditions["notes"]:
            console.print(f"note: {note}")

    def rise_lines(self) -> list[str]:
        """Return a line for every part of a curve in which knowing more makes the model worse."""
        return [
            f"the curve rises by {rise['rise']:.2f} +- {rise['se']:.2f} nats from"
            f" {rise['from_share']:.0%} to {rise['to_share']:.0%} known: {name} latent, texts of"
            f" {bucket.shortest} to {bucket.longest} tokens; undertrained there"
            for name, curve in self.curves.items()
            for bucket in curve.buckets
            for rise in bucket.rises()
        ]

    def schedule_cells(self) -> list[tuple[str, ...]]:
        """Return the rows of the table of schedules, below SCHEDULE_COLUMNS."""
        by_key = {(row.condition, row.passes, row.schedule): row for row in self.schedules}
        rows = []
        for condition, passes in dict.fromkeys(
            (row.condition, row.passes) for row in self.schedules
        ):
            even, best = (
                by_key.get((condition, passes, schedule)) for schedule in ("even", "optimal")
            )
            assert even is not None
            cells = [_cell(even.nats, 1), _cell(even.excess), "", "", ""]
            if best is not None and best.against_even is not None:
                cells[2:] = f"{best.nats.value:.1f}", _cell(best.excess), _cell(best.against_even)
            rows.append((condition, str(passes), *cells))
        return rows

    def sampler_cells(self) -> list[tuple[str, ...]]:
        """Return the rows of the table of samplers, below SAMPLER_COLUMNS."""
        return [
            (
                row.condition,
                row.sampler,
                "" if row.limit is None else str(row.limit),
                f"{row.passes.value:.1f}",
                _cell(row.nats, 1),
                _cell(row.excess),
            )
            for row in self.samplers
        ]


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]):
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, box=SIMPLE, collapse_padding=True, pad_edge=False)
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("latent", "sampler") else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(*row)
    return table


def _cell(estimate: Estimate, digits: int = 2) -> str:
    return f"{estimate.value:.{digits}f} +- {estimate.se:.{digits}f}"


def _curve_records(curve: InformationCurve) -> list[dict[str, Any]]:
    return [
        {
            "shortest": bucket.shortest,
            "longest": bucket.longest,
            "num_sentences": bucket.num_sentences,
            "points": [asdict(point) for point in bucket.points],
            "rises": bucket.rises(),
        }
        for bucket in curve.buckets
    ]
