"""Draw an information curve, and what parallel decoding costs against the number of passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmldlm.evaluation.statistics import Estimate
from mmldlm.utils.figures import new_figure, save_figure
from studies.information.report import InformationReport

_COLORS = {"right": "tab:blue", "null": "tab:orange"}
_SAMPLER_COLORS = (
    "tab:green",
    "tab:red",
    "tab:purple",
    "tab:brown",
    "tab:pink",
    "tab:olive",
    "tab:cyan",
    "tab:gray",
)
_MAX_BUCKETS = 3  # drawn: the shortest, a middle and the longest


def plot_information(report: InformationReport, path: str | Path) -> None:
    """Draw the curves by length, and the excess of schedules and samplers over the NELBO against
    passes, into an image.

    Args:
        path: in the format of its suffix.
    """
    figure = new_figure(12, 4.8)
    left, right = figure.subplots(1, 2)
    _draw_curves(left, report)
    left.set_ylim(bottom=0)
    _draw_passes(right, report)
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    save_figure(figure, path)


def _draw_curves(axis: Any, report: InformationReport) -> None:
    for name, curve in report.curves.items():
        last = len(curve.buckets) - 1
        chosen = sorted({round(last * part / (_MAX_BUCKETS - 1)) for part in range(_MAX_BUCKETS)})
        for line, index in zip((":", "--", "-")[-len(chosen) :], chosen):
            bucket, points = curve.buckets[index], curve.buckets[index].points
            shares, color = [point.share for point in points], _COLORS[name]
            axis.errorbar(
                shares, [point.nats for point in points], [point.se for point in points],
                fmt="o", color=color, markersize=3, elinewidth=0.8,
            )  # fmt: skip
            label = f"{name} latent, {bucket.shortest} to {bucket.longest} tokens"
            axis.plot(
                shares,
                [point.fitted for point in points],
                line,
                color=color,
                linewidth=1.3,
                label=label,
            )
    axis.set_xlabel("share of the text that is known")
    axis.set_ylabel("cross-entropy of an unknown token, nats")
    axis.set_title("information curve (lines: isotonic fit)", fontsize=10)


def _draw_passes(axis: Any, report: InformationReport) -> None:
    for name in report.curves:
        for schedule, line in (("even", "--"), ("optimal", "-")):
            rows = [
                row
                for row in report.schedules
                if (row.condition, row.schedule) == (name, schedule)
            ]
            points = [
                (float(row.passes), row.excess) for row in rows if not isinstance(row.passes, str)
            ]
            _draw_line(
                axis,
                points,
                line,
                f"random order, {schedule} schedule, {name} latent",
                _COLORS[name],
            )
    names = dict.fromkeys(row.sampler for row in report.samplers)
    for sampler, color in zip(names, _SAMPLER_COLORS):
        points = [
            (row.passes.value, row.excess) for row in report.samplers if row.sampler == sampler
        ]
        _draw_line(
            axis, points, "o-", f"{sampler}, {report.conditions['condition']} latent", color
        )
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("passes (mean over the texts)")
    axis.set_ylabel("-log p(text) or its bound, minus the NELBO, nats per text")
    axis.set_title("what parallel decoding costs", fontsize=10)


def _draw_line(
    axis: Any, points: list[tuple[float, Estimate]], line: str, label: str, color: str
) -> None:
    points = sorted(points, key=lambda point: point[0])
    values, errors = (
        [estimate.value for _, estimate in points],
        [estimate.se for _, estimate in points],
    )
    axis.errorbar(
        [passes for passes, _ in points],
        values,
        errors,
        fmt=line,
        color=color,
        label=label,
        markersize=3.5,
        linewidth=1.2,
        elinewidth=0.8,
    )
