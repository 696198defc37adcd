"""Sentence ends, and equality of texts by content."""

from __future__ import annotations

import pytest

from mmldlm.data.sentences import (
    content_hash,
    join_sentences,
    normalize,
    split_into_parts,
    split_sentences,
)


@pytest.mark.parametrize(
    ("paragraph", "expected"),
    [
        ("One here. Two there! Three?", ["One here.", "Two there!", "Three?"]),
        (
            "Use a tool, e.g. Make or i.e. Ninja. Done.",
            ["Use a tool, e.g. Make or i.e. Ninja.", "Done."],
        ),
        ("It is 3.14 or 2. 5 more follow.", ["It is 3.14 or 2.", "5 more follow."]),
        (
            'J. R. Smith wrote it. He said "Go." She went.',
            ["J. R. Smith wrote it.", 'He said "Go."', "She went."],
        ),
        ("See Fig. 3 and foo.bar. no break here", ["See Fig. 3 and foo.bar. no break here"]),
        ("No end", ["No end"]),
        ("", []),
        # Capitals of any script, and quotation marks of other languages.
        ("Он ушёл. Она осталась! Почему?", ["Он ушёл.", "Она осталась!", "Почему?"]),
        ("А. С. Пушкин жил в г. Москве. Это так.", ["А. С. Пушкин жил в г. Москве.", "Это так."]),
        (
            "Das ist so. Über allem. „Ja.“ Ärger? ganz klein",
            ["Das ist so.", "Über allem.", "„Ja.“", "Ärger? ganz klein"],
        ),
        ("Sí. ¿Qué? «No.» Αυτό.", ["Sí.", "¿Qué?", "«No.»", "Αυτό."]),
        # Scripts without capitals.
        ("ذهب. عاد؟ نعم.", ["ذهب.", "عاد؟", "نعم."]),
        ("वह गया। वह आया। हाँ", ["वह गया।", "वह आया।", "हाँ"]),
        ("მოვიდა. წავიდა.", ["მოვიდა.", "წავიდა."]),
        # No white space at all.
        ("他来了。「好！」她说？！是的。完", ["他来了。", "「好！」", "她说？！", "是的。", "完"]),
        ("版本 3.14。Next. 下一句", ["版本 3.14。", "Next.", "下一句"]),
    ],
)
def test_split_sentences(paragraph, expected):
    assert split_sentences(paragraph) == expected


def test_sentences_of_full_width_marks_are_joined_without_spaces():
    for text in ("他来了。「好！」她说。", "One. Two! 三。四。", "A. B"):
        assert join_sentences(split_sentences(text)) == text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Он ушёл. Она осталась там.", ["Он ушёл. Она", "осталась там."]),
        ("他来了。她走了", ["他来了", "。她走了"]),
    ],
)
def test_pieces_with_a_latent_each_are_cut_as_ever(text, parts):
    assert split_into_parts(text, 2) == parts


def test_splitting_loses_nothing():
    text = 'A b c. D (e.g. F) g! "H i." J? 4.5 k. L. M. N o p. Q'
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


def test_content_folds_case_space_punctuation_and_nothing_else():
    same = ["It's a  dog.", "it s a dog", "IT'S A DOG!", "\u201cIt\u2019s a dog\u201d"]
    assert len({normalize(text) for text in same}) == 1
    assert len({content_hash(text) for text in same}) == 1
    # Marks are letters' parts, digits and symbols are content, and punctuation alone stands for
    # itself.
    different = ["\u0915\u093e", "\u0915\u0940", "a 1", "a 2", "a", "a + b", "a b", "...", "!!!"]
    assert len({normalize(text) for text in different}) == len(different)


def _plain(text):
    return "".join(text.split())


def test_pieces_are_the_text_and_end_where_sentences_do():
    sentences = [f"Sentence {number} is {'rather ' * (number % 4)}short." for number in range(17)]
    text = "  ".join(sentences)
    for count in range(1, 18):
        parts = split_into_parts(text, count)
        assert len(parts) == count and _plain("".join(parts)) == _plain(text)
        assert all(part.endswith(".") for part in parts)
        if 1 < count < 6:  # no piece strays from its share by more than a sentence at each end
            assert max(abs(len(part) - len(text) / count) for part in parts) < 2 * max(
                map(len, sentences)
            )


@pytest.mark.parametrize(
    "text",
    ["One two three four five.", "A sentence. Another one!", "abcdefgh", "a b c d", "漢字仮名"],
)
def test_few_sentences_are_halved_between_and_then_in_words(text):
    for count in (2, 3, 4):
        parts = split_into_parts(text, count)
        assert len(parts) == count and all(part == part.strip() != "" for part in parts)
        assert "".join(map(_plain, parts)) == _plain(text)
        if len(text.split()) >= count:
            assert [word for part in parts for word in part.split()] == text.split()
    assert (
        split_into_parts("Ok.", 4) is None
        and split_into_parts("", 2) is None
        and split_into_parts("", 1) == [""]
    )


def test_rows_of_dots_and_of_abbreviations_are_quick():
    """A quadratic rule would take hours for the megabytes of one text."""
    assert split_sentences("." * 300_000) == ["." * 300_000]
    text = "see fig. 3 and no. 4 " * 40_000
    assert split_sentences(text) == [text.strip()]
