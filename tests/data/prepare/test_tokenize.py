"""Long texts: pieces fit, end at sentences, and hold every character."""

from __future__ import annotations

import pytest

from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.tokenize import chunk, truncate

TEXT = (
    "The first sentence is here. A short one. A second one that is rather long, with many words in"
    " it, goes on and on and on until it does not fit any more at all. "
    + "Pneumonoultramicroscopic" * 4
    + " ends. Done now!"
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
        assert (
            0 < len(ids) <= max_tokens
            and ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        )


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
    assert (
        text == "The first sentence is"
        and ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    )


@pytest.fixture(scope="module")
def byte_level():
    """A BPE of bytes without merges across characters' ends: a CJK character has three tokens, an
    emoji four.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize(
    "text",
    [
        "a\u4e00\u4e01b\u4e02 c",
        "\U0001f600\U0001f601\U0001f602",
        "e\u0301e\u0301\u00f1",
        "\ufffdab\ufffd",
    ],
)
@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_truncation_never_cuts_a_character(byte_level, text, max_tokens):
    """public-reports B 17"""
    ids, cut = truncate(byte_level, text, max_tokens)
    assert (
        len(ids) <= max_tokens and text.startswith(cut) and byte_level.decode(ids).rstrip() == cut
    )
    if max_tokens >= 4:
        assert cut


def test_a_character_of_too_many_tokens_ends_the_cutting(byte_level):
    """It has no piece; a loop without end was here."""
    pieces = chunk(byte_level, "ab \U0001f600 cd", 3)
    assert [text for ids, text in pieces if ids] == ["ab", "cd"]
    assert [text for ids, text in pieces if not ids] == ["\U0001f600"]
    assert truncate(byte_level, "\U0001f600", 3) == ([], "")


def test_a_sentence_of_any_length_is_tokenized_about_once(tokenizer, monkeypatch):
    """Not its whole rest for each piece: a list or code of a megabyte would take half an hour."""
    seen, call = [], type(tokenizer).__call__

    def counted(self, text, **options):
        seen.append(sum(map(len, [text] if isinstance(text, str) else text)))
        return call(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    for text in (" ".join(["several words"] * 4000), "word," * 10_000):
        seen.clear()
        pieces = chunk(tokenizer, text, 62)
        assert _squeezed("".join(text for _, text in pieces)) == _squeezed(text)
        assert sum(seen) < 40 * len(text)


def test_a_word_of_any_length_is_one_token_of_a_wordpiece_vocabulary(tokenizer):
    pieces = chunk(tokenizer, "one " * 70 + "x" * 50_000 + " two" * 70, 62)
    assert [len(ids) for ids, _ in pieces] == [62, 62, 17]
