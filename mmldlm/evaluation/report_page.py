"""The pages of `mmldlm evaluate --html`: figures and what they mean, plots, and samples beside
their references.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmldlm.evaluation.meanings import CLAIM_MEANINGS, MEANINGS
from mmldlm.evaluation.report import EvaluationReport
from mmldlm.evaluation.statistics import Estimate
from mmldlm.evaluation.text_tables import (
    OVERLAP_COLUMNS,
    OVERLAP_LEGEND,
    OVERLAP_ROWS,
    SET_COLUMNS,
    SET_LEGEND,
    SET_ROWS,
    Arms,
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
from mmldlm.observe.pages.svg import Interval, interval_plot

if TYPE_CHECKING:
    from mmldlm.evaluation.sts import StsReport

# Standard errors to each side of a 95 % interval.
_SIGMAS = 1.96
# Colors of a plot: the model, a control, a search by a judge, no embedding, what needs no model.
_MODEL, _CONTROL, _SEARCH, _NULL, _FLOOR = range(5)


def _text_rows(key: str) -> tuple[tuple[str, str, str, int], ...]:
    """Return a plot's rows of a figure of strings, for the model, its control and the floors."""
    colors = {"model": _MODEL, "shuffled": _CONTROL, "search": _SEARCH}
    rows = ((arm, label) for arm, label in OVERLAP_ROWS if not label.startswith(" "))
    return tuple((arm, key, label, colors.get(arm, _FLOOR)) for arm, label in rows)


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
        "How close the texts are to their sentences (sentence BLEU). Right is better.",
        _text_rows("sentence_bleu"),
    ),
    (
        "How many words they share, each as often as it occurs (word F1). Right is better.",
        _text_rows("word_f1"),
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
_ERRORS = (
    "\N{PLUS-MINUS SIGN} is one standard error over sentences. An indented line belongs to the"
    " line above it."
)


def gain_page(report: EvaluationReport) -> str:
    """Return the page of a report of the conditioning gain."""
    conditions = report.conditions
    count = conditions["num_sentences"]
    title = f"Evaluation on {count} unseen sentences of {conditions['store']}"
    parts = [element("p", note, class_="note") for note in conditions["notes"]]
    parts += _plots(report.arms)
    if report.examples:
        parts.append(_samples(report.examples))
    parts += [_figures(report), *_texts(report)]
    if report.claims:
        parts.append(_claims(report.claims))
    return _page(title, [*parts, _conditions(conditions)])


def sts_page(report: StsReport) -> str:
    """Return the page of a report of the STS Benchmark."""
    conditions = report.conditions
    intervals = [
        Interval(
            name,
            row["spearman"]["value"],
            *row["spearman"]["ci95"],
            _MODEL if name.startswith("model") else _FLOOR,
        )
        for name, row in report.rows.items()
    ]
    plot = interval_plot(
        intervals, "Spearman", "How well similarities rank pairs as people do. Right is better."
    )
    rows = [
        (name, *(_with_interval(row[key]) for key in row)) for name, row in report.rows.items()
    ]
    caption = (
        "Correlation of the similarity of two embeddings with human scores, with 95 % bootstrap"
        " intervals over pairs. Spearman compares ranks, Pearson values; 1 is perfect, 0 is none."
        " A floor reads words alone. The ceiling is the encoder that the model learned from."
    )
    figures = section(
        "Figures",
        table(caption, [Column("similarity", False), Column("Spearman"), Column("Pearson")], rows),
    )
    title = f"STS Benchmark: {conditions['num_pairs']} pairs of {conditions['file']}"
    return _page(title, [figures, section("Plot", plot), _conditions(conditions)])


def _page(title: str, parts: Iterable[Element]) -> str:
    main = element("main", element("header", element("h1", title)), *parts, class_="report")
    return render(f"mmldlm: {title}", to_html([main]))


def _figures(report: EvaluationReport) -> Element:
    """The table of all figures that were measured, model beside untrained control."""
    rows = []
    for key, label, digits, *estimates in report.figures():
        name = element("span", label.strip(), _meaning(MEANINGS[key]), class_=_place(label))
        rows.append((name, *(_cell(estimate, digits) for estimate in estimates)))
    count = report.conditions["num_control_sentences"]
    caption = (
        f"{_ERRORS} Untrained: the same model with fresh weights, on {count} of the sentences."
    )
    return section(
        "Figures",
        table(caption, [Column("figure", False), Column("model"), Column("untrained")], rows),
    )


def _place(label: str) -> str:
    return "inset" if label.startswith(" ") else "figure"


def _texts(report: EvaluationReport) -> list[Element]:
    """Tables of the written strings, if texts were written."""
    arms, parts = report.arms, []
    if "word_f1" in arms["model"]:
        count = arms["model"]["word_f1"].n
        caption = (
            f"Texts written from {count} embeddings against their sentences, in points of 100."
            f" {_ERRORS}"
        )
        found = _arms_table(arms, caption, OVERLAP_ROWS, OVERLAP_COLUMNS, OVERLAP_LEGEND)
        extra = [*_differences(report), *_search_costs(report.conditions)]
        parts.append(section("Written texts against their sentences", *found, *extra))
    if "sentences" in arms:
        caption = f"The same number of real sentences shows what to compare with. {_ERRORS}"
        found = _arms_table(arms, caption, SET_ROWS, SET_COLUMNS, SET_LEGEND)
        parts.append(section("Written texts as a set", *found))
    return parts


def _arms_table(
    arms: Arms, caption: str, rows: Sequence, columns: Sequence, legend: Mapping[str, str]
) -> tuple[Element, Element]:
    """Return a table of arms by figures, and what both mean."""
    rows = [(arm, label) for arm, label in rows if arm in arms]
    columns = [column for column in columns if any(column[0] in arms[arm] for arm, _ in rows)]
    heads = [Column("", False), *(Column(heading.replace("\n", " ")) for _, heading, _ in columns)]
    cells = [
        (
            element("span", label.strip(), class_=_place(label)),
            *(_cell(arms[arm].get(key), n) for key, _, n in columns),
        )
        for arm, label in rows
    ]
    shown = {arm for arm, _ in rows} | {key for key, _, _ in columns}
    words = [text.partition(": ")[::2] for name, text in legend.items() if name in shown]
    return table(caption, heads, cells), definitions(words)


def _differences(report: EvaluationReport) -> list[Element]:
    """A table of paired differences; of near-duplicates, how many there are."""
    rows = []
    for name, estimates in report.differences.items():
        for key, found in estimates.items():
            digits = 3 if found.unit == "cosine" else 1
            interval = f"[{found.low:+.{digits}f}, {found.high:+.{digits}f}]"
            label = f"{name.replace('_', ' ')}: {key.replace('_', ' ')}"
            rows.append((label, f"{found.value:+.{digits}f} {found.unit}", interval))
    if not rows:
        return []
    caption = "Differences on the same sentences, with 95 % bootstrap intervals."
    known = report.conditions.get("near_duplicates")
    if known is not None:
        share = f"{known['count']} of {report.conditions['num_sentences']}"
        caption += (
            f" Known: {share} sentences have a training sentence of a cosine above"
            f" {known['cosine_above']}."
        )
    return [
        table(caption, [Column("difference", False), Column("value"), Column("interval")], rows)
    ]


def _search_costs(conditions: Mapping[str, Any]) -> list[Element]:
    """What the texts of a search cost beside the model's own, if there was one."""
    search = conditions.get("search")
    if search is None:
        return []
    costs = (
        ("model", conditions.get("gflops_per_text"), conditions["most_passes"], 0),
        (f"search: {search['what']}", search["gflops"], search["depth"], search["judge_calls"]),
    )
    rows = [
        (name, "" if gflops is None else f"{gflops:.1f}", f"{depth:g}", f"{calls:.0f}")
        for name, gflops, depth, calls in costs
    ]
    columns = [
        Column("texts of", False),
        Column("GFLOP"),
        Column("most passes in sequence"),
        Column("texts judged"),
    ]
    return [
        table(
            "Cost of one text. A judge embeds texts and compares them with the embedding.",
            columns,
            rows,
        )
    ]


def _plots(arms: Arms) -> list[Element]:
    plots = []
    for caption, entries in PLOTS:
        found = [
            (arms[arm][key], label, color)
            for arm, key, label, color in entries
            if key in arms.get(arm, {})
        ]
        if len(found) > 1:
            unit = _unit(found[0][0])
            plots.append(interval_plot([_interval(*entry) for entry in found], unit, caption))
    if not plots:
        return []
    caption = element("p", "Lines are 95 % intervals.", class_="caption")
    return [section("Plots", caption, element("div", *plots, class_="plots"))]


def _interval(estimate: Estimate, label: str, color: int) -> Interval:
    half = _SIGMAS * estimate.se
    low, high = _RANGES.get(_unit(estimate), (float("-inf"), float("inf")))
    return Interval(
        label,
        estimate.value,
        max(estimate.value - half, low),
        min(estimate.value + half, high),
        color,
    )


def _unit(estimate: Estimate) -> str:
    """Return the unit without what follows a comma ("share, of 1000")."""
    return estimate.unit.split(",")[0]


def _claims(claims: Sequence[Mapping[str, Any]]) -> Element:
    rows = [
        (
            element("span", item["id"], _meaning(CLAIM_MEANINGS.get(item["id"], ""))),
            f"{item['value']:.4g}",
            f"{item['op']} {item['bound']:g}",
            element(
                "span",
                "yes" if item["holds"] else "NO",
                class_="holds" if item["holds"] else "fails",
            ),
        )
        for item in claims
    ]
    columns = [Column("claim", False), Column("value"), Column("bound"), Column("holds")]
    return section(
        "Claims", table("Fixed bounds that the quickstart's model must meet.", columns, rows)
    )


def _samples(examples: Sequence[Mapping[str, Any]]) -> Element:
    texts = {"written": "written from its embedding", "searched": "found by the search"}
    texts = {key: heading for key, heading in texts.items() if key in examples[0]}
    rows = [
        (
            example["sentence"],
            *(element("span", *_marked(example[key], example["sentence"])) for key in texts),
            f"{100 * example['set_f1']:.0f}",
        )
        for example in examples
    ]
    columns = [
        Column("sentence", False),
        *(Column(heading, False) for heading in texts.values()),
        Column("set-F1"),
    ]
    caption = (
        "Spread evenly over the sentences, not chosen by quality. Marked: words of the sentence."
    )
    return section("Samples", table(caption, columns, rows))


def _marked(text: str, reference: str) -> list[Element | str]:
    """Return the text with those words marked that the reference has, too, whatever their case."""
    known = set(re.findall(r"\w+", reference.lower()))
    parts = re.split(r"(\w+)", text)
    return [element("mark", part) if part.lower() in known else part for part in parts if part]


def _conditions(conditions: Mapping[str, Any]) -> Element:
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


def _meaning(sentence: str) -> Element:
    return element("span", sentence, class_="meaning")


def _cell(estimate: Estimate | None, digits: int) -> Element:
    if estimate is None:
        return element("span", "")
    error = element("span", f" \N{PLUS-MINUS SIGN} {estimate.se:.{digits}f}", class_="se")
    return element("span", f"{estimate.value:.{digits}f}", error)


def _with_interval(found: Mapping[str, Any]) -> Element:
    low, high = found["ci95"]
    return element(
        "span", f"{found['value']:.3f} ", element("span", f"[{low:.3f}, {high:.3f}]", class_="se")
    )
