"""Corpora: where texts come from. Each is one ordered, repeatable pass over Unicode texts.

A corpus is named by a word: a ``.txt`` file, a ``.jsonl`` file, a folder of ``.txt`` files, or ``docstrings``, the
English sentences in the documentation of the Python packages installed here (real text that needs no download).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mmldlm.data.docstrings import docstrings_source, read_docstrings
from mmldlm.data.text import split_sentences
from mmldlm.errors import UserError

DEFAULT_CORPUS = "docstrings"


@dataclass
class Corpus:
    """One pass over texts.

    Attributes:
        source: what it is, for the manifest.
        read: starts the pass; given ``counts``, yields texts.
        counts: filled while reading: ``read`` (candidate texts), ``drop_<reason>``, and numbers of files.
    """

    source: str
    read: Callable[[Counter], Iterator[str]]
    counts: Counter = field(default_factory=Counter)

    def __iter__(self) -> Iterator[str]:
        self.counts.clear()
        return self.read(self.counts)


def open_corpus(name: str | os.PathLike, text_field: str = "text") -> Corpus:
    """The corpus that ``name`` stands for.

    Args:
        name: ``docstrings``, or the path of a .txt file, a .jsonl file or a folder.
        text_field: the field of each .jsonl object that holds the text.

    Raises:
        UserError: nothing lies there, it has no text files, or its kind is not known.
    """
    path = Path(name)
    if str(name) == DEFAULT_CORPUS and not path.exists():
        return Corpus(source=docstrings_source(), read=read_docstrings)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.txt") if file.is_file())
        if not files:
            raise UserError(
                f"a folder with .txt files, one document each, at {path}",
                "no .txt file in it or below it",
                "give the folder that holds the documents, or a .txt or .jsonl file",
            )
        return Corpus(source=f"folder:{path.name}", read=lambda counts: _read_folder(files, counts))
    if not path.exists():
        raise UserError(
            f"a corpus at {path}: a .txt file (one sentence a line), a .jsonl file, or a folder of .txt files",
            "nothing there",
            f"check the path, or leave it out to use the default corpus '{DEFAULT_CORPUS}'",
        )
    if path.suffix == ".jsonl":
        return Corpus(source=f"jsonl:{path.name}", read=lambda counts: _read_jsonl(path, text_field, counts))
    if path.suffix == ".txt":
        return Corpus(source=f"txt:{path.name}", read=lambda counts: _read_txt(path, counts))
    raise UserError(
        "a corpus that ends in .txt or .jsonl, or a folder of .txt files",
        f"{path.name} (suffix {path.suffix or 'none'!r})",
        "rename the file if its content is one of these, or convert it",
    )


# Texts as content ------------------------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"UTF-8 text in {path}",
                    f"byte 0x{raw[error.start]:02x} at column {error.start + 1} of line {number}",
                    "convert the file to UTF-8 (for instance with iconv)",
                ) from None
            yield number, line.strip()


def _read_txt(path: Path, counts: Counter) -> Iterator[str]:
    for _, line in _lines(path):
        if line:
            counts["read"] += 1
            yield line


def _read_jsonl(path: Path, text_field: str, counts: Counter) -> Iterator[str]:
    for number, line in _lines(path):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"one JSON object a line in {path}", f"line {number}: {error}", "repair or remove that line"
            ) from None
        text = record.get(text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            known = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
            raise UserError(
                f"a string in field '{text_field}' of every line of {path}",
                f"line {number} has {known or 'no field'}",
                "name the field with --text-field, or repair that line",
            )
        counts["read"] += 1
        if text.strip():
            yield " ".join(text.split())
        else:
            counts["drop_empty"] += 1


def _read_folder(files: list[Path], counts: Counter) -> Iterator[str]:
    for path in files:
        counts["files"] += 1
        paragraphs = "\n".join(line for _, line in _lines(path)).split("\n\n")
        for paragraph in paragraphs:
            for sentence in split_sentences(" ".join(paragraph.split())):
                counts["read"] += 1
                yield sentence


# Sentences -------------------------------------------------------------------------------------------------------
