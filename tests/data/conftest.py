"""A small store, made once by the real encoder, and its sentences."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mmldlm.data.encoders.model_files import find_model_folder
from mmldlm.data.prepare.options import ImageOptions, PrepareOptions
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.errors import UserError

_WHO = ["cat", "teacher", "river", "engine", "old man", "queen", "small boat", "doctor"]
_WHAT = [
    "sleeps near the warm window",
    "waits for the morning train",
    "was painted in green and gold",
]
_WHEN = ["in winter", "when nobody is looking"]


def make_sentences() -> list[str]:
    """Return 48 different English sentences."""
    return [f"The {who} {what} {when}." for who in _WHO for what in _WHAT for when in _WHEN]


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    return make_sentences()


@pytest.fixture(scope="session")
def corpus_file(sentences, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "sentences.txt"
    path.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def need_minilm() -> None:
    try:
        find_model_folder("minilm")
    except UserError as error:
        pytest.skip(f"the MiniLM weights are not here: {error.found}")


@pytest.fixture(scope="session")
def made_store(need_minilm, corpus_file, tmp_path_factory) -> Path:
    """The store of `sentences`, 10 of them in validation; read-only."""
    root = tmp_path_factory.mktemp("stores") / "small"
    return prepare(
        PrepareOptions(output_dir=str(root), corpus=str(corpus_file), validation_samples=10)
    )


@pytest.fixture
def store_copy(made_store, tmp_path) -> Path:
    """A copy of the store that a test may damage."""
    return Path(shutil.copytree(made_store, tmp_path / "store"))


@pytest.fixture(scope="session")
def glyph_store(tmp_path_factory) -> Path:
    """The letters of three faces, drawn here; read-only."""
    root = tmp_path_factory.mktemp("images") / "glyphs"
    return prepare(ImageOptions(str(root), faces=3))
