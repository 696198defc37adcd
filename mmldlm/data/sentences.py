"""Text itself: equality by content, and sentence ends."""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata

MAX_TEXT_BYTES = 16 << 20
"""Bound on one text, and on one line of a file: what is longer is damaged, hostile, or not of texts."""
TOO_LARGE = f"drop_over_{MAX_TEXT_BYTES >> 20}_MiB"
"""Under what such texts are counted."""


class _ContentFold(dict):
    """Maps code points for str.translate: punctuation, spaces and control characters become a space."""

    def __missing__(self, code: int) -> str:
        self[code] = " " if unicodedata.category(chr(code))[0] in "PZC" else chr(code)
        return self[code]


_FOLD = _ContentFold()


def normalise(text: str) -> str:
    """The text as content: compatibility forms, case, white space and punctuation folded.

    Two texts with one normal form count as the same text everywhere: in deduplication and in the choice of the
    validation split. A text of punctuation alone stands for itself.
    """
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().translate(_FOLD).split())
    return folded or text.strip()


def content_hash(text: str, salt: str = "") -> int:
    """64 bits that depend on nothing but ``normalise(text)`` and ``salt``: equal texts always fall on one side."""
    digest = hashlib.blake2b(normalise(text).encode("utf-8", "surrogatepass"), digest_size=8, key=salt.encode()[:64])
    return int.from_bytes(digest.digest(), "big")


# Files -----------------------------------------------------------------------------------------------------------


_SENTENCE_END = re.compile(r"""[.!?]+["')\]\u201d\u2019]*\s+(?=["'(\[\u201c\u2018]*[A-Z0-9])""")
_ABBREVIATIONS = frozenset(
    "e.g i.e etc. cf vs viz al fig figs eq eqs sec secs ref refs no nos vol pp ed eds approx resp dept est"
    " mr mrs ms dr prof st jr sr inc ltd co corp gen col lt sgt rev hon u.s u.k a.m p.m ph.d".split()
)


def split_sentences(text: str) -> list[str]:
    """Splits one paragraph at sentence ends, keeping abbreviations, initials and decimals whole.

    A break needs . ! or ? (and closing quotes), white space, and a capital or digit after it; it is refused after a
    known abbreviation and after a single capital letter (an initial). Nothing but white space is lost.
    """
    sentences, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        word = text[start : match.start()].rsplit(None, 1)[-1:] or [""]
        bare = word[0].lstrip("\"'([").lower()
        ends_in_period = text[match.start()] == "."
        is_initial = len(bare) == 1 and bare.isalpha() and word[0][-1:].isupper() and bare != "i"
        if ends_in_period and (bare in _ABBREVIATIONS or is_initial):
            continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    if text[start:].strip():
        sentences.append(text[start:].strip())
    return sentences


def split_into_parts(text: str, count: int) -> list[str] | None:
    """The pieces of a text that have a latent each: as even in length as sentence ends allow.

    Where there are fewer sentences than pieces, the longest pieces are halved at the white space nearest to the middle,
    and words without any in the middle. A function of the text alone: sampling cuts as preparation did. Joined by
    spaces the pieces are the text, up to white space (and up to where a word was cut).

    Returns:
        ``count`` pieces, or None for a text of fewer characters (white space not counted).
    """
    if count == 1:
        return [text]
    if sum(map(len, text.split())) < count:
        return None
    parts = split_sentences(text)
    if len(parts) <= count:
        while len(parts) < count:
            place = max(range(len(parts)), key=lambda i: (len(parts[i]), -i))
            parts[place : place + 1] = _halved(parts[place])
        return parts
    ends = list(itertools.accumulate(map(len, parts)))
    pieces, start = [], 0
    for number in range(1, count):  # to the sentence end nearest to its even share; at least one for each piece
        share = ends[-1] * number / count
        end = min(range(start + 1, len(parts) - (count - number) + 1), key=lambda i: abs(ends[i - 1] - share))
        pieces.append(" ".join(parts[start:end]))
        start = end
    return [*pieces, " ".join(parts[start:])]


def _halved(text: str) -> list[str]:
    middle = len(text) / 2
    spaces = [match.start() for match in re.finditer(r"\s+", text)]
    cut = min(spaces, key=lambda place: abs(place - middle), default=len(text) // 2)
    return [text[:cut].strip(), text[cut:].strip()]


# Docstrings ------------------------------------------------------------------------------------------------------
