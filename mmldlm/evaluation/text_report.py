"""Tables of written strings: against their references beside the floors, and as a set beside real
sentences, as text and as parts of a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from mmldlm.evaluation.report import html_cell, label_element, measured_rows
from mmldlm.evaluation.statistics import Difference, Estimate
from mmldlm.observe.pages.elements import Column, Element, definitions, section, table

Arms = Mapping[str, Mapping[str, Estimate]]
Differences = Mapping[str, Mapping[str, Difference]]

# Caption of a table of estimates.
ERRORS = (
    "\N{PLUS-MINUS SIGN} is one standard error over sentences. An indented line belongs to the"
    " line above it."
)

# (arm, label) of the rows, in order.
OVERLAP_ROWS = (
    ("model", "model"),
    ("model_without_near_duplicates", "  without known"),
    ("search", "search"),
    ("nearest_training_sentence", "nearest training"),
    ("nearest_training_sentence_without_near_duplicates", "  without known"),
    ("shuffled", "another's text"),
    ("unigram_draws", "drawn tokens"),
    ("most_frequent_tokens", "frequent tokens"),
)
SET_ROWS = (("model", "model"), ("sentences", "real sentences"))
# (figure, heading, digits) of the columns, in order.
OVERLAP_COLUMNS = (
    ("sentence_bleu", "sentence\nBLEU", 1),
    ("corpus_bleu", "corpus\nBLEU", 1),
    ("word_f1", "word\nF1", 1),
    ("word_set_f1", "word-set\nF1", 1),
    ("exact_match", "exact\nmatch", 1),
    ("length_exact", "length\nexact", 1),
)
SET_COLUMNS = (
    ("adjacent_repeats", "adjacent\nrepeats", 3),
    ("repeated_bigrams", "repeated\nbigrams", 3),
    ("distinct_2", "distinct-2", 3),
    ("unigram_entropy", "entropy,\nnats/word", 2),
    ("words_per_text", "words", 1),
)
OVERLAP_LEGEND = {
    "sentence_bleu": "sentence BLEU: mean of sacrebleu over texts, as vec2text; 0 under 4 words",
    "corpus_bleu": "corpus BLEU: sacrebleu of all texts at once",
    "word_f1": "word F1: overlap of the words, each as often as it occurs",
    "word_set_f1": "word-set F1: overlap of the sets of words: a repeated word costs nothing",
    "exact_match": "exact match: texts that equal the sentence, case and punctuation included",
    "length_exact": "length exact: texts with the right number of tokens; exact match needs it",
    "nearest_training_sentence": (
        "nearest training: no model; the training sentence with the nearest embedding"
    ),
    "shuffled": "another's text: written by the model from another sentence's embedding",
    "unigram_draws": "drawn tokens: drawn by their frequency in training; lengths, too",
    "most_frequent_tokens": (
        "frequent tokens: always the same text of the most frequent tokens, each once"
    ),
}
SET_LEGEND = {
    "adjacent_repeats": "adjacent repeats: share of words that repeat the word before",
    "repeated_bigrams": "repeated bigrams: share of a text's word pairs that the text has already",
    "distinct_2": "distinct-2: different word pairs of all texts / word pairs",
    "unigram_entropy": (
        "entropy: of the words of all texts; lower than real: few words, used often"
    ),
}


_OVERLAP = (OVERLAP_ROWS, OVERLAP_COLUMNS, OVERLAP_LEGEND)
_SET = (SET_ROWS, SET_COLUMNS, SET_LEGEND)


def show_texts(arms: Arms, differences: Differences, conditions: dict, console) -> None:
    """Print what was measured of written strings; nothing if no text was written."""
    if "sentences" not in arms:
        return
    if "word_f1" in arms["model"]:
        count = arms["model"]["word_f1"].n
        title = f"texts written from {count} embeddings against their sentences, points +- SE"
        _print(title, *_measured(arms, *_OVERLAP), arms, console)
        _print_known(differences, conditions, console)
        _print_search(arms, differences, conditions, console)
    count = arms["sentences"]["words_per_text"].n
    title = f"{count} written texts as a set, beside as many real sentences, +- SE"
    _print(title, *_measured(arms, *_SET), arms, console)


def _measured(
    arms: Arms, rows: Sequence, columns: Sequence, legend: Mapping[str, str]
) -> tuple[Sequence, Sequence, list[str]]:
    """Return the rows and columns that have figures, and the words of the legend for them."""
    rows = measured_rows(rows, arms.__contains__)
    columns = [column for column in columns if any(column[0] in arms[name] for name, _ in rows)]
    shown = {name for name, _ in rows} | {key for key, _, _ in columns}
    return rows, columns, [words for name, words in legend.items() if name in shown]


def _print(
    title: str, rows: Sequence, columns: Sequence, legend: list[str], arms: Arms, console
) -> None:
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    table.add_column("", no_wrap=True)
    for _, heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, label in rows:
        table.add_row(
            label, *(_short_cell(arms[name].get(key), digits) for key, _, digits in columns)
        )
    console.print(table)
    for words in legend:
        console.print(words)
    console.print()


def _print_known(differences: Differences, conditions: dict[str, Any], console) -> None:
    """Print how many sentences are near-duplicates, and whether the model is better than a
    look-up.
    """
    known = conditions.get("near_duplicates")
    if known is None:
        return
    count = conditions["num_sentences"]
    share = f"{known['count']} of {count}"
    console.print(
        f"known: sentences with a training sentence of a cosine above {known['cosine_above']}:"
        f" {share}"
    )
    for key, words in (
        ("sentence_bleu", "sentence BLEU"),
        ("word_f1", "word F1"),
        ("exact_match", "exact match"),
    ):
        found = differences["model_minus_nearest_training_sentence"].get(key)
        if found is not None:
            interval = f"[{found.low:+.1f}, {found.high:+.1f}]"
            console.print(
                f"model - nearest training, {words}: {found.value:+.1f} points, 95 % interval"
                f" {interval}"
            )
    console.print()


def _print_search(
    arms: Arms,
    differences: Differences,
    conditions: dict[str, Any],
    console,
) -> None:
    """Print what a search gained over the model's texts, and what both cost."""
    search = conditions.get("search")
    if search is None:
        return
    change = differences["search_minus_model"]["judge_cosine"]
    after, before = (arms[name]["judge_cosine"].value for name in ("search", "model"))
    console.print(f"search: {search['what']}")
    console.print(
        f"cosine of the text embedded by the judge: {after:.3f} +-"
        f" {arms['search']['judge_cosine'].se:.3f}"
    )
    interval = f"95 % interval of the difference [{change.low:+.3f}, {change.high:+.3f}]"
    console.print(f"of the model's text: {before:.3f}; {interval}")
    for name, gflops, depth, calls in _costs(conditions):
        flops = "" if gflops is None else f"{gflops:.1f} GFLOP, "
        console.print(
            f"cost of a text, {name}: {flops}{calls:.0f} texts judged, at most {depth:g} passes in"
            " sequence"
        )
    console.print()


def _short_cell(estimate: Estimate | None, digits: int) -> str:
    """Return value+-error, without decimals of a value of 100 or an error of 10: the table must
    fit 80 columns.
    """
    if estimate is None:
        return ""
    value, error = f"{estimate.value:.{digits}f}", f"{estimate.se:.{digits}f}"
    value = "100" if value == "100.0" else value
    error = error.split(".")[0] if estimate.se >= 10 else error
    return f"{value}+-{error}"


def text_sections(
    arms: Arms, differences: Differences, conditions: Mapping[str, Any]
) -> list[Element]:
    """Return what `show_texts` prints as parts of a page."""
    parts = []
    if "word_f1" in arms["model"]:
        count = arms["model"]["word_f1"].n
        caption = (
            f"Texts written from {count} embeddings against their sentences, in points of 100."
            f" {ERRORS}"
        )
        found = _arms_table(*_measured(arms, *_OVERLAP), arms, caption)
        extra = [*_difference_tables(differences, conditions), *_search_costs(conditions)]
        parts.append(section("Written texts against their sentences", *found, *extra))
    if "sentences" in arms:
        caption = f"The same number of real sentences shows what to compare with. {ERRORS}"
        found = _arms_table(*_measured(arms, *_SET), arms, caption)
        parts.append(section("Written texts as a set", *found))
    return parts


def _arms_table(
    rows: Sequence, columns: Sequence, legend: list[str], arms: Arms, caption: str
) -> tuple[Element, Element]:
    """Return a table of arms by figures, and what both mean."""
    heads = [Column("", False), *(Column(heading.replace("\n", " ")) for _, heading, _ in columns)]
    cells = [
        (
            label_element(label),
            *(html_cell(arms[arm].get(key), n) for key, _, n in columns),
        )
        for arm, label in rows
    ]
    words = [text.partition(": ")[::2] for text in legend]
    return table(caption, heads, cells), definitions(words)


def _difference_tables(differences: Differences, conditions: Mapping[str, Any]) -> list[Element]:
    """A table of paired differences; of near-duplicates, how many there are."""
    rows = []
    for name, estimates in differences.items():
        for key, found in estimates.items():
            digits = 3 if found.unit == "cosine" else 1
            interval = f"[{found.low:+.{digits}f}, {found.high:+.{digits}f}]"
            label = f"{name.replace('_', ' ')}: {key.replace('_', ' ')}"
            rows.append((label, f"{found.value:+.{digits}f} {found.unit}", interval))
    if not rows:
        return []
    caption = "Differences on the same sentences, with 95 % bootstrap intervals."
    known = conditions.get("near_duplicates")
    if known is not None:
        share = f"{known['count']} of {conditions['num_sentences']}"
        caption += (
            f" Known: {share} sentences have a training sentence of a cosine above"
            f" {known['cosine_above']}."
        )
    return [
        table(caption, [Column("difference", False), Column("value"), Column("interval")], rows)
    ]


def _costs(conditions: Mapping[str, Any]) -> list[tuple[str, float | None, float, float]]:
    """Return (name, GFLOP, passes in sequence at most, texts judged) of one text of the model,
    and of a search.
    """
    search = conditions["search"]
    return [
        ("model", conditions.get("gflops_per_text"), conditions["most_passes"], 0),
        ("search", search["gflops"], search["depth"], search["judge_calls"]),
    ]


def _search_costs(conditions: Mapping[str, Any]) -> list[Element]:
    """What the texts of a search cost beside the model's own, if there was one."""
    search = conditions.get("search")
    if search is None:
        return []
    names = {"model": "model", "search": f"search: {search['what']}"}
    rows = [
        (names[name], "" if gflops is None else f"{gflops:.1f}", f"{depth:g}", f"{calls:.0f}")
        for name, gflops, depth, calls in _costs(conditions)
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
