"""The default corpus of docstrings."""

from __future__ import annotations

from itertools import islice

from mmldlm.data.corpora import docstrings
from mmldlm.data.corpora.corpus import open_corpus
from mmldlm.data.corpora.docstrings import docstrings_of


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
