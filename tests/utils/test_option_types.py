"""Every option of every verb: its numbers have bounds, and its paths are expanded."""

from __future__ import annotations

import argparse

import pytest

from mmldlm import cli
from mmldlm.commands import FormerOption
from mmldlm.utils import option_types
from tests.trials.test_config_values import OPTIONS

# Options and arguments whose text is neither a path nor a number.
TEXTS = {
    "--config-name",
    "--text",
    "--text-field",
    "--latents-field",
    "--prefix",
    "--sampler",
    "--only",
    "--skip",
    "--explain",
    "--device",
    "--master_addr",
    "--ssh-option",
    "--method",
    "overrides",
    "event",
    "--eval-dataset",
    "--key",
    "--key-b",
    "--strip-prefix",
    "repo",
    "--revision",
}


def actions(verb: str) -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    cli._add_arguments(parser, verb)
    return [
        action
        for action in parser._actions
        if action.nargs != 0
        and action.choices is None
        and not isinstance(action, FormerOption)  # an error, whatever its value
    ]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_no_option_takes_its_value_as_it_comes(verb):
    """public-reports B 24 tilde, C 15 variables-in-paths, trials-3 BAD 11: a new option needs a
    type, or is a text.
    """
    for action in actions(verb):
        name = (action.option_strings or [action.dest])[0]
        assert action.type not in (int, float), f"{verb} {name}: a number without bounds"
        assert (action.type is None) == (name in TEXTS), (
            f"{verb} {name}: its type is {action.type}"
        )


@pytest.mark.parametrize("line", OPTIONS)
def test_numbers_out_of_bounds_are_refused(line, capsys):
    """trials-3 BAD 11."""
    words = line.split()
    verb = " ".join(words[:2]) if " ".join(words[:2]) in cli.VERBS else words[0]
    parser = argparse.ArgumentParser()
    cli._add_arguments(parser, verb)
    with pytest.raises(SystemExit) as done:
        parser.parse_intermixed_args(words[len(verb.split()) :])
    said = capsys.readouterr().err
    assert (
        done.value.code == 2
        and words[-2] in said
        and f": '{words[-1]}': a " in said
        and "number" in said
    )


def test_paths_are_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/of/me")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)
    monkeypatch.chdir(tmp_path)
    for given, expected in (
        ("~", "/of/me"),
        ("~/a", "/of/me/a"),
        ("$HOME/a", "/of/me/a"),
        ("${HOME}a", "/of/mea"),
        ("a~", "a~"),
        ("./~", "./~"),
        ("a$", "a$"),
        ("cost$5", "cost$5"),
        ("a$$HOME", "a$$HOME"),
        ("x\0$HOME", "x\0/of/me"),
        ("openwebtext", "openwebtext"),
        ("", ""),
    ):
        assert option_types.path(given) == expected
    for wrong in ("$UNSET/a", "${UNSET}", "$EMPTY/a", "${HOME", "${HOME:-x}", "~no_such_user/a"):
        with pytest.raises(argparse.ArgumentTypeError):
            option_types.path(wrong)
    assert option_types.path_after("vae:")("vae:~/a") == "vae:/of/me/a"
    assert option_types.path_after("vae:")("codes:fsq") == "codes:fsq"
    (tmp_path / "$HOME").mkdir()
    assert option_types.path("$HOME") == "$HOME" and option_types.path("$HOME/a") == "/of/me/a"
    assert option_types.path(f"{tmp_path}/$HOME/a") == f"{tmp_path}/$HOME/a"


@pytest.mark.parametrize(
    "word, size", [("5GB", 5 * 10**9), ("1.5 KiB", 1536), ("7", 7), ("2m", 2 * 10**6)]
)
def test_sizes_in_bytes(word, size):
    assert option_types.num_bytes(word) == size


@pytest.mark.parametrize("word", ["", "GB", "-1", "0", "5 apples", "0.4", "1e9", "9" * 400])
def test_sizes_that_are_none(word):
    with pytest.raises(argparse.ArgumentTypeError, match="a size such as"):
        option_types.num_bytes(word)
