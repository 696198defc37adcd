"""Tables of written strings: against their references beside the floors, and as a set beside real
sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmldlm.evaluation.report import (
    Cell,
    Label,
    ReportTable,
    Row,
    TableRow,
    difference_table,
    estimate_cell,
    measured_rows,
)
from mmldlm.evaluation.statistics import Difference, Estimate
from mmldlm.observe.pages.elements import Column

Arms = Mapping[str, Mapping[str, Estimate]]
Differences = Mapping[str, Mapping[str, Difference]]

# Caption of a table of estimates.
ERRORS = "+- is one standard error over sentences. An indented line belongs to the line above it."

# (arm, label, meaning) of the rows, in order.
OVERLAP_ROWS = (
    ("model", "model", ""),
    ("model_without_near_duplicates", "  without known", ""),
    ("search", "search", ""),
    (
        "nearest_training_sentence",
        "nearest training",
        "no model; the training sentence with the nearest embedding",
    ),
    ("nearest_training_sentence_without_near_duplicates", "  without known", ""),
    ("shuffled", "another's text", "written by the model from another sentence's embedding"),
    ("unigram_draws", "drawn tokens", "drawn by their frequency in training; lengths, too"),
    (
        "most_frequent_tokens",
        "frequent tokens",
        "always the same text of the most frequent tokens, each once",
    ),
)
SET_ROWS = (("model", "model", ""), ("sentences", "real sentences", ""))
# The columns, in order.
OVERLAP_COLUMNS = (
    Row(
        "sentence_bleu",
        "sentence\nBLEU",
        1,
        "mean of sacrebleu over texts, as vec2text; 0 under 4 words",
    ),
    Row("corpus_bleu", "corpus\nBLEU", 1, "sacrebleu of all texts at once"),
    Row("word_f1", "word\nF1", 1, "overlap of the words, each as often as it occurs"),
    Row(
        "word_set_f1",
        "word-set\nF1",
        1,
        "overlap of the sets of words: a repeated word costs nothing",
    ),
    Row(
        "exact_match",
        "exact\nmatch",
        1,
        "texts that equal the sentence, case and punctuation included",
    ),
    Row(
        "length_exact",
        "length\nexact",
        1,
        "texts with the right number of tokens; exact match needs it",
    ),
)
SET_COLUMNS = (
    Row("adjacent_repeats", "adjacent\nrepeats", 3, "share of words that repeat the word before"),
    Row(
        "repeated_bigrams",
        "repeated\nbigrams",
        3,
        "share of a text's word pairs that the text has already",
    ),
    Row("distinct_2", "distinct-2", 3, "different word pairs of all texts / word pairs"),
    Row(
        "unigram_entropy",
        "entropy,\nnats/word",
        2,
        "of the words of all texts; lower than real: few words, used often",
    ),
    Row("words_per_text", "words", 1, "number of them in a text"),
)


def text_tables(
    arms: Arms, differences: Differences, conditions: Mapping[str, Any]
) -> list[ReportTable]:
    """Return what was measured of written strings; nothing if no text was written."""
    tables = []
    if "word_f1" in arms["model"]:
        heading = f"{arms['model']['word_f1'].n} written texts against their sentences, in points"
        tables.append(_arms_table(heading, OVERLAP_ROWS, OVERLAP_COLUMNS, arms))
    if "sentences" in arms:
        count = arms["sentences"]["words_per_text"].n
        heading = f"{count} written texts as a set, beside as many real sentences"
        tables.append(_arms_table(heading, SET_ROWS, SET_COLUMNS, arms))
    if differences:
        tables.append(difference_table(differences, _known_words(conditions)))
    if "search" in conditions:
        tables.append(_search_table(arms, conditions))
    return tables


def _arms_table(
    heading: str,
    rows: Sequence[tuple[str, str, str]],
    columns: Sequence[Row],
    arms: Arms,
) -> ReportTable:
    """Return the table of those arms and figures that were measured, an arm in each row."""
    rows = measured_rows(rows, arms.__contains__)
    columns = [column for column in columns if any(column.key in arms[arm] for arm, *_ in rows)]
    body: list[TableRow] = [
        (
            Label(label, meaning),
            *(_short_cell(arms[arm].get(column.key), column.digits) for column in columns),
        )
        for arm, label, meaning in rows
    ]
    legend = {column.label.replace("\n", " "): column.meaning for column in columns}
    headings = [Column("", False), *(Column(column.label) for column in columns)]
    return ReportTable(heading, ERRORS, headings, body, legend, padding=0)


def _short_cell(estimate: Estimate | None, digits: int) -> str | Cell:
    """Return the cell of an estimate, on the screen value+-error, without decimals of a value of
    100 or an error of 10: the table must fit 80 columns.
    """
    if estimate is None:
        return ""
    value, error = f"{estimate.value:.{digits}f}", f"{estimate.se:.{digits}f}"
    value = "100" if value == "100.0" else value
    error = error.split(".")[0] if estimate.se >= 10 else error
    return estimate_cell(estimate, digits, f"{value}+-{error}")


def _known_words(conditions: Mapping[str, Any]) -> str:
    """Return in words how many sentences are near-duplicates of training sentences."""
    known = conditions.get("near_duplicates")
    if known is None:
        return ""
    return (
        f"Known: {known['count']} of {conditions['num_sentences']} sentences have a training"
        f" sentence of a cosine above {known['cosine_above']}."
    )


def _search_table(arms: Arms, conditions: Mapping[str, Any]) -> ReportTable:
    """Return what a search found beside the model's texts, and what a text of both costs."""
    search = conditions["search"]
    costs = {
        "model": (conditions.get("gflops_per_text"), conditions["most_passes"], 0),
        "search": (search["gflops"], search["depth"], search["judge_calls"]),
    }
    rows = [
        (
            Label(name),
            estimate_cell(arms[name].get("judge_cosine"), 3),
            "" if gflops is None else f"{gflops:.1f}",
            f"{depth:g}",
            f"{calls:.0f}",
        )
        for name, (gflops, depth, calls) in costs.items()
    ]
    headings = (
        "cosine by\nthe judge",
        "GFLOP\na text",
        "most passes\nin sequence",
        "texts\njudged",
    )
    caption = (
        f"Search: {search['what']}. The judge embeds texts; the cosine is that with the embedding."
    )
    return ReportTable(
        "Texts of the search", caption, [Column("", False), *map(Column, headings)], rows
    )
