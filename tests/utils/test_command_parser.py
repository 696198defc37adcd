"""The parser of commands: errors of two lines, an unknown option first, help in groups."""

from __future__ import annotations

import pytest

from mmldlm import cli
from mmldlm.utils.command_parser import CommandParser


def refusal(words: list[str], capsys) -> str:
    parser = CommandParser("mmldlm verb", "does something")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--text", nargs="+")
    parser.add_argument("overrides", nargs="*")
    with pytest.raises(SystemExit) as done:
        parser.parse(words)
    assert done.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chekpoint", "x"], "unknown option --chekpoint (did you mean --checkpoint?)"),
        (["--chekpoint=x y", "a=b"], "unknown option --chekpoint (did you mean --checkpoint?)"),
        (["--checkpoint", "x", "a=b", "--nothing-like-it"], "unknown option --nothing-like-it\n"),
        (["--text", "a"], "the following arguments are required: --checkpoint"),
    ],
)
def test_an_error_names_the_word_and_where_options_are_listed(words, said, capsys):
    text = refusal(words, capsys)
    assert text.startswith("error: ") and said in text and "`mmldlm verb --help`" in text
    assert text.count("\n") == 2


def test_abbreviations_and_words_that_look_like_options_are_read():
    parser = CommandParser("mmldlm verb", None)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("overrides", nargs="*")
    words = ["--check=x", "a=1", "--text of several words", "--", "--b=2"]
    args = parser.parse(words)
    assert args.checkpoint == "x"
    assert args.overrides == ["a=1", "--text of several words", "--b=2"]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_fits_a_terminal_and_begins_with_what_a_call_needs(verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = CommandParser(f"mmldlm {verb}", cli.VERBS[verb][1])
    cli._add_arguments(parser, verb)
    lines = parser.format_help().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[: lines.index("common options:")][-1] == "" and len(lines[0].split()) > 2
    listed = " ".join(lines[: lines.index("common options:")])
    for action in parser._actions:
        name = (action.option_strings or [None])[-1]
        if name and name != "--help":
            assert action.required == (f"{name} " in listed), name


def test_a_verb_that_is_not_there_gets_a_proposal(capsys):
    assert cli.main(["trian"]) == 2
    text = capsys.readouterr().err
    assert "trian (did you mean train?)" in text and "mmldlm --help" in text
    assert cli.main(["nothing like it"]) == 2
    assert "did you mean" not in capsys.readouterr().err
