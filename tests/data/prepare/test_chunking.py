"""Long texts: pieces fit, end at sentences, and hold every character."""

from __future__ import annotations

import pytest

from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.chunking import chunk, truncate

TEXT = (
    "The first sentence is here. A short one. A second one that is rather long, with many words in it, goes on and on "
    "and on until it does not fit any more at all. " + "Pneumonoultramicroscopic" * 4 + " ends. Done now!"
)


@pytest.fixture(scope="module")
def tokenizer(need_minilm):
    return tokenizers.load("minilm")


def _squeezed(text):
    return "".join(text.split())


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8, 12, 30, 500])
def test_nothing_is_lost_and_every_piece_fits(tokenizer, max_tokens):
    pieces = chunk(tokenizer, TEXT, max_tokens)
    assert _squeezed("".join(text for _, text in pieces)) == _squeezed(TEXT)
    for ids, text in pieces:
        assert 0 < len(ids) <= max_tokens and ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_pieces_end_at_sentences_where_sentences_fit(tokenizer):
    text = "One is here. Two is there. Three is far away. Four is near."
    assert [piece for _, piece in chunk(tokenizer, text, 8)] == [
        "One is here. Two is there.", "Three is far away.", "Four is near.",
    ]  # fmt: skip
    assert [piece for _, piece in chunk(tokenizer, text, 100)] == [text]


def test_sentences_too_long_are_cut_between_words(tokenizer):
    pieces = [piece for _, piece in chunk(tokenizer, "one two three four five six seven", 3)]
    assert pieces == ["one two three", "four five six", "seven"]


def test_truncation_cuts_text_where_tokens_are(tokenizer):
    ids, text = truncate(tokenizer, "The first sentence is here. And more.", 4)
    assert text == "The first sentence is" and ids == tokenizer(text, add_special_tokens=False)["input_ids"]
