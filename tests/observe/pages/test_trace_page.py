"""The page of a trace, in a real browser: it plays to the sampled text, by mouse and by keys."""

from __future__ import annotations

import json
import re

import pytest

from mmldlm.observe.pages.page import write_page
from mmldlm.observe.pages.trace_page import (
    JOINED,
    STATE,
    WORD,
    token_words,
    trace_data,
    trace_page,
)
from mmldlm.sampling.records import Write
from mmldlm.sampling.settings import MAX_TRACED_TEXTS
from tests.observe.pages.conftest import HOSTILE

RUN, NING, NER, FAST, STOP, FIRST_HOSTILE, VOCAB = 4, 5, 6, 7, 8, 9, 13


def words(count: int) -> str:
    """JavaScript: what the first tokens show."""
    return (
        f"[...document.querySelectorAll('#tokens .token')].slice(0, {count}).map((chip) =>"
        " chip.textContent)"
    )


TEXT = "document.getElementById('text').textContent"
COUNTER = "document.getElementById('counter').textContent"


@pytest.fixture(scope="module")
def traces():
    """Text 0: "running fast." in two passes, one word written twice. Text 1: hostile words.

    Text 2: no word at all.
    """
    candidates = ((RUN, 0.5), (FAST, 0.25))
    first = [Write(0, RUN, 0.5, candidates), Write(1, NER, 0.1, ((NING, 0.3), (NER, 0.1)))]
    second = [
        Write(1, NING, 0.75, ((NING, 0.75),)),
        Write(2, FAST, 1.0, ((FAST, 1.0),)),
        Write(3, STOP, 0.0),
    ]
    hostile = [
        Write(i, FIRST_HOSTILE + i, 0.5, ((FIRST_HOSTILE + i, 0.5),)) for i in range(len(HOSTILE))
    ]
    third = (
        [Write(0, VOCAB + 2, None, ((RUN, 0.5),))],
        [Write(0, None)],
        [Write(0, RUN, 1.0, ((RUN, 1.0),))],
    )
    return {0: [first, second], 1: [hostile], 3: list(third)}


@pytest.fixture(scope="module")
def records():
    return [
        {
            "index": 0,
            "text": "running fast.",
            "num_tokens": 4,
            "reference": "Running <b>faster</b>.",
        },
        {
            "index": 1,
            "text": " ".join(HOSTILE),
            "num_tokens": len(HOSTILE),
            "reference": HOSTILE[0],
        },
        {"index": 2, "text": "", "num_tokens": 0},
        {"index": 3, "text": "run", "num_tokens": 1},
    ]


@pytest.fixture
def page(browser, traces, records, tokenizer, tmp_path):
    """The page, opened."""
    text = trace_page(traces, records, tokenizer, VOCAB, settings=["l2t", HOSTILE[0]])
    write_page(tmp_path / "trace.html", text)
    browser.open(tmp_path / "trace.html")
    yield browser
    assert browser.problems == [] and browser.requests == [(tmp_path / "trace.html").as_uri()]
    assert browser.run("window.broken") is None


def test_word_pieces_know_whether_they_continue_a_word(tokenizer):
    assert token_words([RUN, NING, FAST, STOP, VOCAB + 5], tokenizer, VOCAB) == [
        ("run", WORD), ("ning", JOINED), ("fast", WORD), (".", JOINED), ("class 5", STATE),
    ]  # fmt: skip


def test_bytes_of_a_word_know_it_too():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({"[EOS]": 0, "run": 1, "ning": 2, "Ġfast": 3, "Ġ": 4}, []))
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="[EOS]")
    assert token_words([2, 3, 4], tokenizer, 5) == [("ning", JOINED), ("fast", WORD), (" ", WORD)]


def test_the_data_replays_to_the_texts(traces, records, tokenizer):
    data = json.loads(json.dumps(trace_data(traces, records, tokenizer, VOCAB)))
    shown, text = data["tokens"], data["texts"][0]
    for num_passes, expected in (
        (1, ["run", "ner", None, None]),
        (2, ["run", "ning", "fast", "."]),
    ):
        state = [None] * text["length"]
        for position, token, _, _ in (
            write for writes in text["passes"][:num_passes] for write in writes
        ):
            state[position] = shown[token][0]
        assert state == expected
    assert data["texts"][2]["passes"] == [] and data["texts"][2]["reference"] is None


def test_a_text_is_shown_finished_until_it_is_played(page):
    assert page.run(TEXT) == "running fast." and page.run(COUNTER).startswith("Pass 2 of 2")
    page.press("n")
    assert page.run(TEXT) == " ".join(HOSTILE)


def test_stepping_ends_at_the_sampled_text(page):
    page.press("Home")
    assert page.run(words(4)) == ["", "", "", ""] and page.run(COUNTER).startswith("Pass 0 of 2")
    page.run("document.getElementById('step').click()")
    assert page.run(words(4)) == ["run", "ner", "", ""] and page.run(TEXT) == "runner …"
    page.run("document.getElementById('step').click()")
    assert page.run(words(4)) == ["run", "ning", "fast", "."]
    assert page.run(TEXT) == "running fast." and page.run(
        "document.getElementById('step').disabled"
    )
    assert page.run("document.getElementById('text-label').textContent") == "Final text"
    assert page.run("document.getElementById('reference').textContent") == "Running <b>faster</b>."
    assert "4 of 4" in page.run(COUNTER)
    page.run("document.querySelectorAll('#tokens .token')[1].click()")
    details = page.run("document.getElementById('details').textContent")
    assert "pass 2" in details and "75 %" in details and "Before: ner (pass 1)" in details


def test_keys_do_what_the_page_says(page):
    page.press("Home")
    page.press("ArrowRight")
    assert page.run(COUNTER).startswith("Pass 1 ")
    page.press("End")
    assert page.run(TEXT) == "running fast."
    page.press("Home")
    page.run("document.getElementById('speed').value = '4'")
    page.press(" ", "Space", " ")  # plays to the end
    assert page.run("document.getElementById('play').textContent") == "Pause"
    page.wait_for(f"{TEXT} === 'running fast.'")
    page.wait_for("document.getElementById('play').textContent === 'Play'")
    page.run("document.querySelector('#tokens .token').focus()")
    page.press("ArrowRight")  # inside the text: to the next word, not to the next pass
    assert page.run("document.activeElement.textContent") == "ning"
    assert page.run(COUNTER).startswith("Pass 2 ")
    page.press("n")
    assert page.run("document.getElementById('choice').value") == "1"
    page.press("p")
    assert page.run("document.getElementById('choice').value") == "0"


def test_hostile_words_stay_words(page):
    page.press("n")
    page.press("End")
    assert page.run(words(len(HOSTILE))) == list(HOSTILE)
    assert page.run(TEXT) == " ".join(HOSTILE)
    assert page.run("document.images.length") == 0


def test_the_legend_names_what_the_page_shows(page, browser, records, traces, tokenizer, tmp_path):
    hidden = (
        "['changed-legend', 'state-legend', 'mask-legend'].map((id) =>"
        " document.getElementById(id).hidden)"
    )
    assert page.run(hidden) == [False, False, False]
    page.press("Home")
    page.press("ArrowRight")
    assert page.run("document.querySelectorAll('#tokens .changed').length") == 0
    page.press("ArrowRight")
    assert page.run(
        "[...document.querySelectorAll('#tokens .changed')].map((chip) => chip.textContent)"
    ) == ["ning"]
    write_page(
        tmp_path / "plain.html",
        trace_page({0: traces[1]}, records[1:2], tokenizer, VOCAB, settings=[]),
    )
    browser.open(tmp_path / "plain.html")
    assert browser.run(hidden) == [True, True, False]
    browser.open(tmp_path / "trace.html")


def test_states_that_are_no_words_and_masks_that_come_back_are_shown(page):
    page.run(
        "{ const list = document.getElementById('choice'); list.value = 2; list.dispatchEvent(new"
        " Event('change')) }"
    )
    assert page.run(TEXT) == "" and page.run("document.getElementById('reference-row').hidden")
    page.press("n")
    page.press("Home")
    page.press("ArrowRight")
    assert page.run(words(1)) == ["class 2"]
    page.press("ArrowRight")
    assert page.run("document.querySelector('#tokens .token').classList.contains('mask')")
    page.press("ArrowRight")
    assert page.run(words(1)) == ["run"] and page.run(TEXT) == "run"


@pytest.mark.parametrize("width", [320, 1200])
def test_nothing_is_wider_than_the_screen(page, width):
    page.resize(width)
    page.press("End")
    for _ in range(2):
        assert page.run("document.documentElement.scrollWidth") <= width
        page.press("n")


def test_without_masks_positions_appear_as_they_are_written(browser, records, tokenizer, tmp_path):
    trace = [[Write(i, token, 0.5, ((token, 0.5),))] for i, token in enumerate((RUN, NING))]
    record = {"index": 0, "text": "running", "num_tokens": 2}
    text = trace_page({0: trace}, [record], tokenizer, VOCAB, settings=[], starts_masked=False)
    write_page(tmp_path / "trace.html", text)
    browser.open(tmp_path / "trace.html")
    visible = "document.querySelectorAll('#tokens .token:not([hidden])').length"
    assert browser.run(visible) == 2
    browser.press("Home")
    assert browser.run(visible) == 0
    browser.press("ArrowRight")
    assert browser.run(visible) == 1 and browser.run(TEXT) == "run"
    browser.press("ArrowRight")
    assert browser.run(TEXT) == "running" and browser.problems == []


def test_size_is_bounded_by_the_number_of_texts(tokenizer):
    write = Write(0, RUN, 0.123456789, tuple((FAST, 0.123456789) for _ in range(5)))
    length, total = 200, 3 * MAX_TRACED_TEXTS
    passes = [[write._replace(position=i)] for i in range(length)]
    records = [{"index": i, "text": "run " * length, "num_tokens": length} for i in range(total)]
    page = trace_page(dict.fromkeys(range(total), passes), records, tokenizer, VOCAB, settings=[])
    assert f"The first {MAX_TRACED_TEXTS} of {total} texts." in page
    assert len(re.findall(r'"index":', page)) == MAX_TRACED_TEXTS
    assert len(page) < 2_000_000
