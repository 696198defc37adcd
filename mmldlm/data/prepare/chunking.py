"""Cut texts that are longer than the model: into pieces at sentence ends, or truncated."""

from __future__ import annotations

from mmldlm.data.sentences import split_sentences

_REPLACEMENT = "\ufffd"  # what incomplete bytes of a character decode to


def truncate(tokenizer, text: str, max_tokens: int) -> tuple[list[int], str]:
    """Return at most the first max_tokens token ids of a text, and the text that they cover.

    The cut is moved back to the end of a character: byte-level tokens may hold a part of one.
    Nothing is left of a text whose first character has more tokens.
    """
    encoding = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    for number in range(min(max_tokens, len(ids)), 0, -1):
        cut = text[: offsets[number - 1][1]].rstrip()
        if cut and _ends_with_a_character(tokenizer, ids, offsets, number, cut):
            return ids[:number], cut
    return [], ""


def _ends_with_a_character(
    tokenizer, ids: list[int], offsets: list[tuple[int, int]], number: int, cut: str
) -> bool:
    """Whether the first `number` tokens end where a character of the text does."""
    if number < len(ids) and offsets[number][0] < offsets[number - 1][1]:
        return False  # the next token covers the same character
    decoded = tokenizer.decode(ids[max(number - 8, 0) : number])
    return not decoded.endswith(_REPLACEMENT) or cut.endswith(_REPLACEMENT)


def chunk(tokenizer, text: str, max_tokens: int) -> list[tuple[list[int], str]]:
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
            if len(sentence) == 1:  # a character of more tokens cannot be cut
                pieces.append(([], sentence))
                continue
            parts = _cut_sentence(tokenizer, sentence, max_tokens)
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
    encoded = tokenizer(
        parts, add_special_tokens=False, return_attention_mask=False, verbose=False
    )["input_ids"]
    return list(zip(parts, map(len, encoded)))


def _cut_sentence(tokenizer, sentence: str, max_tokens: int) -> tuple[str, str]:
    """Cut a too long sentence at the last white space of the part that fits; return that part and
    the rest.
    """
    offsets = tokenizer(
        sentence, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )["offset_mapping"]
    for num_tokens in range(max_tokens, 0, -1):
        end = max(offsets[num_tokens - 1][1], 1)
        space = sentence.rfind(" ", 1, end + 1)
        cut = space if space > 0 else end
        head = sentence[:cut].strip()
        # The head alone can have more tokens than the same characters inside the sentence.
        if (
            head
            and len(tokenizer(head, add_special_tokens=False, verbose=False)["input_ids"])
            <= max_tokens
        ):
            return head, sentence[cut:].strip()
    return sentence[:1], sentence[1:].strip()
