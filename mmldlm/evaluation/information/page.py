"""The page of `mmldlm evaluate --suite information --html`."""

from __future__ import annotations

from collections.abc import Sequence

from mmldlm.evaluation.information.report import (
    SAMPLER_COLUMNS,
    SAMPLER_TITLE,
    SCHEDULE_COLUMNS,
    SCHEDULE_TITLE,
    InformationReport,
)
from mmldlm.observe.pages.elements import Column, Element, definitions, element, section, table, to_html
from mmldlm.observe.pages.page import render
from mmldlm.observe.pages.svg import Interval, interval_plot

_SIGMAS = 1.96  # to each side of a 95 % interval
_EVEN, _OPTIMAL, _SAMPLER = 0, 1, 3  # colors


def information_page(report: InformationReport) -> str:
    """Return the page of a report of the suite `information`."""
    conditions = report.conditions
    title = f"Information curve on {conditions['num_sentences']} unseen sentences of {conditions['store']}"
    notes = [element("p", note, class_="note") for note in (*conditions["notes"], *report.rise_lines())]
    parts = [_plot(report), _table("Schedules", SCHEDULE_TITLE, SCHEDULE_COLUMNS, report.schedule_cells())]
    if report.samplers:
        parts.append(_table("Samplers", SAMPLER_TITLE, SAMPLER_COLUMNS, report.sampler_cells()))
    items = [(key.replace("_", " "), str(value)) for key, value in conditions.items() if key != "notes"]
    parts.append(section("Conditions", definitions(items)))
    main = element("main", element("header", element("h1", title)), *notes, *parts, class_="report")
    return render(f"mmldlm: {title}", to_html([main]))


def _table(heading: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Element:
    found = [Column(column, column not in ("latent", "sampler")) for column in columns]
    caption = f"{title}. \N{PLUS-MINUS SIGN} is one standard error over sentences."
    cells = [[cell.replace("+-", "\N{PLUS-MINUS SIGN}") for cell in row] for row in rows]
    return section(heading, table(caption, found, cells))


def _plot(report: InformationReport) -> Element:
    condition = report.conditions["condition"]
    entries = [
        (f"{row.passes} passes, {row.schedule}", row.nats, _EVEN if row.schedule == "even" else _OPTIMAL)
        for row in report.schedules
        if row.condition == condition
    ]
    entries += [
        (f"{row.sampler}, {row.passes.value:.1f} passes", row.nats, _SAMPLER)
        for row in report.samplers
        if row.condition == condition
    ]
    intervals = [
        Interval(label, nats.value, nats.value - _SIGMAS * nats.se, nats.value + _SIGMAS * nats.se, color)
        for label, nats, color in entries
    ]
    caption = f"How surprised the model is by a text, {condition} latent, by the passes that write it. Left is better."
    return section("Plot", interval_plot(intervals, "nats/text", caption))
