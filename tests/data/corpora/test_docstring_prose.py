"""Prose in docstrings, and the filter for plain sentences."""

from __future__ import annotations

import pytest

from mmldlm.data.corpora import docstrings
from mmldlm.data.corpora.docstring_prose import prose_paragraphs

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
