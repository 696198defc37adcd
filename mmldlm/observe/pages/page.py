"""One self-contained page: style, script and data inside, and a policy that lets a browser run
nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

from mmldlm.errors import UserError
from mmldlm.observe.pages.elements import Element, element, to_html
from mmldlm.utils import atomic_files
from mmldlm.utils.json_files import plain_value
from mmldlm.utils.paths import check_writable_file

_TEMPLATES = Path(__file__).with_name("templates")


def check_page_path(path: str | os.PathLike, option: str, overwrite: bool = True) -> Path:
    """Check, before long work, that a page can be written.

    Args:
        path: Path of the page.
        option: Option that named it, for the error.
        overwrite: Whether an existing file is replaced.

    Raises:
        UserError: it does not end with .html, exists without `overwrite`, or cannot be written.
    """
    if Path(path).suffix != ".html":
        raise UserError(
            f"a file name that ends with .html for {option}", str(path), f"add {option} FILE.html"
        )
    if Path(path).exists() and not overwrite:
        raise UserError(
            f"a {option} file that does not exist",
            str(path),
            "choose another name, or add --overwrite to replace it",
        )
    return check_writable_file(path, option)


def template(name: str) -> str:
    """Return the text of a file in templates/."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def render(title: str, body: str, script: str = "", data: Any = None) -> str:
    """Return a page.

    Args:
        title: Title, as plain text.
        body: HTML; whatever it contains from outside is escaped already.
        script: JavaScript.
        data: JSON-ready value for the script, in the element #data.
    """
    style = template("page.css")
    script = f"\n{script}\n"
    return Template(template("page.html")).substitute(
        title=html.escape(title),
        style=style,
        style_hash=_hash(style),
        body=body,
        data=script_json(data),
        script=script,
        script_hash=_hash(script),
    )


def titled_page(title: str, sentences: Iterable[str], parts: Iterable[Element]) -> str:
    """Return a page of parts below a title and sentences."""
    header = element("header", element("h1", title), *(element("p", text) for text in sentences))
    main = element("main", header, *parts, class_="report")
    return render(f"mmldlm: {title}", to_html([main]))


def script_json(value: Any) -> str:
    """Return JSON in which no string can end the <script> element around it."""
    text = json.dumps(
        plain_value(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def write_page(path: str | os.PathLike, text: str) -> None:
    """Write a page atomically, creating its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write_text(path, text)


def _hash(source: str) -> str:
    """Return the source expression of a content security policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
