"""Draw README's picture from a page of `mmldlm sample --trace`: texts that are being written.

    mmldlm sample l2t --checkpoint RUN --data STORE --num-samples 50 --output-dir OUT \\
        --trace trace.html
    python docs/results/trace_svg.py trace.html docs/results/trace.svg --note "..."

Of the texts that fit into a line it takes one of the upper, one of the middle and one of the lower
third, by the F1 of the words that a text shares with its sentence, and says which. The picture
moves where style sheets in pictures do, as on GitHub; elsewhere, and for readers who prefer no
motion, it shows the finished texts.
"""

from __future__ import annotations

import argparse
import html
import json
import re
from pathlib import Path
from typing import Any

WIDTH, MARGIN, ROW, TOP, BOTTOM = 960, 24, 80, 52, 30
LETTER = 8.43  # width of a letter of the monospaced font at 14 px
SECONDS_PER_PASS, SECONDS_AT_END = 0.6, 4.0
# From the worst text to the best: the place of each row, and what the row says of it.
PLACES = (
    (5 / 6, "better than five of six"),
    (1 / 2, "in the middle"),
    (1 / 6, "worse than five of six"),
)
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
INK, GRAY, FRAME, MASK, NEW = "#1f2328", "#57606a", "#d0d7de", "#d8dee4", "#d66e1c"


def read_trace(page: Path) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Return the tokens, [shown text, 1 where it continues the word before], and the texts."""
    found = re.search(
        r'<script id="data" type="application/json">(.*?)</script>',
        page.read_text(encoding="utf-8"),
        re.S,
    )
    if found is None:
        raise SystemExit(f"{page} is no page of `mmldlm sample --trace`")
    data = json.loads(found[1])
    return data["tokens"], [text for text in data["texts"] if text["reference"]]


def shared_words(text: dict[str, Any]) -> float:
    """Return the F1 of the words of a text and of its reference."""
    written, given = (set(re.findall(r"\w+", text[key].lower())) for key in ("text", "reference"))
    return 2 * len(written & given) / max(len(written) + len(given), 1)


def choose(texts: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of the picture: a label and a text of each of PLACES."""
    most = int((WIDTH - 2 * MARGIN) / LETTER) - 10
    ranked = sorted(texts, key=shared_words)
    rows = []
    for place, label in PLACES:
        middle = place * (len(ranked) - 1)
        fitting = [
            rank
            for rank, text in enumerate(ranked)
            if max(len(text["text"]), len(text["reference"])) <= most and len(text["passes"]) >= 5
        ]
        nearest = min(fitting, key=lambda rank: abs(rank - middle))
        rows.append((label, ranked[nearest]))
    return rows


def last_writes(text: dict[str, Any]) -> dict[int, tuple[int, int]]:
    """Return (pass, token) of the last write of each position."""
    return {
        position: (number, token)
        for number, writes in enumerate(text["passes"])
        for position, token, *_ in writes
        if token is not None
    }


def draw_row(label: str, text: dict[str, Any], tokens: list[list[Any]], y: float) -> list[str]:
    """Return the elements of a row: the sentence, and the text below it, token by token."""
    rows = [
        f'<rect x="12" y="{y}" width="{WIDTH - 24}" height="{ROW - 12}" rx="6" fill="#f6f8fa"/>',
        f'<text x="{MARGIN}" y="{y + 24}" font-size="12" fill="{GRAY}">sentence: '
        f"{html.escape(text['reference'])}</text>",
        f'<text x="{WIDTH - MARGIN}" y="{y + 24}" font-size="12" fill="{GRAY}" '
        f'text-anchor="end">{label}</text>',
    ]
    x = float(MARGIN)
    for position, (number, token) in sorted(last_writes(text).items()):
        word, is_joined = tokens[token]
        if position and not is_joined:
            x += LETTER
        width = LETTER * len(word)
        rows.append(
            f'<rect class="m p{number}" x="{x:.1f}" y="{y + 38}" width="{width - 1:.1f}" '
            f'height="20" rx="3" fill="{MASK}"/>'
            f'<text class="w q{number}" x="{x:.1f}" y="{y + 53}" font-size="14" '
            f'font-family="{FONT}" textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs" '
            f'fill="{INK}">{html.escape(word)}</text>'
        )
        x += width
    return rows


def style(num_passes: int) -> str:
    """Return the style sheet: a mask of pass n goes, and its token comes, at the n-th step."""
    total = (num_passes + 1) * SECONDS_PER_PASS + SECONDS_AT_END
    rules = [".m{opacity:0}", "@media (prefers-reduced-motion:no-preference){"]
    for number in range(num_passes):
        start = 100 * (number + 1) * SECONDS_PER_PASS / total
        end = 100 * (number + 2) * SECONDS_PER_PASS / total
        rules += [
            f"@keyframes m{number}{{0%,{start:.2f}%{{opacity:1}}"
            f"{start + 0.01:.2f}%,100%{{opacity:0}}}}",
            f"@keyframes w{number}{{0%,{start:.2f}%{{opacity:0;fill:{NEW}}}"
            f"{start + 0.01:.2f}%,{end:.2f}%{{opacity:1;fill:{NEW}}}"
            f"{end + 0.01:.2f}%,100%{{opacity:1;fill:{INK}}}}}",
            f".p{number}{{animation:m{number} {total:g}s infinite}}",
            f".q{number}{{animation:w{number} {total:g}s infinite}}",
        ]
    return "".join([*rules, "}"])


def draw(tokens: list[list[Any]], rows: list[tuple[str, dict[str, Any]]], note: str) -> str:
    """Return the picture."""
    height = TOP + ROW * len(rows) + BOTTOM
    num_passes = max(len(text["passes"]) for _, text in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,'
        'sans-serif" role="img" aria-labelledby="t d">',
        '<title id="t">Texts being written from their embeddings</title>',
        '<desc id="d">Unseen sentences, and what the quickstart\'s model writes from their '
        "embeddings alone, pass by pass.</desc>",
        f"<style>{style(num_passes)}</style>",
        f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="#fff" '
        f'stroke="{FRAME}"/>',
        f'<text x="{MARGIN}" y="33" font-size="15" font-weight="600" fill="{INK}">'
        "written from the embedding of an unseen sentence, the surest tokens first</text>",
    ]
    for number, (label, text) in enumerate(rows):
        lines += draw_row(label, text, tokens, TOP + ROW * number)
    lines.append(
        f'<text x="{MARGIN}" y="{height - 18}" font-size="12" fill="{GRAY}">{html.escape(note)}'
        "</text>"
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Read a page, write a picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="page of `mmldlm sample --trace`")
    parser.add_argument("picture", type=Path, help="SVG to write")
    parser.add_argument("--note", default="", help="line below the texts")
    args = parser.parse_args()
    tokens, texts = read_trace(args.page)
    args.picture.write_text(draw(tokens, choose(texts), args.note), encoding="utf-8")


if __name__ == "__main__":
    main()
