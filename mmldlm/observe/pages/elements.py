"""HTML from the standard library's element tree, which escapes every text and attribute."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

Element = ElementTree.Element
Content = Element | str


class Column(NamedTuple):
    """A column of a table: its heading, and whether it holds numbers."""

    heading: str
    is_number: bool = True


def element(tag: str, *children: Content, **attributes: str | float) -> Element:
    """Return an element with text and elements inside; `class_` names the attribute class, `a_b`
    the attribute a-b.
    """
    names = {key.rstrip("_").replace("_", "-"): str(value) for key, value in attributes.items()}
    node, last = Element(tag, names), None
    for child in children:
        if isinstance(child, Element):
            node.append(child)
            last = child
        elif last is None:
            node.text = (node.text or "") + child
        else:
            last.tail = (last.tail or "") + child
    return node


def to_html(nodes: Iterable[Element]) -> str:
    """Return the elements as HTML, one after the other."""
    return "\n".join(
        ElementTree.tostring(node, encoding="unicode", method="html") for node in nodes
    )


def table(caption: str, columns: Sequence[Column], rows: Iterable[Sequence[Content]]) -> Element:
    """Return a table whose first column heads the rows; on narrow screens every cell names its
    column.
    """
    classes = [{"class_": "number"} if column.is_number else {} for column in columns]
    head = [
        element("th", column.heading, scope="col", **extra)
        for column, extra in zip(columns, classes)
    ]
    body = []
    for first, *cells in rows:
        texts = [
            element("td", cell, data_label=column.heading, **(extra or {"class_": "prose"}))
            for cell, column, extra in zip(cells, columns[1:], classes[1:])
        ]
        body.append(element("tr", element("th", first, scope="row"), *texts))
    parts = (
        element("caption", caption),
        element("thead", element("tr", *head)),
        element("tbody", *body),
    )
    return element("div", element("table", *parts), class_="wide")


def picture(png: bytes, alt: str, **attributes: str | float) -> Element:
    """Return an image whose bytes are inside of the page."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return element("img", src=source, alt=alt, **attributes)


def definitions(items: Iterable[tuple[str, str]]) -> Element:
    """Return a list of names and their values."""
    parts = [part for name, value in items for part in (element("dt", name), element("dd", value))]
    return element("dl", *parts, class_="conditions")


def section(heading: str, *children: Content) -> Element:
    """Return a part of a page with its heading."""
    return element("section", element("h2", heading), *children)
