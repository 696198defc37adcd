"""Collect the quickstart's results: write report.json to the run folder and print the
final table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

TEXT_FIGURES = (
    ("sentence_bleu", "sentence BLEU, points", 1),
    ("word_f1", "word F1, points", 1),
    ("exact_match", "exact match, points", 1),
    ("reencoded_cosine", "cosine of the text embedded again", 3),
)


IMAGE_FIGURES = (
    ("model", "nearest_training_image", "exact", "exact captions of images", 3),
    ("model", "nearest_training_image", "exact_up_to_pixels", "  up to equal pixels", 3),
    ("model", "nearest_training_image", "f1_right", "set-F1 of captions", 3),
    ("guidance_1", "", "recall_at_5", "R@5 of made images, guidance 1", 3),
    ("guidance_2", "", "recall_at_5", "R@5 of made images, second guidance", 3),
    ("guidance_2", "", "image_cosine_gap", "  cosine, right - another caption", 3),
    ("guidance_2", "", "copy_ratio", "  distance to training images, made / real", 3),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=int, help="duration after the installation")
    parser.add_argument("--setup-seconds", type=int, help="duration of the installation")
    parser.add_argument(
        "--bounds", nargs="+", default=[], help="KEY<=VALUE, KEY>=VALUE for this corpus and budget"
    )
    parser.add_argument("--show", action="store_true", help="only print an existing report")
    parser.add_argument("--images", action="store_true", help="results of quickstart_images.sh")
    args = parser.parse_args()
    path = args.out / "run" / "report.json"
    if not args.show:
        write_report(args, path)
    return show(args.out, json.loads(path.read_text()), path, args.images)


def write_report(args: argparse.Namespace, path: Path) -> None:
    """Write the results of the evaluation and of the parity check to one file."""
    evaluation = json.loads((args.out / "evaluation.json").read_text())
    parity = json.loads((args.out / "parity.json").read_text())
    claims = evaluation["claims"] + parity["claims"]
    figures = evaluation["details"]["model"]
    claims = [*(bounded(words, figures) for words in args.bounds), *claims]
    conditions = {
        **evaluation["conditions"],
        **parity["conditions"],
        "seconds_after_installation": args.seconds,
        "seconds_installation": args.setup_seconds,
    }
    report = {"conditions": conditions, "claims": claims, "details": evaluation.get("details", {})}
    if (search := args.out / "search.json").is_file():
        found = json.loads(search.read_text())
        report["search"] = {key: found[key] for key in ("conditions", "details")}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def bounded(words: str, figures: dict) -> dict:
    """Claim that a figure of the evaluation is at most, or at least, a bound: KEY<=VALUE or
    KEY>=VALUE.
    """
    op = "<=" if "<=" in words else ">="
    key, bound = words.split(op)
    value = figures[key]["value"]
    holds = value <= float(bound) if op == "<=" else value >= float(bound)
    return {
        "id": f"quickstart_{key}",
        "value": value,
        "op": op,
        "bound": float(bound),
        "holds": holds,
    }


def show(out: Path, report: dict, path: Path, has_images: bool = False) -> int:
    """Print the table; return 0 if every claim holds."""
    claims, seconds = report["claims"], report["conditions"]["seconds_after_installation"]
    table = Table(
        title=f"quickstart: measured on unseen {'images' if has_images else 'sentences'}"
    )
    for heading in ("claim", "measured", "expected", ""):
        table.add_column(heading)
    for entry in claims:
        mark = "holds" if entry["holds"] else "DOES NOT HOLD"
        table.add_row(
            entry["id"], f"{entry['value']:.4g}", f"{entry['op']} {entry['bound']:g}", mark
        )
    console = Console()
    console.print(table)
    if has_images:
        show_images(report["details"], console)
    else:
        show_texts(report["details"], report.get("search"), console)
    console.print(f"time     {seconds // 60} min {seconds % 60} s after the installation")
    console.print(
        f"report   {path}",
        f"curve    {out / 'run' / 'plots' / 'loss.png'}",
        f"model    {out / 'model'}",
        *(
            [f"pictures {out / 'samples' / 'sheet.png'}, {out / 'evaluation.html'}"]
            if has_images
            else []
        ),
        sep="\n",
    )
    activate = Path(os.path.relpath(sys.prefix)) / "bin" / "activate"
    kind, text = (
        ("t2i", "serif bold greek small letter delta")
        if has_images
        else ("t2l", "Return the number of rows.")
    )
    sample = (
        f"mmldlm sample {kind} --checkpoint {out / 'model'} --text '{text}' --output-dir samples"
    )
    console.print(f"\nnext     . {activate}\n         {sample}", soft_wrap=True)
    return 0 if all(entry["holds"] for entry in claims) else 1


def show_texts(details: dict, search: dict | None, console: Console) -> None:
    """Print what the written texts reached, beside the nearest training sentence: a look-up
    without the model.

    Args:
        search: an evaluation of fewer sentences with --search: greedy and searched texts of the
            same sentences.
    """
    details = details if search is None else search["details"]
    names = {
        "model": "greedy",
        "search": "search",
        "nearest_training_sentence": "nearest training",
    }
    arms = [arm for arm in names if any(key in details.get(arm, {}) for key, *_ in TEXT_FIGURES)]
    count = "" if search is None else f" of {search['conditions']['num_sentences']} sentences"
    table = Table(title=f"texts written from embeddings{count}, +- one standard error")
    table.add_column("figure")
    for arm in arms:
        table.add_column(names[arm], justify="right")
    for key, label, digits in TEXT_FIGURES:
        found = [details[arm].get(key) for arm in arms]
        if any(found):
            table.add_row(
                label,
                *(f"{e['value']:.{digits}f} +- {e['se']:.{digits}f}" if e else "" for e in found),
            )
    if table.rows:
        console.print(table)
    if search is not None:
        show_search(search, console)


def show_search(search: dict, console: Console) -> None:
    """Print what a search gained over the greedy texts of the same sentences, what it cost, and
    some of its texts.
    """
    change, cost = (
        search["details"]["differences"]["search_minus_model"],
        search["conditions"]["search"],
    )
    labels = [*TEXT_FIGURES[:-1], ("judge_cosine", *TEXT_FIGURES[-1][1:])]
    gains = [(change[key], label, digits) for key, label, digits in labels if key in change]
    said = [
        f"{label} {e['value']:+.{digits}f} [{e['ci95'][0]:+.{digits}f},"
        f" {e['ci95'][1]:+.{digits}f}]"
        for e, label, digits in gains
    ]
    console.print(
        f"search - greedy of the same sentences, 95 % intervals: {'; '.join(said)}", markup=False
    )
    console.print(
        f"search   {cost['what']}: {cost['gflops']:.1f} GFLOP and {cost['judge_calls']:.0f}"
        f" embedded texts each; greedy {search['conditions']['gflops_per_text']:.1f} GFLOP"
    )
    table = Table(title="unseen sentences, written from their embeddings", show_lines=True)
    for heading in ("sentence", "greedy", "search"):
        table.add_column(heading, ratio=1, overflow="fold")
    for example in search["details"]["examples"][:5]:
        table.add_row(*(Text(example[key]) for key in ("sentence", "written", "searched")))
    console.print(table)


def show_images(details: dict, console: Console) -> None:
    """Print what captions and images reached, beside the nearest training image: a look-up without
    the model.
    """
    table = Table(title="captions and images, +- one standard error")
    for heading in ("figure", "model", "nearest training image"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for arm, floor, key, label, digits in IMAGE_FIGURES:
        found = [details.get(name, {}).get(key) for name in (arm, floor)]
        if any(found):
            table.add_row(
                label,
                *(f"{e['value']:.{digits}f} +- {e['se']:.{digits}f}" if e else "" for e in found),
            )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
