"""The page of `mmldlm report`: what one run did, or two beside each other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from mmldlm.config.load import preset_names
from mmldlm.observe.pages.elements import (
    Column,
    Element,
    definitions,
    element,
    picture,
    section,
    table,
)
from mmldlm.observe.pages.page import titled_page
from mmldlm.observe.pages.svg import Line, Mark, line_plot
from mmldlm.observe.plots import Point, mean_window, means, smooth
from mmldlm.observe.run_record import MOST_EVENTS, RunRecord, flat
from mmldlm.tasks.registry import load_config
from mmldlm.utils.formatting import count_noun, format_bytes

# Series of the marks: those of the runs' lines are 0 and 1.
_SKIPPED, _ROLLED_BACK, _RESUMED = 1, 3, 2
# Of an event, what is not in a column of its own.
_COLUMNS_OF_EVENTS = ("event", "step", "time", "reason")
_COSTS = (
    ("lr", "learning rate"),
    ("tokens_per_second", "tokens per second"),
    ("peak_memory_gib", "peak memory of rank 0, GiB"),
)

Series = list[tuple[float, float]]


def report_page(runs: Sequence[RunRecord]) -> str:
    """Return the page of one run, or of a run and another one to compare it with."""
    title = " and ".join(run.name for run in runs)
    parts = [_curves(runs), _validation(runs)]
    for run in runs:
        parts += _parts_of_run(run, len(runs) > 1)
    if len(runs) == 2:
        parts.append(_differences(*runs))
    return titled_page(title, [f"{run.name}: {verdict(run)}" for run in runs], parts)


def verdict(run: RunRecord) -> str:
    """Return in one sentence how far a run is, and how it ended."""
    planned = run.config.get("training.num_train_steps", "?")
    done = f"step {run.last_step} of {planned}"
    last = run.events[-1] if run.events else {}
    if last.get("event") != "end":
        return f"{done}; it is still being written, or was killed."
    reason = f": {last['reason']}" if last.get("reason") else ""
    return f"{done}; it ended with exit code {last.get('exit_code')}{reason}."


def _parts_of_run(run: RunRecord, is_named: bool) -> list[Element]:
    suffix = f" of {run.name}" if is_named else ""
    return [
        _samples(run, f"Samples{suffix}"),
        _events(run, f"Events{suffix}"),
        _checkpoints(run, f"Checkpoints{suffix}"),
        _config(run, f"Config{suffix}"),
        _environment(run, f"Environment{suffix}"),
    ]


# -- curves ---------------------------------------------------------------------------------------


def _curves(runs: Sequence[RunRecord]) -> Element:
    losses = {"loss": "loss"}
    losses |= {curve.name: f"{curve.label} loss" for run in runs for curve in run.losses}
    figures = [
        _figure(runs, [_smoothed(run.points, name) for run in runs], f"{label}, smoothed")
        for name, label in losses.items()
    ]
    # The norms of the first steps are far above all later ones.
    norms = [_mean_values(run.points, "grad_norm") for run in runs]
    figures.append(_figure(runs, norms, "gradient norm", log_y=True))
    figures += [
        _figure(runs, [_mean_values(run.points, key) for run in runs], label)
        for key, label in _COSTS
    ]
    return section("Curves", element("div", *filter(None, figures), class_="plots"))


def _mean_values(points: Sequence[Point], key: str) -> Series:
    return list(zip(*means(points, key)))


def _smoothed(points: Sequence[Point], key: str) -> Series:
    steps, values = means(points, key)
    return list(zip(steps, smooth(values, mean_window(len(values)))))


def _figure(
    runs: Sequence[RunRecord],
    series: Sequence[Series],
    label: str,
    has_dots: bool = False,
    log_y: bool = False,
) -> Element | None:
    """Return the plot of one quantity with a line per run; None without a value of it. A
    logarithmic one leaves zeros out.
    """
    lines = []
    for index, (run, values) in enumerate(zip(runs, series)):
        if points := [(x, y) for x, y in values if math.isfinite(y) and (y > 0 or not log_y)]:
            lines.append(Line(run.name, points, index, index > 0, has_dots))
    if not lines:
        return None
    steps = [x for line in lines for x, _ in line.points]
    marks = [mark for run in runs for mark in _marks(run, min(steps), max(steps))]
    return line_plot(lines, "step", label, label, log_y=log_y, marks=marks)


def _marks(run: RunRecord, low: float, high: float) -> list[Mark]:
    kinds = (
        ("skipped", run.skipped, _SKIPPED),
        ("rolled back to", run.rolled_back, _ROLLED_BACK),
        ("resumed", run.resumed, _RESUMED),
    )
    return [
        Mark(f"{run.name}: {label} ({len(steps)})", [x for x in steps if low <= x <= high], color)
        for label, steps, color in kinds
        if steps
    ]


# -- tables ---------------------------------------------------------------------------------------


def _validation(runs: Sequence[RunRecord]) -> Element:
    names = dict.fromkeys(
        key
        for run in runs
        for record in run.evaluations
        for key, value in record.items()
        if key != "step" and isinstance(value, (int, float))
    )
    if not names:
        return section("Validation", element("p", "No evaluation yet."))
    figures = [
        _figure(runs, [_values(run, name) for run in runs], name, has_dots=True) for name in names
    ]
    heading = [Column("figure", False)]
    heading += [Column(column) for column in ("first", "lowest", "highest", "last")]
    rows = [
        [name if len(runs) == 1 else f"{name}, {run.name}", *_extent(run, name)]
        for name in names
        for run in runs
    ]
    caption = "Each value with its step."
    plots = element("div", *filter(None, figures), class_="plots")
    return section("Validation", table(caption, heading, rows), plots)


def _values(run: RunRecord, name: str) -> Series:
    return [
        (record["step"], record[name])
        for record in run.evaluations
        if isinstance(record.get(name), (int, float))
    ]


def _extent(run: RunRecord, name: str) -> list[str]:
    values = _values(run, name)
    if not values:
        return ["", "", "", ""]
    chosen = (
        values[0],
        min(values, key=lambda pair: pair[1]),
        max(values, key=lambda pair: pair[1]),
        values[-1],
    )
    return [f"{value:.4g} ({step})" for step, value in chosen]


def _samples(run: RunRecord, heading: str) -> Element:
    if not run.samples:
        return section(heading, element("p", "None."))
    tables = []
    for kind, reference in dict.fromkeys(
        (sample.kind, sample.reference) for sample in run.samples
    ):
        made = [
            (s.step, s.made) for s in run.samples if (s.kind, s.reference) == (kind, reference)
        ]
        is_text = isinstance(made[0][1], str)
        what = "written" if is_text else "drawn, and the sample's own image to the right"
        rows = [
            [
                f"step {step}",
                content
                if isinstance(content, str)
                else picture(content, reference, class_="sample"),
            ]
            for step, content in made
        ]
        columns = [Column("evaluation", False), Column(what, False)]
        tables.append(table(f"{kind}: {reference}", columns, rows))
    return section(heading, *tables)


def _events(run: RunRecord, heading: str) -> Element:
    if not run.events:
        return section(heading, element("p", "None."))
    counts = ", ".join(f"{kind} {count}" for kind, count in run.num_events.most_common())
    total = run.num_events.total()
    shown = f"The last {MOST_EVENTS} of {total:,}" if total > MOST_EVENTS else f"All {total}"
    columns = [
        Column("time", False),
        Column("step"),
        Column("event", False),
        Column("what", False),
    ]
    rows = [
        [
            str(event.get("time", ""))[:19].replace("T", " "),
            str(event.get("step", "")),
            event["event"],
            _details(event),
        ]
        for event in run.events
    ]
    return section(heading, element("p", counts), table(f"{shown}, in UTC.", columns, rows))


def _details(event: dict[str, Any]) -> str:
    others = {key: value for key, value in event.items() if key not in _COLUMNS_OF_EVENTS}
    words = [str(event["reason"])] if event.get("reason") else []
    return "; ".join([*words, *(f"{key} {_shown(value)}" for key, value in others.items())])[:500]


def _checkpoints(run: RunRecord, heading: str) -> Element:
    if not run.checkpoints:
        return section(heading, element("p", "None."))
    columns = [Column("step"), Column("engine", False), Column("ranks"), Column("size")]
    rows = [
        [str(step), engine, ranks, format_bytes(size)]
        for step, engine, ranks, size in run.checkpoints
    ]
    return section(heading, table(f"In {run.folder}.", columns, rows))


def _environment(run: RunRecord, heading: str) -> Element:
    if not run.environment:
        return section(heading, element("p", "Not recorded: no preflight.json in the folder."))
    return section(heading, definitions(run.environment))


# -- config ---------------------------------------------------------------------------------------


def _config(run: RunRecord, heading: str) -> Element:
    if not run.config:
        return section(heading, element("p", "Not recorded: no config.yaml in the folder."))
    preset, differing = nearest_preset(run.config)
    values = preset_values(preset)
    columns = [Column("key", False), Column("run", False), Column(preset, False)]
    caption = f"{count_noun(len(differing), 'key')} other than in the nearest preset, {preset}."
    everything = element(
        "details",
        element("summary", "All keys"),
        definitions((key, _shown(value)) for key, value in run.config.items()),
    )
    return section(
        heading, table(caption, columns, _compared(differing, run.config, values)), everything
    )


def nearest_preset(config: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the preset from which a config differs least, and the keys in which it does.

    A run does not record its preset: file and words of the command change what it has.
    """
    differences = {name: differing_keys(config, preset_values(name)) for name in preset_names()}
    name = min(differences, key=lambda preset: len(differences[preset]))
    return name, differences[name]


def preset_values(name: str) -> dict[str, Any]:
    """Return a preset as `section.key` -> value."""
    return flat(load_config(name).model_dump(mode="json"))


def differing_keys(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return the keys with different values, or in one config alone, in the order of the first."""
    return [key for key in {**first, **second} if first.get(key) != second.get(key)]


def _differences(first: RunRecord, second: RunRecord) -> Element:
    keys = differing_keys(first.config, second.config)
    columns = [Column("key", False), Column(first.name, False), Column(second.name, False)]
    caption = f"{count_noun(len(keys), 'key')} with different values."
    rows = _compared(keys, first.config, second.config)
    return section("Configs compared", table(caption, columns, rows))


def _compared(
    keys: Iterable[str], first: dict[str, Any], second: dict[str, Any]
) -> list[list[str]]:
    return [
        [key, *(_shown(config[key]) if key in config else "" for config in (first, second))]
        for key in keys
    ]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
