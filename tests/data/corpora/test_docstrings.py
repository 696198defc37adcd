"""The default corpus of docstrings."""

from __future__ import annotations

from itertools import islice

import pytest

from mmldlm.data.corpora import docstrings
from mmldlm.data.corpora.docstrings import docstrings_of, prose_paragraphs
from mmldlm.data.corpora.text_corpus import open_corpus

_DOC = """Return the widest shape that a caller may ask for.

This goes over :class:`~package.Thing` and ``values``
in *one* pass, see [1]_.

Args:
    size (`int`, *optional*, defaults to 3):
        The number of rows that are kept in memory.
    name: Some **bold** name of the file to read.
        It goes on here.

Parameters
----------
x : int
    The place of the first row in the table.

Example::

    The code is not prose but it looks like it.

>>> The(doctest) is not prose.
The output of it is not prose either.

.. note:: It warns about the things to come.

.. code-block:: python

    Nothing = "The code is not prose."

```
The fenced block is no prose at all.
```

:param y: The other place of the first row.
:type y: int

| The table | is |
"""


def test_docstrings_are_found_without_running_the_source():
    source = (
        b'"""Module."""\nraise SystemExit\nif x:\n  class A:\n    "A."\n    def f(self):\n     '
        b' """F."""\n'
    )
    assert docstrings_of(source) == ["Module.", "A.", "F."]
    assert docstrings_of(b"def broken(:") is None
    assert docstrings_of(b"x = 1\0") is None


def test_docstring_corpus_is_repeatable_and_counts_what_it_leaves(tmp_path, monkeypatch):
    good = tmp_path / "a.py"
    good.write_text('"""The cat sleeps near the warm window.\n\nNot prose."""\n')
    (tmp_path / "b.py").write_text(
        '"""The cat sleeps near the warm window. A cat sleeps near their warm windows."""\n'
        'def f():\n    """The dog sleeps near the window."""'
    )
    (tmp_path / "c.py").write_text('"""Broken.""" def')
    files = [tmp_path / name for name in ("a.py", "b.py", "c.py", "missing.py")]
    monkeypatch.setattr(docstrings, "source_files", lambda: files)
    corpus = open_corpus("docstrings")
    assert (
        list(corpus)
        == list(corpus)
        == ["The cat sleeps near the warm window.", "The dog sleeps near the window."]
    )
    assert corpus.counts == {
        "files": 4,
        "files_unreadable": 2,
        "read": 5,
        "drop_length": 1,
        "drop_repeated": 1,
        "drop_near_repeat": 1,
    }


def test_docstring_corpus_skips_tests_and_ourselves():
    parts = {part for path in docstrings.source_files() for part in path.parts[-3:-1]}
    assert not parts & {"test", "tests", "mmldlm", "__pycache__"}


def test_docstring_corpus_of_this_environment():
    texts = list(islice(open_corpus("docstrings"), 500))
    assert len(set(texts)) == 500
    assert all(
        text[0].isupper() and text[-1] in ".!?" and 5 <= len(text.split()) <= 40 for text in texts
    )


def test_prose_paragraphs_leaves_code_and_markup_out():
    assert prose_paragraphs(_DOC) == [
        "Return the widest shape that a caller may ask for.",
        "This goes over Thing and values in one pass, see.",
        "The number of rows that are kept in memory.",
        "Some bold name of the file to read. It goes on here.",
        "The place of the first row in the table.",
        "It warns about the things to come.",
        "The other place of the first row.",
    ]


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("The cat sleeps near the warm window.", None),
        ("Return the value of file_name as a string.", None),
        ("Too short here.", "length"),
        ("the cat sleeps near the window.", "form"),
        ("The cat sleeps near the window", "form"),
        ("The cat x = y sleeps near the window.", "symbols"),
        ("The cat (sleeps near the window.", "brackets"),
        ("The idea is discussed at length in, and then in the other book.", "gap"),
        ("Cats sleep very near windows.", "no_stop_word"),
        ("The file_name and the other_name are the same.", "identifiers"),
        ("Cat Window Sleep Near The Foo Bar Baz.", "not_words"),
    ],
)
def test_reject_reason(sentence, reason):
    assert docstrings.reject_reason(sentence) == reason
