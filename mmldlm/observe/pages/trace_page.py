"""The page of `mmldlm sample --trace`: how each text was written, pass by pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mmldlm.observe.pages.page import render, template
from mmldlm.sampling.records import TextTrace
from mmldlm.sampling.settings import MAX_TRACED_TEXTS
from mmldlm.utils.formatting import count_noun

# How a token is shown: at the start of a word, joined to the token before it, or as a state that
# is not a token.
WORD, JOINED, STATE = 0, 1, 2
_WITHOUT_MASKS = "Positions appear as they are written."


def trace_page(
    traces: Mapping[int, TextTrace],
    records: list[dict[str, Any]],
    tokenizer: Any,
    vocab_size: int,
    *,
    settings: list[str],
    starts_masked: bool = True,
) -> str:
    """Return the page.

    Args:
        traces: Traces of the first MAX_TRACED_TEXTS records, by their index.
        records: Records of samples.jsonl: `index`, `text`, `num_tokens` and, if known,
            `reference`.
        tokenizer: Fast Hugging Face tokenizer.
        vocab_size: Vocabulary size of the model; larger ids are states that are not tokens.
        settings: Description of how the texts were sampled, for the head of the page.
        starts_masked: Whether the texts started as [MASK]; else positions appear as they are
            written.
    """
    shown = records[:MAX_TRACED_TEXTS]
    data = {
        "title": "How the texts were written",
        "settings": settings,
        "note": _note(len(shown), len(records), starts_masked),
        "masked": starts_masked,
        **trace_data(traces, shown, tokenizer, vocab_size),
    }
    return render(
        "mmldlm: how the texts were written", template("trace.html"), template("trace.js"), data
    )


def trace_data(
    traces: Mapping[int, TextTrace], records: list[dict[str, Any]], tokenizer: Any, vocab_size: int
) -> dict[str, Any]:
    """Return "tokens", a list of [shown text, kind], and "texts", whose passes name tokens by
    their index in that list.

    A pass is a list of [position, token, probability, candidates]; token null is [MASK].
    """
    shown_traces = [traces.get(record["index"], []) for record in records]
    ids = sorted(set(_ids(shown_traces)))
    index_of = {token: i for i, token in enumerate(ids)}
    texts = [
        {
            "index": record["index"],
            "length": record["num_tokens"],
            "text": record["text"],
            "reference": record.get("reference"),
            "passes": _passes(trace, index_of, record["num_tokens"]),
        }
        for record, trace in zip(records, shown_traces)
    ]
    return {"tokens": token_words(ids, tokenizer, vocab_size), "texts": texts}


def token_words(ids: list[int], tokenizer: Any, vocab_size: int) -> list[tuple[str, int]]:
    """Return for each id the text to show and whether it continues the word before it.

    Both follow from how the tokenizer decodes the token behind a plain word, so they hold for
    every kind of tokenizer.
    """
    word, word_id = _plain_word(tokenizer)
    words = []
    for token in ids:
        if token >= vocab_size:
            words.append((f"class {token - vocab_size}", STATE))
            continue
        text = tokenizer.decode([word_id, token])
        rest = text[len(word) :] if text.startswith(word) else " " + tokenizer.decode([token])
        words.append(
            (rest.strip() or rest or "\N{OPEN BOX}", WORD if rest[:1].isspace() else JOINED)
        )
    return words


def _plain_word(tokenizer: Any) -> tuple[str, int]:
    """Return a token that is a word of ASCII letters, and its id."""
    special = set(tokenizer.all_special_ids)
    for token in range(len(tokenizer)):
        text = "" if token in special else tokenizer.decode([token])
        if text.strip().isascii() and text.strip().isalnum():
            return text, token
    return "", special.pop()  # nothing begins with its text, so every token is shown as a word


def _ids(traces: list[TextTrace]) -> Iterable[int]:
    for trace in traces:
        for writes in trace:
            for write in writes:
                if write.token is not None:
                    yield write.token
                yield from (token for token, _ in write.candidates)


def _passes(trace: TextTrace, index_of: dict[int, int], length: int) -> list[list[list[Any]]]:
    # Positions from `length` on are not shown: there is the EOS.
    return [
        [
            [
                write.position,
                None if write.token is None else index_of[write.token],
                None if write.probability is None else _short(write.probability),
                [
                    [index_of[token], _short(probability)]
                    for token, probability in write.candidates
                ],
            ]
            for write in writes
            if write.position < length
        ]
        for writes in trace
    ]


def _short(probability: float) -> float:
    return float(f"{probability:.4g}")


def _note(shown: int, total: int, starts_masked: bool) -> str:
    extent = (
        f"{count_noun(total, 'text')}."
        if shown == total
        else f"The first {shown} of {count_noun(total, 'text')}."
    )
    probability = (
        "Probabilities are the model's own, without guidance and penalties, at temperature 1."
    )
    return " ".join([extent, probability, *([] if starts_masked else [_WITHOUT_MASKS])])
