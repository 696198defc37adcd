"""A settings class declares an option once: the parser and the check of a value agree."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import pytest

from mmldlm.errors import UserError
from mmldlm.utils.settings import (
    Settings,
    add_options,
    flags,
    given_options,
    option,
    options_of,
    same_option,
)


@dataclass(frozen=True)
class Search(Settings):
    num_beams: int = option(4, "beams", int, low=1, metavar="W")
    share: float | None = option(None, "a share", float, low=0, high=1)
    limits: list[float] | None = option(None, "limits", float, nargs=2)
    name: str | None = option(None, "a name", choices=("a", "b"))
    is_on: bool = option(False, "whether", action="store_const", const=True)
    plain: int = 0  # not an option


@dataclass(frozen=True)
class Wide(Settings):
    num_beams: int = same_option(Search, "num_beams", 9)
    height: int = option(1, "height", int, low=1)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_options(made, Search, Wide)
    return made


def test_options_of_several_classes_are_added_once_and_are_none_unless_given():
    args = parser().parse_args(["--share", "0.5", "--limits", "1", "2"])
    keys = [*options_of(Search), "height"]
    assert list(vars(args)) == keys == ["num_beams", "share", "limits", "name", "is_on", "height"]
    assert given_options(args, keys) == {"share": 0.5, "limits": [1.0, 2.0]}
    assert (Search().num_beams, Wide().num_beams) == (4, 9)
    assert flags(["num_beams", "name"]) == "--num-beams, --name"


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("num_beams", 0, "of at least 1"),
        ("share", 1.5, "from 0 to 1"),
        ("share", float("nan"), "from 0 to 1"),
        ("num_beams", 2.5, "of at least 1"),
        ("limits", [0.0, float("inf")], "a finite number"),
        ("name", "c", "a or b"),
        ("limits", [0.0], ": a list of 2"),
        ("num_beams", True, "of at least 1"),
        ("share", "1_0", "from 0 to 1"),
    ],
)
def test_what_the_parser_refuses_is_refused_from_python(key, value, expected, capsys):
    words = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    with pytest.raises(SystemExit):
        parser().parse_args([flags([key]), *words])
    assert flags([key]) in capsys.readouterr().err
    with pytest.raises(UserError, match=f"{flags([key])} ?{expected}"):
        Search(**{key: value})


@pytest.mark.parametrize(
    "key, value, found",
    [("limits", 0.5, "0.5"), ("num_beams", [3], r"\[3\]"), ("is_on", "no", "'no'")],
)
def test_a_value_from_python_has_the_type_of_the_words(key, value, found):
    with pytest.raises(UserError, match=f"found: +{found}"):
        Search(**{key: value})


def test_a_word_is_no_number_and_one_of_numpy_is():
    with pytest.raises(UserError) as error:
        Search(num_beams="4")
    assert error.value.found == "'4'"
    assert Search(num_beams=np.int64(4), share=np.float32(0.5)).num_beams == 4
