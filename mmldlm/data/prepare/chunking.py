"""Cut texts that are longer than the model: into pieces at sentence ends, or truncated."""

from __future__ import annotations

from mmldlm.data.sentences import split_sentences


def truncate(tokenizer, text: str, max_tokens: int) -> tuple[list[int], str]:
    """Return the first max_tokens token ids of a text, and the text that they cover."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    cut = text[: encoding["offset_mapping"][max_tokens - 1][1]].rstrip()
    return encoding["input_ids"][:max_tokens], cut


def chunk(tokenizer, text: str, max_tokens: int) -> list[tuple[list[int], str]]:
    """Cut a text into pieces of at most max_tokens tokens, (token ids, text) each.

    Consecutive sentences are joined as long as they fit. A longer sentence is cut at white space, and a longer word at
    tokens. Only white space is lost.
    """
    pieces: list[tuple[list[int], str]] = []
    todo = _count_tokens(tokenizer, split_sentences(text))[::-1]
    while todo:
        if todo[-1][1] > max_tokens:
            parts = _cut_sentence(tokenizer, todo.pop()[0], max_tokens)
            todo += _count_tokens(tokenizer, parts)[::-1]
            continue
        taken = [todo.pop()]
        total = taken[0][1]
        while todo and total + todo[-1][1] <= max_tokens:
            total += todo[-1][1]
            taken.append(todo.pop())
        while True:
            joined = " ".join(part for part, _ in taken)
            ids = tokenizer(joined, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) <= max_tokens or len(taken) == 1:
                break
            todo.append(taken.pop())  # joined they may have more tokens than one by one
        pieces.append((ids, joined))
    return pieces


def _count_tokens(tokenizer, parts) -> list[tuple[str, int]]:
    parts = [part for part in parts if part]
    if not parts:
        return []
    encoded = tokenizer(parts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return list(zip(parts, map(len, encoded)))


def _cut_sentence(tokenizer, sentence: str, max_tokens: int) -> tuple[str, str]:
    """Cut a too long sentence at the last white space of the part that fits; return that part and the rest."""
    offsets = tokenizer(sentence, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    for num_tokens in range(max_tokens, 0, -1):
        end = max(offsets[num_tokens - 1][1], 1)
        space = sentence.rfind(" ", 1, end + 1)
        cut = space if space > 0 else end
        head = sentence[:cut].strip()
        # The head alone can have more tokens than the same characters inside the sentence.
        if head and len(tokenizer(head, add_special_tokens=False, verbose=False)["input_ids"]) <= max_tokens:
            return head, sentence[cut:].strip()
    return sentence[:1], sentence[1:].strip()
