"""The tables of baselines.py, in Markdown."""

from __future__ import annotations

import math

COLUMNS = (
    ("text_and_length", "nats/token", 3),
    ("gain_null", "gain of the latent", 3),
    ("sentence_bleu", "BLEU", 1),
    ("exact_match", "EM", 1),
    ("word_f1", "word F1", 1),
    ("judged", "judge's nats/token", 3),
    ("unigram_entropy", "entropy", 2),
    ("distinct_2", "distinct-2", 3),
)
COSTS = ("PPL", "parameters", "without vocabulary", "MFLOP/token", "CPU s", "rate")


def markdown(table: dict[str, dict]) -> str:
    """One row an arm; a figure that an arm does not have is left empty."""
    used = [
        column
        for column in COLUMNS
        if any(column[0] in entry["figures"] for entry in table.values())
    ]
    names = ["arm", *(label for _, label, _ in used), *COSTS]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for name, entry in table.items():
        cells = [name, *(_cell(entry["figures"].get(key), digits) for key, _, digits in used)]
        lines.append("| " + " | ".join([*cells, *_costs(entry)]) + " |")
    return "\n".join(lines)


def _cell(estimate: dict | None, digits: int) -> str:
    if estimate is None:
        return ""
    return f"{estimate['value']:.{digits}f} ± {estimate['se']:.{digits}f}"


def _costs(entry: dict) -> list[str]:
    if "parameters" not in entry:  # real texts
        return [""] * len(COSTS)
    return [
        f"{math.exp(entry['figures']['text_and_length']['value']):.1f}",
        f"{entry['parameters'] / 1e6:.2f}M",
        f"{entry['without_vocabulary'] / 1e6:.2f}M",
        f"{entry['flops_a_token'] / 1e6:.1f}",
        f"{entry['seconds']:.0f}",
        f"{entry['rate']:g}",
    ]
