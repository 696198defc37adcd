"""What the reports of all suites share: tables, claims and conditions, each declared once for the
screen and for the page.
"""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mmldlm.evaluation.statistics import Difference, Estimate
from mmldlm.observe.pages.elements import (
    Column,
    Content,
    Element,
    definitions,
    element,
    section,
    table,
)
from mmldlm.observe.pages.page import titled_page
from mmldlm.utils import atomic_files
from mmldlm.utils.screen import open_console

MIN_GAIN = 0.5
"""Nats per token that a model gains at least if it uses its embedding."""
# Standard errors above 0 from which a gain is taken for one.
_SURE_ERRORS = 2
_OPERATORS = {">=": operator.ge, "<=": operator.le}
_Row = TypeVar("_Row", bound=tuple)


class Row(NamedTuple):
    """A figure of a report.

    Attributes:
        key: Name in the JSON.
        label: Words of a line; indented where the figure belongs to the line above it.
        digits: Digits after the point.
        meaning: A plain sentence for a reader who does not know the figure.
    """

    key: str
    label: str
    digits: int
    meaning: str


class Label(NamedTuple):
    """The first cell of a row: its words, indented as in `Row`, and what they mean, if needed."""

    words: str
    meaning: str = ""


class Cell(NamedTuple):
    """What a cell shows on the screen and on the page."""

    on_screen: str
    on_page: Content


TableRow = tuple[Label, *tuple[str | Cell, ...]]
"""Label and cells of a row."""


@dataclass(frozen=True)
class ReportTable:
    """A table of a report.

    Attributes:
        heading: What it shows, with the number of samples.
        caption: How to read it.
        columns: The headings; the first is that of the labels.
        rows: The rows.
        legend: Names in the headings, and what they mean.
        padding: Spaces on the screen beside the one between two columns.
    """

    heading: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[TableRow]
    legend: Mapping[str, str] = field(default_factory=dict)
    padding: int = 1

    def show(self, console: Console) -> None:
        """Print the table, and below it what its names mean."""
        has_texts = not all(column.is_number for column in self.columns[1:])
        shown = Table(
            title=self.heading,
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, self.padding),
            show_lines=has_texts,
        )
        for column in self.columns:
            shown.add_column(
                column.heading,
                justify="right" if column.is_number else "left",
                no_wrap=column.is_number,
                overflow="fold",
            )
        for label, *cells in self.rows:
            texts = (cell if isinstance(cell, str) else cell.on_screen for cell in cells)
            shown.add_row(label.words, *texts)
        console.print(shown)
        for label, *_ in self.rows:
            # That of an indented line is "the same" of the line above it.
            if label.meaning and not label.words.startswith(" "):
                console.print(f"{label.words}: {label.meaning}")
        for name, meaning in self.legend.items():
            console.print(f"{name}: {meaning}")
        if self.caption:
            console.print(self.caption)
        console.print()

    def section(self) -> Element:
        """Return the table as a part of a page."""
        columns = [
            column._replace(heading=column.heading.replace("\n", " ")) for column in self.columns
        ]
        rows = [
            (
                _label_element(label),
                *(cell if isinstance(cell, str) else cell.on_page for cell in cells),
            )
            for label, *cells in self.rows
        ]
        legend = [definitions(self.legend.items())] if self.legend else []
        return section(self.heading, table(self.caption, columns, rows), *legend)


class Report(ABC):
    """The result of a suite: JSON in the form of all benchmarks, text, and a page."""

    conditions: dict[str, Any]

    @property
    @abstractmethod
    def title(self) -> str:
        """What was evaluated."""

    @property
    @abstractmethod
    def verdict(self) -> str:
        """What the figures say, in one sentence; it stands above them."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return {"conditions", "claims", "details"}, JSON-ready."""

    @abstractmethod
    def tables(self) -> list[ReportTable]:
        """Return the tables that have figures, in order."""

    def illustrations(self) -> list[Element]:
        """Return the sections of the page that a screen cannot show."""
        return []

    def show(self, console: Console | None = None) -> None:
        """Print the tables and the notes."""
        console = console or open_console()
        for shown in self.tables():
            shown.show(console)
        for note in self.conditions["notes"]:
            console.print(f"note: {note}")

    def page(self) -> str:
        """Return the report as a page for a browser, one file with its pictures inside."""
        notes = [element("p", note, class_="note") for note in self.conditions["notes"]]
        tables = [shown.section() for shown in self.tables()]
        parts = [*notes, *self.illustrations(), *tables, _conditions_section(self.conditions)]
        return titled_page(self.title, [self.verdict], parts)

    def write(self, path: str | os.PathLike) -> None:
        """Write the JSON atomically."""
        write_report(path, self.as_dict())


def measured_rows(rows: Sequence[_Row], is_measured: Callable[[str], bool]) -> list[_Row]:
    """Return the rows of a table that were measured: without indented rows whose parent was not.

    An indented line belongs to the line above it. Without its own, it would be read as one of
    another figure.

    Args:
        rows: Key, label and more of each row, in order. The label of a row that belongs to another
            is indented.
        is_measured: Whether a row was measured, by key.
    """
    found, has_parent = [], False
    for row in rows:
        key, label = row[0], row[1]
        is_child = label.startswith(" ")
        if not is_child:
            has_parent = is_measured(key)
        if is_measured(key) and (has_parent or not is_child):
            found.append(row)
    return found


def figure_table(
    heading: str,
    caption: str,
    rows: Sequence[Row],
    arms: Sequence[tuple[str, Mapping[str, Estimate]]],
    legend: Mapping[str, str] | None = None,
) -> ReportTable:
    """Return the table of those rows that an arm has, one column for each arm.

    Args:
        arms: Heading and estimates by key of every column.
    """
    measured = measured_rows(rows, lambda key: any(key in found for _, found in arms))
    body: list[TableRow] = [
        (
            Label(row.label, row.meaning),
            *(estimate_cell(found.get(row.key), row.digits) for _, found in arms),
        )
        for row in measured
    ]
    columns = [Column("figure", False), *(Column(name) for name, _ in arms)]
    return ReportTable(heading, caption, columns, body, legend or {})


def claims_table(
    caption: str, claims: Sequence[Mapping[str, Any]], meanings: Mapping[str, str]
) -> ReportTable:
    """Return the table of claims; `meanings` has a sentence by id of a claim."""
    rows = []
    for item in claims:
        word, style = ("yes", "holds") if item["holds"] else ("NO", "fails")
        holds = Cell(word, element("span", word, class_=style))
        label = Label(item["id"], meanings.get(item["id"], ""))
        rows.append((label, f"{item['value']:.4g}", f"{item['op']} {item['bound']:g}", holds))
    columns = [Column("claim", False), Column("value"), Column("bound"), Column("holds")]
    return ReportTable("Claims", caption, columns, rows)


def difference_table(
    differences: Mapping[str, Mapping[str, Difference]], remark: str = ""
) -> ReportTable:
    """Return the table of named paired differences by figure; the remark ends its caption."""
    rows = []
    for name, estimates in differences.items():
        for key, found in estimates.items():
            digits = 1 if found.unit == "points" else 3
            value, low, high = (
                f"{number:+.{digits}f}" for number in (found.value, found.low, found.high)
            )
            arms = name.replace("_minus_", " - ").replace("_", " ")
            label = Label(f"{arms}: {key.replace('_', ' ')}")
            rows.append((label, f"{value} {found.unit}".strip(), f"[{low}, {high}]"))
    columns = [Column("difference", False), Column("value"), Column("95 % interval")]
    caption = f"Of the same samples in both, by a paired bootstrap. {remark}".strip()
    return ReportTable("Differences", caption, columns, rows)


def gain_verdict(gain: Estimate, source: str, other: str) -> str:
    """Return in one sentence whether a model uses what it is given.

    Args:
        gain: Negative log-likelihood of a text given another's source, less that given its own.
        source: What the texts are written from.
        other: Whose source they are compared with.
    """
    use = "uses"
    if gain.value < MIN_GAIN:
        use = "ignores" if gain.value <= _SURE_ERRORS * gain.se else "hardly uses"
    return (
        f"the model {use} its {source}: compared with {other}, the right one makes a text more"
        f" probable by {estimate_words(gain, 3)} nats per token"
    )


def claim(name: str, value: float, op: str, bound: float) -> dict[str, Any]:
    """Return one claim in the form of the benchmarks."""
    return {
        "id": name,
        "value": value,
        "op": op,
        "bound": bound,
        "holds": bool(_OPERATORS[op](value, bound)),
    }


def write_report(path: str | os.PathLike, report: dict[str, Any]) -> None:
    """Write a report as JSON atomically, creating its folder; a figure that is not finite becomes
    its word.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write_json(path, report, indent=2)


def arm_details(arms: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Any]:
    """Return the estimates of all arms, JSON-ready."""
    return {
        arm: {name: estimate.as_dict() for name, estimate in found.items()}
        for arm, found in arms.items()
    }


def estimate_words(estimate: Estimate, digits: int) -> str:
    """Return value +- standard error."""
    return f"{estimate.value:.{digits}f} +- {estimate.se:.{digits}f}"


def estimate_cell(
    estimate: Estimate | None, digits: int, on_screen: str | None = None
) -> str | Cell:
    """Return the cell of value and standard error, empty without an estimate; on_screen is what a
    screen shows instead of `estimate_words`.
    """
    if estimate is None:
        return ""
    error = element("span", f" \N{PLUS-MINUS SIGN} {estimate.se:.{digits}f}", class_="se")
    on_page = element("span", f"{estimate.value:.{digits}f}", error)
    return Cell(on_screen or estimate_words(estimate, digits), on_page)


def _label_element(label: Label) -> Element:
    """Return a label with its meaning, inset where it belongs to the row above."""
    style = "inset" if label.words.startswith(" ") else "figure"
    meaning = [element("span", label.meaning, class_="meaning")] if label.meaning else []
    return element("span", label.words.strip(), *meaning, class_=style)


def _conditions_section(conditions: Mapping[str, Any]) -> Element:
    """Return how it was measured."""
    items = [
        (key.replace("_", " "), _words(value))
        for key, value in conditions.items()
        if key != "notes"
    ]
    return section("Conditions", definitions(items))


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {_words(part)}" for key, part in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
