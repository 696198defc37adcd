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
from mmldlm.observe.pages.elements import (
    Column,
    Element,
    definitions,
    element,
    section,
    table,
    to_html,
)
from mmldlm.observe.pages.page import render
from mmldlm.observe.pages.svg import Line, line_plot

_SIGMAS = 1.96  # to each side of a 95 % interval
# Color of a schedule, and whether its line is dashed; samplers have the colors from _SAMPLER on.
_STYLES = {"even": (0, True), "optimal": (0, False)}
_SAMPLER, _NUM_COLORS = 1, 4


def information_page(report: InformationReport) -> str:
    """Return the page of a report of the suite `information`."""
    conditions = report.conditions
    title = (
        f"Information curve on {conditions['num_sentences']} unseen sentences of"
        f" {conditions['store']}"
    )
    notes = [
        element("p", note, class_="note") for note in (*conditions["notes"], *report.rise_lines())
    ]
    parts = [
        _plots(report),
        _table("Schedules", SCHEDULE_TITLE, SCHEDULE_COLUMNS, report.schedule_cells()),
    ]
    if report.samplers:
        parts.append(_table("Samplers", SAMPLER_TITLE, SAMPLER_COLUMNS, report.sampler_cells()))
    items = [
        (key.replace("_", " "), f"{value:g}" if isinstance(value, float) else str(value))
        for key, value in conditions.items()
        if key != "notes"
    ]
    parts.append(section("Conditions", definitions(items)))
    main = element(
        "main", element("header", element("h1", title)), *notes, *parts, class_="report"
    )
    return render(f"mmldlm: {title}", to_html([main]))


def _table(
    heading: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> Element:
    found = [Column(column, column not in ("latent", "sampler")) for column in columns]
    caption = f"{title}. \N{PLUS-MINUS SIGN} is one standard error over sentences."
    cells = [[cell.replace("+-", "\N{PLUS-MINUS SIGN}") for cell in row] for row in rows]
    return section(heading, table(caption, found, cells))


def _plots(report: InformationReport) -> Element:
    """The curves, and quality against the number of passes."""
    curves = []
    for number, (name, curve) in enumerate(report.curves.items()):
        bucket = max(
            curve.buckets, key=lambda bucket: bucket.num_sentences
        )  # the length that most texts have
        points = [(point.share, point.nats, _SIGMAS * point.se) for point in bucket.points]
        curves.append(
            Line(f"{name} latent, {bucket.shortest} to {bucket.longest} tokens", points, number)
        )
    caption = (
        "How surprised the model is by an unknown token, by the share of the text that it knows."
        " Lower is better."
    )
    plots = [
        line_plot(curves, "share of the text that is known", "nats/token", caption),
        _passes_plot(report),
    ]
    lines = element("p", "Lines at the points are 95 % intervals.", class_="caption")
    return section("Plots", lines, element("div", *plots, class_="plots"))


def _passes_plot(report: InformationReport) -> Element:
    """Nats a text against passes: of even and optimal schedules, and of samplers."""
    condition, every = report.conditions["condition"], report.conditions["mean_length"]
    found: dict[tuple[str, int, bool], list[tuple[float, float, float]]] = {}
    for row in report.schedules:
        if row.condition == condition:
            key = (f"random order, {row.schedule} schedule", *_STYLES[row.schedule])
            passes = every if isinstance(row.passes, str) else float(row.passes)
            found.setdefault(key, []).append((passes, row.nats.value, _SIGMAS * row.nats.se))
    samplers = list(dict.fromkeys(row.sampler for row in report.samplers))
    for row in report.samplers:
        if row.condition == condition:
            key = (
                f"{row.sampler}, exact",
                _SAMPLER + samplers.index(row.sampler) % _NUM_COLORS,
                False,
            )
            found.setdefault(key, []).append(
                (row.passes.value, row.nats.value, _SIGMAS * row.nats.se)
            )
    lines = [
        Line(label, sorted(points), color, dashed)
        for (label, color, dashed), points in found.items()
    ]
    caption = (
        f"How surprised the model is by a text, {condition} latent, by the passes that write it."
        " Lower is better."
    )
    return line_plot(lines, "passes, mean over the texts", "nats/text", caption, log_x=True)
