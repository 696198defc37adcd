"""What the reports of all suites share: figures, claims and conditions, as text and as HTML."""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.box import SIMPLE
from rich.table import Table

from mmldlm.evaluation.statistics import Estimate
from mmldlm.observe.pages.elements import (
    Column,
    Element,
    definitions,
    element,
    section,
    table,
)
from mmldlm.utils import atomic_files

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


@dataclass(frozen=True)
class FigureTable:
    """Figures of several arms.

    Attributes:
        title: Title of the text table.
        heading: Heading of the section on the page.
        caption: Caption on the page.
        rows: The figures that were measured.
        columns: Heading and estimates by key of every column.
        min_width: Least width of a column of the text table.
    """

    title: str
    heading: str
    caption: str
    rows: Sequence[Row]
    columns: Sequence[tuple[str, Mapping[str, Estimate]]]
    min_width: int | None = None

    def show(self, console) -> None:
        """Print the table."""
        shown = Table(title=self.title, box=SIMPLE)
        shown.add_column("measure", overflow="fold")
        for heading, _ in self.columns:
            shown.add_column(heading, justify="right", no_wrap=True, min_width=self.min_width)
        for row in self.rows:
            estimates = (found.get(row.key) for _, found in self.columns)
            shown.add_row(row.label, *(cell(estimate, row.digits) for estimate in estimates))
        console.print(shown)

    def section(self) -> Element:
        """Return the table as a part of a page, every figure with its meaning."""
        body = [
            (
                label_element(row.label, meaning_element(row.meaning)),
                *(html_cell(found.get(row.key), row.digits) for _, found in self.columns),
            )
            for row in self.rows
        ]
        headings = [Column("figure", False), *(Column(heading) for heading, _ in self.columns)]
        return section(self.heading, table(self.caption, headings, body))


class Report(ABC):
    """The result of a suite: JSON in the form of all benchmarks, text, and a page."""

    conditions: dict[str, Any]

    @property
    @abstractmethod
    def verdict(self) -> str:
        """What the figures say, in one sentence; it stands above them."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return {"conditions", "claims", "details"}, JSON-ready."""

    @abstractmethod
    def show(self, console=None) -> None:
        """Print the figures, the claims and the examples."""

    @abstractmethod
    def page(self) -> str:
        """Return the report as a page for a browser."""

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
        f" probable by {cell(gain, 3)} nats per token"
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


def print_claims(claims: list[dict[str, Any]], console) -> None:
    """Print claims as a table."""
    table = text_table("claims", "claim", "value", "bound", "holds")
    for item in claims:
        bound = f"{item['op']} {item['bound']:g}"
        table.add_row(item["id"], f"{item['value']:.4g}", bound, "yes" if item["holds"] else "NO")
    console.print(table)


def text_table(title: str, first: str, *numbers: str) -> Table:
    """Return a table for the screen: a column of texts, and further ones of numbers."""
    table = Table(title=title)
    table.add_column(first)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def arm_details(arms: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Any]:
    """Return the estimates of all arms, JSON-ready."""
    return {
        arm: {name: estimate.as_dict() for name, estimate in found.items()}
        for arm, found in arms.items()
    }


def cell(estimate: Estimate | None, digits: int) -> str:
    """Return value +- standard error, "" without one."""
    return "" if estimate is None else f"{estimate.value:.{digits}f} +- {estimate.se:.{digits}f}"


def note_elements(conditions: Mapping[str, Any]) -> list[Element]:
    """Return the notes of a report, which stand above its figures."""
    return [element("p", note, class_="note") for note in conditions["notes"]]


def claims_section(
    caption: str, claims: Sequence[Mapping[str, Any]], meanings: Mapping[str, str]
) -> Element:
    """Return the table of claims; `meanings` has a sentence by id of a claim."""
    rows = []
    for item in claims:
        name = element("span", item["id"])
        if item["id"] in meanings:
            name.append(meaning_element(meanings[item["id"]]))
        word, style = ("yes", "holds") if item["holds"] else ("NO", "fails")
        bound = f"{item['op']} {item['bound']:g}"
        rows.append((name, f"{item['value']:.4g}", bound, element("span", word, class_=style)))
    columns = [Column("claim", False), Column("value"), Column("bound"), Column("holds")]
    return section("Claims", table(caption, columns, rows))


def conditions_section(conditions: Mapping[str, Any]) -> Element:
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


def label_element(label: str, *children: Element) -> Element:
    """Return the label of a row, inset where it belongs to the row above."""
    return element(
        "span", label.strip(), *children, class_="inset" if label.startswith(" ") else "figure"
    )


def meaning_element(sentence: str) -> Element:
    """Return the sentence below the name of a figure or claim."""
    return element("span", sentence, class_="meaning")


def html_cell(estimate: Estimate | None, digits: int) -> Element:
    """Return value and standard error, empty without an estimate."""
    if estimate is None:
        return element("span", "")
    error = element("span", f" \N{PLUS-MINUS SIGN} {estimate.se:.{digits}f}", class_="se")
    return element("span", f"{estimate.value:.{digits}f}", error)
