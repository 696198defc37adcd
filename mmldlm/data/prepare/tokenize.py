"""The tokenizing stage: turn texts into samples of an allowed number of tokens, shard by shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from mmldlm.data.arrays import read_npz, write_npz
from mmldlm.data.prepare.read import TextShards
from mmldlm.data.sentences import (
    content_hash,
    join_sentences,
    split_into_parts,
    split_sentences,
)

TEXTS_PER_SHARD = 4096
OK, TOO_SHORT, TOO_LONG, TRUNCATED, CHUNKED = range(5)
# Incomplete bytes of a character decode to this.
_REPLACEMENT = "\ufffd"
# Tokens behind the last of those that are read of the beginning of a sentence: its end is cut
# inside a word, and a word that is one token whole may have up to 100 (WordPiece) in parts.
_MARGIN = 128


@dataclass(frozen=True)
class LengthRules:
    """The lengths of samples, and the treatment of longer texts.

    Attributes:
        min_tokens, max_tokens: Bounds of a sample.
        overlong: Treatment of longer texts: `drop`, `truncate` or `chunk`.
        latents_per_text: Number of latents; samples with fewer characters are too short.
    """

    min_tokens: int
    max_tokens: int
    overlong: str
    latents_per_text: int = 1

    def has_pieces(self, text: str) -> bool:
        """Whether the text can be split into one piece per latent."""
        return (
            self.latents_per_text == 1 or split_into_parts(text, self.latents_per_text) is not None
        )


@dataclass
class _TextResult:
    """The samples of one text: token ids and own text of each (None where it is the complete
    text).
    """

    status: int
    samples: Sequence[tuple[list[int], str | None]] = ()
    num_short: int = 0


def tokenize_shard(
    path: Path,
    texts: TextShards,
    rows: np.ndarray,
    tokenizer: PreTrainedTokenizerFast,
    rules: LengthRules,
) -> None:
    """Tokenize the texts at some rows and write one shard.

    The shard holds the `status` of every text. For every sample it holds the position of its text
    in `rows` (`places`), content hash, token ids, and its own text where that is not the complete
    one. If there are any, it also holds, per text, the number of pieces that are no samples
    (`num_short`): too short for several latents per text, or single characters of too many tokens.
    """
    originals = texts.get(rows)
    encoded = token_ids(tokenizer, originals)
    status, num_short = np.zeros(len(rows), np.uint8), np.zeros(len(rows), np.int32)
    positions, hashes, ids_of, own_text = [], [], [], []
    for position, (text, ids) in enumerate(zip(originals, encoded)):
        result = _cut_text(text, ids, tokenizer, rules)
        status[position], num_short[position] = result.status, result.num_short
        for sample_ids, sample_text in result.samples:
            positions.append(position)
            ids_of.append(np.asarray(sample_ids, dtype=np.int32))
            if sample_text is None:
                hashes.append(int(texts.hashes[rows[position]]))
                own_text.append(b"")
            else:
                hashes.append(content_hash(sample_text))
                own_text.append(sample_text.encode("utf-8"))
    write_npz(
        path,
        status=status,
        places=np.array(positions, np.int32),
        hashes=np.array(hashes, np.uint64),
        lengths=np.array([len(ids) for ids in ids_of], np.int32),
        ids=np.concatenate(ids_of) if ids_of else np.empty(0, np.int32),
        text_lengths=np.array([len(text) for text in own_text], np.int64),
        text=np.frombuffer(b"".join(own_text), np.uint8),
        **({"num_short": num_short} if num_short.any() else {}),
    )


def _cut_text(
    text: str, ids: list[int], tokenizer: PreTrainedTokenizerFast, rules: LengthRules
) -> _TextResult:
    if len(ids) < rules.min_tokens or not rules.has_pieces(text):
        return _TextResult(TOO_SHORT)
    if len(ids) <= rules.max_tokens:
        return _TextResult(OK, [(ids, None)])
    if rules.overlong == "drop":
        return _TextResult(TOO_LONG)
    if rules.overlong == "truncate":
        # The stored text is also the encoder's input, so it must be cut where the tokens are.
        sample = truncate(tokenizer, text, rules.max_tokens)
        is_long_enough = len(sample[0]) >= rules.min_tokens and rules.has_pieces(sample[1])
        return _TextResult(TRUNCATED, [sample]) if is_long_enough else _TextResult(TOO_SHORT)
    chunks = chunk(tokenizer, text, rules.max_tokens)
    samples = [piece for piece in chunks if piece[0] and rules.has_pieces(piece[1])]
    return _TextResult(CHUNKED, samples, len(chunks) - len(samples))


def token_ids(tokenizer: PreTrainedTokenizerFast, texts: Any) -> list:
    """Return the token ids of a text, or of each of several, without special tokens."""
    return tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


@lru_cache(maxsize=8)
def read_shard(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a shard, with the `offsets` of its ids and the `text_offsets` of its
    texts.
    """
    shard = read_npz(path)
    for name, lengths in (("offsets", "lengths"), ("text_offsets", "text_lengths")):
        shard[name] = np.concatenate([[0], np.cumsum(shard[lengths], dtype=np.int64)])
    return shard


def truncate(
    tokenizer: PreTrainedTokenizerFast, text: str, max_tokens: int
) -> tuple[list[int], str]:
    """Return at most the first max_tokens token ids of a text, and the text that they cover.

    The cut is moved back to the end of a character: byte-level tokens may hold a part of one.
    Nothing is left of a text whose first character has more tokens.
    """
    encoding = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    for count in range(min(max_tokens, len(ids)), 0, -1):
        cut = text[: offsets[count - 1][1]].rstrip()
        if cut and _ends_with_a_character(tokenizer, ids, offsets, count, cut):
            return ids[:count], cut
    return [], ""


def _ends_with_a_character(
    tokenizer: PreTrainedTokenizerFast,
    ids: list[int],
    offsets: list[tuple[int, int]],
    count: int,
    cut: str,
) -> bool:
    """Whether the first `count` tokens end where a character of the text does."""
    if count < len(ids) and offsets[count][0] < offsets[count - 1][1]:
        # The next token covers the same character.
        return False
    decoded = str(tokenizer.decode(ids[max(count - 8, 0) : count]))
    return not decoded.endswith(_REPLACEMENT) or cut.endswith(_REPLACEMENT)


def chunk(
    tokenizer: PreTrainedTokenizerFast, text: str, max_tokens: int
) -> list[tuple[list[int], str]]:
    """Cut a text into pieces of at most max_tokens tokens, (token ids, text) each.

    Consecutive sentences are joined as long as they fit. A longer sentence is cut at white space,
    and a longer word at tokens. Only white space is lost, and single characters of more than
    max_tokens tokens, which have no ids here.
    """
    pieces: list[tuple[list[int], str]] = []
    todo = _count_tokens(tokenizer, split_sentences(text))[::-1]
    while todo:
        if todo[-1][1] > max_tokens:
            sentence = todo.pop()[0]
            if len(sentence) == 1:
                # One character with more tokens than that cannot be cut.
                pieces.append(([], sentence))
                continue
            todo += _count_tokens(tokenizer, _cut_sentence(tokenizer, sentence, max_tokens))[::-1]
            continue
        taken = [todo.pop()]
        total = taken[0][1]
        while todo and total + todo[-1][1] <= max_tokens:
            total += todo[-1][1]
            taken.append(todo.pop())
        while True:
            joined = join_sentences([part for part, _ in taken])
            ids = token_ids(tokenizer, joined)
            if len(ids) <= max_tokens or len(taken) == 1:
                break
            # Joined, they may have more tokens than one by one.
            todo.append(taken.pop())
        pieces.append((ids, joined))
    return pieces


def _count_tokens(
    tokenizer: PreTrainedTokenizerFast, parts: Iterable[str]
) -> list[tuple[str, int]]:
    parts = [part for part in parts if part]
    return list(zip(parts, map(len, token_ids(tokenizer, parts)))) if parts else []


def _cut_sentence(tokenizer: PreTrainedTokenizerFast, sentence: str, max_tokens: int) -> list[str]:
    """Cut a too long sentence into parts, each at the last white space of what fits."""
    parts, start = [], 0
    while start < len(sentence):
        offsets = _first_offsets(tokenizer, sentence, start, max_tokens)
        if len(offsets) <= max_tokens:
            parts.append(sentence[start:].strip())
            break
        end = start + _length_that_fits(tokenizer, sentence, start, offsets[:max_tokens])
        parts.append(sentence[start:end].strip())
        while sentence[end : end + 1].isspace():
            end += 1
        start = end
    return parts


def _first_offsets(
    tokenizer: PreTrainedTokenizerFast, sentence: str, start: int, max_tokens: int
) -> list[tuple[int, int]]:
    """Return the offsets of the tokens behind a position: of all of them, or of well over
    max_tokens. To tokenize the whole rest for each part would be quadratic in its length.
    """
    size = 16 * (max_tokens + _MARGIN)
    while True:
        offsets = tokenizer(
            sentence[start : start + size],
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )["offset_mapping"]
        if start + size >= len(sentence) or len(offsets) > max_tokens + _MARGIN:
            return offsets
        size *= 2


def _length_that_fits(
    tokenizer: PreTrainedTokenizerFast, sentence: str, start: int, offsets: list[tuple[int, int]]
) -> int:
    """Return how many characters behind a position have at most as many tokens as offsets are
    given: up to the last white space, if there is one.
    """
    for _, token_end in reversed(offsets):
        end = start + max(token_end, 1)
        space = sentence.rfind(" ", start + 1, end + 1)
        cut = space if space > 0 else end
        head = sentence[start:cut].strip()
        # The head alone can have more tokens than the same characters inside the sentence.
        if head and len(token_ids(tokenizer, head)) <= len(offsets):
            return cut - start
    return 1
