"""The page of an evaluation of images: what was asked for, what was made, and the figures."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import numpy as np

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

if TYPE_CHECKING:
    from mmldlm.evaluation.image_report import ImageReport

_SIDE = 64  # pixels of a picture on the page; small ones are enlarged without smoothing


def image_page(report: ImageReport) -> str:
    """Return the page of a report, one file with its pictures inside."""
    conditions = report.conditions
    title = f"Evaluation on {conditions['num_images']} unseen images of {conditions['store']}"
    parts = [element("p", note, class_="note") for note in conditions["notes"]]
    parts += [_examples(report), *_figures(report), _claims(report), _conditions(report)]
    main = element("main", element("header", element("h1", title)), *parts, class_="report")
    return render(f"mmldlm: {title}", to_html([main]))


def _examples(report: ImageReport) -> Element:
    columns = [Column("caption", False), *(Column(name, False) for name in report.pictures)]
    has_text = bool(report.examples) and "written" in report.examples[0]
    rows = []
    for number, example in enumerate(report.examples):
        pictures = [
            _picture(images[number], example["caption"]) for images in report.pictures.values()
        ]
        rows.append((example["caption"], *pictures, *([example["written"]] if has_text else [])))
    columns += [Column("caption written from the real image", False)] * has_text
    caption = "Spread evenly over the unseen images, not chosen by quality."
    return section("Pictures", table(caption, columns, rows))


def _picture(image: np.ndarray, caption: str) -> Element:
    """Return an image [S, S, C] uint8 as an element with its bytes inside."""
    from PIL import Image

    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    factor = max(1, _SIDE // picture.width)
    picture = picture.resize(
        (picture.width * factor, picture.height * factor), Image.Resampling.NEAREST
    )
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    source = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return element("img", src=source, alt=caption, width=picture.width, height=picture.height)


def _figures(report: ImageReport) -> list[Element]:
    found = []
    for title, rows, columns in report.tables():
        body = [
            (
                element(
                    "span",
                    label.strip(),
                    element("span", meaning, class_="meaning"),
                    class_="inset" if label.startswith(" ") else "figure",
                ),
                *(_cell(report, arm, key, digits) for arm, _ in columns),
            )
            for key, label, digits, meaning in rows
        ]
        headings = [Column("figure", False), *(Column(heading) for _, heading in columns)]
        caption = "\N{PLUS-MINUS SIGN} is one standard error over images."
        found.append(section(title[0].upper() + title[1:], table(caption, headings, body)))
    return found


def _cell(report: ImageReport, arm: str, key: str, digits: int) -> Element:
    estimate = report.arms.get(arm, {}).get(key)
    if estimate is None:
        return element("span", "")
    error = element("span", f" \N{PLUS-MINUS SIGN} {estimate.se:.{digits}f}", class_="se")
    return element("span", f"{estimate.value:.{digits}f}", error)


def _claims(report: ImageReport) -> Element:
    rows = [
        (
            item["id"],
            f"{item['value']:.4g}",
            f"{item['op']} {item['bound']:g}",
            element(
                "span",
                "yes" if item["holds"] else "NO",
                class_="holds" if item["holds"] else "fails",
            ),
        )
        for item in report.claims
    ]
    columns = [Column("claim", False), Column("value"), Column("bound"), Column("holds")]
    return section("Claims", table("Fixed bounds of the quickstart for glyphs.", columns, rows))


def _conditions(report: ImageReport) -> Element:
    items = [
        (key.replace("_", " "), str(value))
        for key, value in report.conditions.items()
        if key != "notes"
    ]
    return section("Conditions", definitions(items))
