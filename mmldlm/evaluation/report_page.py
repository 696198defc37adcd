"""The pages of `mmldlm evaluate --html`: figures and what they mean, plots, and samples beside their references."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmldlm.evaluation.meanings import CLAIM_MEANINGS, MEANINGS
from mmldlm.evaluation.report import ROWS, EvaluationReport
from mmldlm.evaluation.statistics import Estimate
from mmldlm.observe.pages.elements import Column, Element, definitions, element, section, table, to_html
from mmldlm.observe.pages.page import render
from mmldlm.observe.pages.svg import Interval, interval_plot

if TYPE_CHECKING:
    from mmldlm.evaluation.metrics.sts_benchmark import StsReport

# Standard errors to each side of a 95 % interval.
_SIGMAS = 1.96
# Colors of a plot: the model, a control, no embedding, what needs no model.
_MODEL, _CONTROL, _NULL, _FLOOR = 0, 1, 3, 4
# (caption, ((arm, figure, label, color), ...)) of the plots, in order.
PLOTS = (
    (
        "How surprised the model is by a text, per token. Left is better.",
        (
            ("model", "nelbo_right", "its own embedding", _MODEL),
            ("model", "nelbo_shuffled", "another sentence's", _CONTROL),
            ("model", "nelbo_null", "none", _NULL),
            ("untrained", "nelbo_right", "untrained model", _FLOOR),
        ),
    ),
    (
        "How much of the sentence its text contains, as sets of tokens. Right is better.",
        (
            ("model", "f1_right", "from its own embedding", _MODEL),
            ("model", "f1_shuffled", "another sentence's", _CONTROL),
            ("untrained", "f1_right", "untrained model", _FLOOR),
        ),
    ),
    (
        "How similar embeddings are to the right ones. Right is better.",
        (
            ("model", "reencoded_cosine", "of the written texts", _MODEL),
            ("model", "reencoded_cosine_shuffled", "  another sentence's", _CONTROL),
            ("model", "cosine", "made from texts", _MODEL),
            ("model", "cosine_shuffled", "  another sentence's", _CONTROL),
            ("floors", "mean_embedding_cosine", "the mean embedding", _FLOOR),
        ),
    ),
    (
        "How often an embedding made from a text leads back to it. Right is better.",
        (
            ("model", "recall_at_1", "nearest of all", _MODEL),
            ("model", "recall_at_10", "among the nearest ten", _MODEL),
            ("floors", "mean_embedding_recall_at_1", "the mean embedding", _FLOOR),
            ("floors", "chance_recall_at_1", "a guess", _FLOOR),
        ),
    ),
)
# What a figure of a unit can be: an interval ends there.
_RANGES = {"share": (0.0, 1.0), "points": (0.0, 100.0), "cosine": (-1.0, 1.0)}
_ERRORS = "\N{PLUS-MINUS SIGN} is one standard error over sentences. An indented line belongs to the line above it."


def gain_page(report: EvaluationReport) -> str:
    """Return the page of a report of the conditioning gain."""
    conditions = report.conditions
    count = conditions["num_sentences"]
    title = f"Evaluation on {count} unseen sentences of {conditions['store']}"
    parts = [element("p", note, class_="note") for note in conditions["notes"]]
    parts.append(_plots(report.arms))
    if report.examples:
        parts.append(_samples(report.examples))
    return _page(title, [*parts, _figures(report), _claims(report.claims), _conditions(conditions)])


def sts_page(report: StsReport) -> str:
    """Return the page of a report of the STS Benchmark."""
    conditions = report.conditions
    intervals = [
        Interval(
            name, row["spearman"]["value"], *row["spearman"]["ci95"], _MODEL if name.startswith("model") else _FLOOR
        )
        for name, row in report.rows.items()
    ]
    plot = interval_plot(intervals, "Spearman", "How well similarities rank pairs as people do. Right is better.")
    rows = [(name, *(_with_interval(row[key]) for key in row)) for name, row in report.rows.items()]
    caption = (
        "Correlation of the similarity of two embeddings with human scores, with 95 % bootstrap intervals over pairs. "
        "Spearman compares ranks, Pearson values; 1 is perfect, 0 is none. A floor reads words alone. The ceiling is "
        "the encoder that the model learned from."
    )
    figures = section(
        "Figures", table(caption, [Column("similarity", False), Column("Spearman"), Column("Pearson")], rows)
    )
    title = f"STS Benchmark: {conditions['num_pairs']} pairs of {conditions['file']}"
    return _page(title, [figures, section("Plot", plot), _conditions(conditions)])


def _page(title: str, parts: Iterable[Element]) -> str:
    main = element("main", element("header", element("h1", title)), *parts, class_="report")
    return render(f"mmldlm: {title}", to_html([main]))


def _figures(report: EvaluationReport) -> Element:
    """The table of all figures that were measured, model beside untrained control."""
    arms = [{**report.arms["model"], **report.arms.get("floors", {})}, report.arms["untrained"]]
    rows = []
    for key, label, digits in ROWS:
        if any(key in arm for arm in arms):
            place = "inset" if label.startswith(" ") else "figure"
            name = element("span", label.strip(), _meaning(MEANINGS.get(key, "")), class_=place)
            rows.append((name, *(_cell(arm.get(key), digits) for arm in arms)))
    count = report.conditions["num_control_sentences"]
    caption = f"{_ERRORS} Untrained: the same model with fresh weights, on {count} of the sentences."
    return section("Figures", table(caption, [Column("figure", False), Column("model"), Column("untrained")], rows))


def _plots(arms: Mapping[str, Mapping[str, Estimate]]) -> Element:
    plots = []
    for caption, entries in PLOTS:
        found = [(arms[arm][key], label, color) for arm, key, label, color in entries if key in arms.get(arm, {})]
        if len(found) > 1:
            unit = _unit(found[0][0])
            plots.append(interval_plot([_interval(*entry) for entry in found], unit, caption))
    return section(
        "Plots", element("p", "Lines are 95 % intervals.", class_="caption"), element("div", *plots, class_="plots")
    )


def _interval(estimate: Estimate, label: str, color: int) -> Interval:
    half = _SIGMAS * estimate.se
    low, high = _RANGES.get(_unit(estimate), (float("-inf"), float("inf")))
    return Interval(label, estimate.value, max(estimate.value - half, low), min(estimate.value + half, high), color)


def _unit(estimate: Estimate) -> str:
    """Return the unit without what follows a comma ("share, of 1000")."""
    return estimate.unit.split(",")[0]


def _claims(claims: Sequence[Mapping[str, Any]]) -> Element:
    rows = [
        (
            element("span", item["id"], _meaning(CLAIM_MEANINGS.get(item["id"], ""))),
            f"{item['value']:.4g}",
            f"{item['op']} {item['bound']:g}",
            element("span", "yes" if item["holds"] else "NO", class_="holds" if item["holds"] else "fails"),
        )
        for item in claims
    ]
    columns = [Column("claim", False), Column("value"), Column("bound"), Column("holds")]
    return section("Claims", table("Fixed bounds that the quickstart's model must meet.", columns, rows))


def _samples(examples: Sequence[Mapping[str, Any]]) -> Element:
    rows = []
    for example in examples:
        written = element("span", *_marked(example["written"], example["sentence"]))
        rows.append((example["sentence"], written, f"{100 * example['set_f1']:.0f}"))
    columns = [
        Column("sentence", False),
        Column("written from its embedding", False),
        Column("set-F1"),
    ]
    caption = "Spread evenly over the sentences, not chosen by quality. Marked: words of the sentence."
    return section("Samples", table(caption, columns, rows))


def _marked(text: str, reference: str) -> list[Element | str]:
    """Return the text with those words marked that the reference has, too, whatever their case."""
    known = set(re.findall(r"\w+", reference.lower()))
    parts = re.split(r"(\w+)", text)
    return [element("mark", part) if part.lower() in known else part for part in parts if part]


def _conditions(conditions: Mapping[str, Any]) -> Element:
    items = [(key.replace("_", " "), _words(value)) for key, value in conditions.items() if key != "notes"]
    return section("Conditions", definitions(items))


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {_words(part)}" for key, part in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _meaning(sentence: str) -> Element:
    return element("span", sentence, class_="meaning")


def _cell(estimate: Estimate | None, digits: int) -> Element:
    if estimate is None:
        return element("span", "")
    error = element("span", f" \N{PLUS-MINUS SIGN} {estimate.se:.{digits}f}", class_="se")
    return element("span", f"{estimate.value:.{digits}f}", error)


def _with_interval(found: Mapping[str, Any]) -> Element:
    low, high = found["ci95"]
    return element("span", f"{found['value']:.3f} ", element("span", f"[{low:.3f}, {high:.3f}]", class_="se"))
