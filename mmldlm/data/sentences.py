"""Content hashes of texts, and splitting texts into sentences."""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence

MAX_TEXT_BYTES = 16 << 20
"""Largest text and largest line of a file that is read; longer ones are damaged, hostile, or not
text.
"""
TOO_LARGE = f"drop_over_{MAX_TEXT_BYTES >> 20}_MiB"
"""Counter of the texts above MAX_TEXT_BYTES."""


def fold_spaces(text: str) -> str:
    """Return a text with single spaces, without a byte order mark at its start."""
    return " ".join(text.lstrip().lstrip("\ufeff").split())


class _ContentFold(dict):
    """Map code points for str.translate: punctuation, spaces and control characters become a
    space.
    """

    def __missing__(self, code: int) -> str:
        self[code] = " " if unicodedata.category(chr(code))[0] in "PZC" else chr(code)
        return self[code]


_FOLD = _ContentFold()


def normalize(text: str) -> str:
    """Fold compatibility forms, case, white space and punctuation of a text.

    Texts with equal normal forms count as the same text in deduplication and in the choice of the
    validation split. A text of punctuation alone is its own normal form.
    """
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().translate(_FOLD).split())
    return folded or text.strip()


def content_hash(text: str) -> int:
    """Return a 64-bit hash of `normalize(text)`, so that equal texts fall into one split."""
    return hash64(normalize(text).encode("utf-8", "surrogatepass"))


def hash64(content: bytes) -> int:
    """Return a 64-bit hash (BLAKE2)."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


# Marks that end a sentence where white space follows: also of Arabic, Urdu, Indic scripts,
# Armenian and Ethiopic.
_MARKS = ".!?\u061f\u06d4\u0964\u0965\u0589\u1362"
# Those of Chinese and Japanese need no white space.
_FULL_WIDTH = "\u3002\uff01\uff1f\uff61"
_OPENING = "\"'(\\[\u201c\u2018\u201e\u201a\u00ab\u00bb\u00bf\u00a1\u300c\u300e\uff08\u300a"
_CLOSING = "\"')\\]\u201d\u2019\u201c\u2018\u00ab\u00bb\u300d\u300f\uff09\u300b"
# The group is the first character of the next sentence. Without the lookbehind and the possessive
# quantifiers, a long row of dots would take time quadratic in its length.
_SENTENCE_END = re.compile(
    rf"(?<![{_MARKS}])[{_MARKS}]++[{_CLOSING}]*+\s++(?=[{_OPENING}]*(\S))"
    rf"|[{_FULL_WIDTH}][{_FULL_WIDTH}.!?]*[{_CLOSING}]*\s*"
)
_ENDS_IN_FULL_WIDTH = re.compile(rf"[{_FULL_WIDTH}][{_FULL_WIDTH}.!?]*[{_CLOSING}]*$")
# Models have learned latents of the pieces that this rule makes: another one would cut the texts
# that they are given otherwise than those that they were trained on.
_END_OF_A_PART = re.compile(
    r"""(?<![.!?])[.!?]++["')\]\u201d\u2019]*+\s++(?=["'(\[\u201c\u2018]*[A-Z0-9])"""
)
_ABBREVIATIONS = frozenset(
    "e.g i.e etc. cf vs viz al fig figs eq eqs sec secs ref refs no nos vol pp ed eds approx resp"
    " dept est mr mrs ms dr prof st jr sr inc ltd co corp gen col lt sgt rev hon u.s u.k a.m p.m"
    " ph.d г гг т.е т.к т.д т.п др пр см стр рис ул им акад проф св".split()
)


# Characters before a period in which an abbreviation is looked for.
_WINDOW = 64


def split_sentences(text: str) -> list[str]:
    """Split one paragraph at sentence ends, but not inside abbreviations, initials and decimals.

    A break needs . ! ? or another script's mark (and closing quotes), white space, and a digit or
    a capital after it, or a letter of a script without capitals. A full stop of Chinese or
    Japanese needs nothing after it. A known abbreviation or a single capital letter (an initial)
    before the period prevents it. Only white space is lost.
    """
    ends = _SENTENCE_END.finditer(text)
    return _split_at(text, (end for end in ends if end[1] is None or _begins_sentence(end[1])))


def _begins_sentence(char: str) -> bool:
    """Whether a sentence may begin with a character; letters without capitals are their own title
    case.
    """
    return char.isdecimal() or (char.isalpha() and char == char.title())


def join_sentences(sentences: Sequence[str]) -> str:
    """Join sentences of `split_sentences` by spaces, but not where Chinese and Japanese have
    none.
    """
    spaced = (each if _ENDS_IN_FULL_WIDTH.search(each) else f"{each} " for each in sentences)
    return "".join(spaced).rstrip()


def _split_at(text: str, ends: Iterable[re.Match[str]]) -> list[str]:
    """Split a text behind the ends of sentences, if no abbreviation or initial is before them."""
    sentences, start = [], 0
    for match in ends:
        before = text[max(start, match.start() - _WINDOW) : match.start()]
        word = before.rsplit(None, 1)[-1:] or [""]
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
    """Split a text into the pieces that have one latent each, as even in length as sentence ends
    allow.

    With fewer sentences than pieces, the longest piece is halved at the white space nearest to its
    middle, or at its middle. The result depends on the text alone, so sampling cuts as preparation
    did. Only white space is lost.

    Returns:
        `count` pieces, or None for a text with fewer characters (white space not counted).
    """
    if count == 1:
        return [text]
    if sum(map(len, text.split())) < count:
        return None
    parts = _split_at(text, _END_OF_A_PART.finditer(text))
    if len(parts) <= count:
        while len(parts) < count:
            longest = max(range(len(parts)), key=lambda i: (len(parts[i]), -i))
            parts[longest : longest + 1] = _halve(parts[longest])
        return parts
    ends = list(itertools.accumulate(map(len, parts)))
    pieces, start = [], 0
    # Cut at the sentence end nearest to an even split; each piece keeps at least one sentence.
    for piece in range(1, count):
        target = ends[-1] * piece / count
        end = min(
            range(start + 1, len(parts) - (count - piece) + 1),
            key=lambda i: abs(ends[i - 1] - target),
        )
        pieces.append(" ".join(parts[start:end]))
        start = end
    return [*pieces, " ".join(parts[start:])]


def _halve(text: str) -> list[str]:
    middle = len(text) / 2
    spaces = [match.start() for match in re.finditer(r"\s+", text)]
    cut = min(spaces, key=lambda position: abs(position - middle), default=len(text) // 2)
    return [text[:cut].strip(), text[cut:].strip()]
