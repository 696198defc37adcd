"""Tables of written strings: against their references beside the floors, and as a set beside real
sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmldlm.evaluation.measured_rows import measured_rows
from mmldlm.evaluation.statistics import Difference, Estimate

Arms = Mapping[str, Mapping[str, Estimate]]

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


def show_texts(
    arms: Arms, differences: Mapping[str, Mapping[str, Difference]], conditions: dict, console
) -> None:
    """Print what was measured of written strings; nothing if no text was written."""
    if "sentences" not in arms:
        return
    if "word_f1" in arms["model"]:
        count = arms["model"]["word_f1"].n
        title = f"texts written from {count} embeddings against their sentences, points +- SE"
        _print(title, OVERLAP_ROWS, OVERLAP_COLUMNS, arms, OVERLAP_LEGEND, console)
        _print_known(differences, conditions, console)
        _print_search(arms, differences, conditions, console)
    count = arms["sentences"]["words_per_text"].n
    title = f"{count} written texts as a set, beside as many real sentences, +- SE"
    _print(title, SET_ROWS, SET_COLUMNS, arms, SET_LEGEND, console)


def _print(
    title: str, rows: tuple, columns: tuple, arms: Arms, legend: dict[str, str], console
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = tuple(measured_rows(rows, arms.__contains__))
    columns = tuple(
        column for column in columns if any(column[0] in arms[name] for name, _ in rows)
    )
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    table.add_column("", no_wrap=True)
    for _, heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, label in rows:
        table.add_row(label, *(_cell(arms[name].get(key), digits) for key, _, digits in columns))
    console.print(table)
    shown = {name for name, _ in rows} | {key for key, _, _ in columns}
    for name, words in legend.items():
        if name in shown:
            console.print(words)
    console.print()


def _print_known(
    differences: Mapping[str, Mapping[str, Difference]], conditions: dict[str, Any], console
) -> None:
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
    differences: Mapping[str, Mapping[str, Difference]],
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
    for name, gflops, depth, calls in (
        ("search", search["gflops"], search["depth"], search["judge_calls"]),
        ("model", conditions.get("gflops_per_text"), int(conditions["most_passes"]), 0),
    ):
        flops = "" if gflops is None else f"{gflops:.1f} GFLOP, "
        console.print(
            f"cost of a text, {name}: {flops}{calls:.0f} texts judged, at most {depth} passes in"
            " sequence"
        )
    console.print()


def _cell(estimate: Estimate | None, digits: int) -> str:
    """Return value+-error, without decimals of a value of 100 or an error of 10: the table must
    fit 80 columns.
    """
    if estimate is None:
        return ""
    value, error = f"{estimate.value:.{digits}f}", f"{estimate.se:.{digits}f}"
    value = "100" if value == "100.0" else value
    error = error.split(".")[0] if estimate.se >= 10 else error
    return f"{value}+-{error}"
