"""Small plots as SVG elements, whose colors are those of the page in light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmldlm.observe.pages.elements import Element, element

_WIDTH, _ROW, _TOP, _BOTTOM = 400, 30, 8, 44
# Of the intervals: the width of the column of labels, and the space for the axis' last number.
_LABELS, _RIGHT = 176, 20


class Interval(NamedTuple):
    """A value with its interval, to be drawn as a dot on a line; `series` chooses the color."""

    label: str
    value: float
    low: float
    high: float
    series: int = 0


class Line(NamedTuple):
    """Points (x, y) to be joined by a line; `series` chooses the color; a line of many points has
    no dots.
    """

    label: str
    points: Sequence[tuple[float, float]]
    series: int = 0
    is_dashed: bool = False
    has_dots: bool = True


class Mark(NamedTuple):
    """Values of x at which something happened, to be marked on the axis."""

    label: str
    places: Sequence[float]
    series: int


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from at most `low` to at least `high`, about five of them.

    Values that differ in their last digits alone count as one.
    """
    size = max(abs(low), abs(high))
    span = high - low if high - low > 1e-9 * size else size or 1.0
    step = 10.0 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [
        float(f"{step * multiple:.12g}") for multiple in range(first, max(last, first + 1) + 1)
    ]


def interval_plot(intervals: Sequence[Interval], unit: str, caption: str) -> Element:
    """Return a figure of one row per interval over a common axis that starts at 0 if no value is
    negative.
    """
    low = min(0.0, *(item.low for item in intervals))
    marks = ticks(low, max(item.high for item in intervals))
    width, height = _WIDTH - _LABELS - _RIGHT, _ROW * len(intervals)

    def x(value: float) -> float:
        return round(_LABELS + width * (value - marks[0]) / (marks[-1] - marks[0]), 1)

    parts = []
    for mark in marks:
        end = _TOP + height
        parts.append(element("line", x1=x(mark), x2=x(mark), y1=_TOP, y2=end, class_="grid"))
        parts.append(
            element(
                "text", f"{mark:g}", x=x(mark), y=end + 16, text_anchor="middle", class_="faint"
            )
        )
    center = _LABELS + width / 2
    parts.append(
        element("text", unit, x=center, y=_TOP + height + 36, text_anchor="middle", class_="faint")
    )
    for row, item in enumerate(intervals):
        y = _TOP + _ROW * (row + 0.5)
        parts.append(element("text", item.label, x=0, y=y + 5))
        title = element(
            "title",
            f"{item.label}: {item.value:.4g}, 95 % interval {item.low:.4g} to {item.high:.4g}",
        )
        line = element("line", x1=x(item.low), x2=x(item.high), y1=y, y2=y, class_="error")
        dot = element("circle", cx=x(item.value), cy=y, r=5, class_="dot")
        parts.append(element("g", title, line, dot, class_=f"series-{item.series}"))
    return _figure(parts, _TOP + height + _BOTTOM, caption)


def line_plot(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    caption: str,
    log_y: bool = False,
    marks: Sequence[Mark] = (),
) -> Element:
    """Return a figure of lines over common axes, and a legend below.

    Args:
        caption: Sentence below the figure, unless it only repeats y_label, which stands above.
        log_y: Whether the y axis is logarithmic, of base 10; every y is then above 0.
        marks: What is marked on the x axis, within the range of the lines.
    """
    points = [point for line in lines for point in line.points]
    across = [x for x, _ in points]
    x_marks = ticks(min(across), max(across))
    # A run of 1,600 steps ends at 1,600, and not at the next tick, 2,000.
    x_end = x_marks[-1] if max(across) <= x_marks[0] else max(across)
    x_marks = [mark for mark in x_marks if mark <= x_end * (1 + 1e-9)]
    heights = [math.log10(y) if log_y else y for _, y in points]
    y_marks = ticks(min(heights), max(heights))
    y_texts = [f"{10**mark:.3g}" if log_y else f"{mark:g}" for mark in y_marks]
    # Room for the longest value, at 7 units a character.
    left = max(46, 12 + 7 * max(map(len, y_texts)))
    top, width, height = 24, _WIDTH - left - _RIGHT, 200

    def across_to(mark: float) -> float:
        return round(left + width * (mark - x_marks[0]) / max(x_end - x_marks[0], 1e-12), 1)

    def down_to(mark: float) -> float:
        return round(top + height * (y_marks[-1] - mark) / (y_marks[-1] - y_marks[0]), 1)

    def at(x: float, y: float) -> tuple[float, float]:
        return across_to(x), down_to(math.log10(y) if log_y else y)

    parts = [element("text", y_label, x=0, y=12, class_="faint")]
    for mark in x_marks:
        x = across_to(mark)
        parts.append(element("line", x1=x, x2=x, y1=top, y2=top + height, class_="grid"))
        text = f"{mark:g}"
        parts.append(
            element("text", text, x=x, y=top + height + 16, text_anchor="middle", class_="faint")
        )
    for mark, text in zip(y_marks, y_texts):
        y = down_to(mark)
        parts.append(element("line", x1=left, x2=left + width, y1=y, y2=y, class_="grid"))
        parts.append(element("text", text, x=left - 6, y=y + 4, text_anchor="end", class_="faint"))
    bottom = top + height + 34
    parts.append(
        element(
            "text", x_label, x=left + width / 2, y=bottom, text_anchor="middle", class_="faint"
        )
    )
    for row, line in enumerate(lines):
        parts.append(_line(line, at, bottom + 22 + 20 * row))
    lowest = 10.0 ** y_marks[0] if log_y else y_marks[0]
    for row, marked in enumerate(marks, len(lines)):
        places = [at(x, lowest) for x in marked.places]
        parts.append(_mark(marked, places, bottom + 22 + 20 * row))
    height = bottom + 20 * (len(lines) + len(marks)) + 12
    return _figure(parts, height, caption, shows_caption=caption != y_label)


def _line(line: Line, at: Callable[[float, float], tuple[float, float]], legend: float) -> Element:
    """Return a line with its points, and its entry in the legend at the height `legend`."""
    dashes = {"stroke_dasharray": "6 4"} if line.is_dashed else {}
    places = [at(x, y) for x, y in line.points]
    joined = " ".join(f"{x:g},{y:g}" for x, y in places)
    parts = [element("polyline", points=joined, class_="line", **dashes)]
    for (x, y), (across, down) in zip(line.points, places) if line.has_dots else ():
        title = element("title", f"{line.label}: {y:.4g} at {x:.4g}")
        dot = element("circle", cx=across, cy=down, r=3.5, class_="dot")
        parts.append(element("g", title, dot))
    parts.append(
        element("line", x1=0, x2=24, y1=legend - 5, y2=legend - 5, class_="line", **dashes)
    )
    parts.append(element("text", line.label, x=32, y=legend))
    return element("g", *parts, class_=f"series-{line.series}")


def _mark(mark: Mark, places: Sequence[tuple[float, float]], legend: float) -> Element:
    """Return short lines at places of the x axis, and their entry in the legend."""
    parts = [
        element("line", x1=x, x2=x, y1=y - 10, y2=y, class_="line")
        for x, y in dict.fromkeys(places)
    ]
    parts.append(element("line", x1=12, x2=12, y1=legend - 10, y2=legend, class_="line"))
    parts.append(element("text", mark.label, x=32, y=legend))
    return element("g", *parts, class_=f"series-{mark.series}")


def _figure(
    parts: Sequence[Element], height: float, caption: str, shows_caption: bool = True
) -> Element:
    drawing = element(
        "svg", *parts, viewBox=f"0 0 {_WIDTH} {height:g}", role="img", aria_label=caption
    )
    below = [element("figcaption", caption)] if shows_caption else []
    return element("figure", drawing, *below, class_="card")
