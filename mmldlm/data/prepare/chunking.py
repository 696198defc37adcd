"""Texts longer than the model: cut at sentence ends with nothing dropped, or truncated."""

from __future__ import annotations

from mmldlm.data.sentences import split_sentences


def truncate(tokenizer, text: str, max_tokens: int) -> tuple[list[int], str]:
    """The first max_tokens token ids of a text, and the text that they cover."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    cut = text[: encoding["offset_mapping"][max_tokens - 1][1]].rstrip()
    return encoding["input_ids"][:max_tokens], cut


def chunk(tokenizer, text: str, max_tokens: int) -> list[tuple[list[int], str]]:
    """Pieces of a text, (token ids, text) each, of at most max_tokens tokens.

    Sentences are put together as long as they fit; one that does not fit by itself is cut at white space, and a word
    that does not fit at tokens. Joined by spaces the pieces are the text, up to white space.
    """
    pieces: list[tuple[list[int], str]] = []
    todo = _counted(tokenizer, split_sentences(text))[::-1]
    while todo:
        if todo[-1][1] > max_tokens:
            halves = _halves(tokenizer, todo.pop()[0], max_tokens)
            todo += _counted(tokenizer, halves)[::-1]
            continue
        taken, total = [todo.pop()], 0
        total = taken[0][1]
        while todo and total + todo[-1][1] <= max_tokens:
            total += todo[-1][1]
            taken.append(todo.pop())
        while True:
            joined = " ".join(part for part, _ in taken)
            ids = tokenizer(joined, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) <= max_tokens or len(taken) == 1:
                break
            todo.append(taken.pop())  # together they have a token more than one by one
        pieces.append((ids, joined))
    return pieces


def _counted(tokenizer, parts) -> list[tuple[str, int]]:
    parts = [part for part in parts if part]
    if not parts:
        return []
    encoded = tokenizer(parts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return list(zip(parts, map(len, encoded)))


def _halves(tokenizer, sentence: str, max_tokens: int) -> tuple[str, str]:
    """A sentence that does not fit: as much of its beginning as fits, to the last white space in it, and the rest."""
    offsets = tokenizer(sentence, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    for num_tokens in range(max_tokens, 0, -1):
        end = max(offsets[num_tokens - 1][1], 1)
        space = sentence.rfind(" ", 1, end + 1)
        cut = space if space > 0 else end
        head = sentence[:cut].strip()
        # Cut text can have one token more than the same characters had inside the sentence.
        if head and len(tokenizer(head, add_special_tokens=False, verbose=False)["input_ids"]) <= max_tokens:
            return head, sentence[cut:].strip()
    return sentence[:1], sentence[1:].strip()
