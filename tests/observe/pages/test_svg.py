"""Plots: round axes that hold every interval."""

from __future__ import annotations

import math

import pytest

from mmldlm.observe.pages.svg import Interval, Line, Mark, interval_plot, line_plot, ticks


@pytest.mark.parametrize(
    "low, high",
    [(0, 1), (0, 0.00031), (-3.2, 17.9), (0, 54.1), (0, 100), (0, 0), (-2, -2), (0.1, 1e6)]
    + [(0.1, 0.1 + 1e-16), (2.5, 2.5 + 1e-13), (-1e9, -1e9 + 1e-4)],
)
def test_ticks_are_round_and_hold_the_range(low, high):
    marks = ticks(low, high)
    step = marks[1] - marks[0]
    assert (
        marks[0] <= low + 1e-9 * step and marks[-1] >= high - 1e-9 * step and 2 <= len(marks) <= 7
    )
    assert all(b - a == pytest.approx(step) for a, b in zip(marks, marks[1:]))
    assert round(step / 10 ** math.floor(math.log10(step * 1.0001)), 6) in (1, 2, 5)


def test_dots_stand_where_the_axis_says():
    rows = [Interval("a", 2.0, 1.0, 3.0), Interval("b <i>", 4.0, 4.0, 4.0, 1)]
    figure = interval_plot(rows, "nats", "caption")
    numbers = {node.text: float(node.get("x")) for node in figure.iter("text")}
    dots = [float(node.get("cx")) for node in figure.iter("circle")]
    assert dots == [numbers["2"], numbers["4"]]
    line = next(node for node in figure.iter("line") if node.get("class") == "error")
    assert (float(line.get("x1")), float(line.get("x2"))) == (numbers["1"], numbers["3"])
    assert "caption" in [node.text for node in figure.iter("figcaption")]


def test_a_series_of_nearly_one_value_is_a_line():
    points = [(1.0, 0.1 + 0.2), (2.0, 0.3), (3.0, 0.3)]
    figure = line_plot([Line("a", points)], "step", "loss", "caption")
    assert len(set(node.get("cy") for node in figure.iter("circle"))) == 1


def test_lines_go_through_their_points():
    lines = [Line("a", [(1.0, 2.0), (2.0, 1.0), (4.0, 1.0)]), Line("b", [(4.0, 3.0)], 1, True)]
    figure = line_plot(lines, "passes", "nats", "caption")
    xs = {
        node.text: float(node.get("x"))
        for node in figure.iter("text")
        if node.get("text-anchor") == "middle"
    }
    ys = {
        node.text: float(node.get("y")) - 4
        for node in figure.iter("text")
        if node.get("text-anchor") == "end"
    }
    first, second = (
        [tuple(map(float, pair.split(","))) for pair in node.get("points").split()]
        for node in figure.iter("polyline")
    )
    assert first == [(xs["1"], ys["2"]), (xs["2"], ys["1"]), (xs["4"], ys["1"])] and second == [
        (xs["4"], ys["3"])
    ]
    assert [node.text for node in figure.iter("text")][-2:] == ["a", "b"]
    assert xs["4"] - xs["2"] == pytest.approx(2 * (xs["2"] - xs["1"]), abs=0.2)


def test_marks_stand_on_the_axis_and_long_lines_have_no_dots():
    line = Line("loss", [(float(x), 2.0 * x) for x in range(11)], has_dots=False)
    figure = line_plot([line], "step", "loss", "caption", marks=[Mark("skipped", [5.0, 5.0], 1)])
    assert not list(figure.iter("circle"))
    numbers = {node.text: float(node.get("x")) for node in figure.iter("text")}
    (group,) = (node for node in figure.iter("g") if node.get("class") == "series-1")
    mark, legend = group.findall("line")
    x = float(mark.get("x1"))
    assert numbers["4"] < x < numbers["6"] and legend.get("x1") == "12"
    bottom = max(
        float(node.get("y2")) for node in figure.iter("line") if node.get("class") == "grid"
    )
    assert float(mark.get("y2")) == bottom
