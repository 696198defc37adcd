"""Small plots as SVG elements, whose colors are those of the page in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mmldlm.observe.pages.elements import Element, element

_WIDTH, _ROW, _TOP, _BOTTOM = 400, 30, 8, 44
_LABELS, _RIGHT = 176, 20  # of the intervals: the column of labels, and space for the last number of the axis


class Interval(NamedTuple):
    """A value with its interval, to be drawn as a dot on a line; `series` chooses the color."""

    label: str
    value: float
    low: float
    high: float
    series: int = 0


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers from at most `low` to at least `high`, about `count` of them."""
    span = high - low if high > low else abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / count))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * number:.12g}") for number in range(first, max(last, first + 1) + 1)]


def interval_plot(intervals: Sequence[Interval], unit: str, caption: str) -> Element:
    """Return a figure of one row per interval over a common axis that starts at 0 if no value is negative."""
    low = min(0.0, *(item.low for item in intervals))
    marks = ticks(low, max(item.high for item in intervals))
    width, height = _WIDTH - _LABELS - _RIGHT, _ROW * len(intervals)

    def x(value: float) -> float:
        return round(_LABELS + width * (value - marks[0]) / (marks[-1] - marks[0]), 1)

    parts = []
    for mark in marks:
        end = _TOP + height
        parts.append(element("line", x1=x(mark), x2=x(mark), y1=_TOP, y2=end, class_="grid"))
        parts.append(element("text", f"{mark:g}", x=x(mark), y=end + 16, text_anchor="middle", class_="faint"))
    center = _LABELS + width / 2
    parts.append(element("text", unit, x=center, y=_TOP + height + 36, text_anchor="middle", class_="faint"))
    for row, item in enumerate(intervals):
        y = _TOP + _ROW * (row + 0.5)
        parts.append(element("text", item.label, x=0, y=y + 5))
        title = element("title", f"{item.label}: {item.value:.4g}, 95 % interval {item.low:.4g} to {item.high:.4g}")
        line = element("line", x1=x(item.low), x2=x(item.high), y1=y, y2=y, class_="error")
        dot = element("circle", cx=x(item.value), cy=y, r=5, class_="dot")
        parts.append(element("g", title, line, dot, class_=f"series-{item.series}"))
    return _figure(parts, _TOP + height + _BOTTOM, caption)


def _figure(parts: Sequence[Element], height: float, caption: str) -> Element:
    drawing = element("svg", *parts, viewBox=f"0 0 {_WIDTH} {height:g}", role="img", aria_label=caption)
    return element("figure", drawing, element("figcaption", caption), class_="card")
