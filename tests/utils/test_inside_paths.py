"""Names in files and the paths that they become."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmldlm.utils.paths import check_distinct, path_inside


@pytest.mark.parametrize(
    "name", ["a", "a/b", "..a", "a..", ".a/...", "a\\b", "é", "-", "a b", "x" * 255]
)
def test_names_inside(name):
    assert path_inside(Path("/f"), name) == Path("/f") / name


BAD = [
    "",
    "/",
    "/a",
    "..",
    "../a",
    "a/..",
    "a/../b",
    ".",
    "./a",
    "a/./b",
    "a//b",
    "a/",
    "a\0",
    "x" * 256,
    "\ud800",
    5,
    None,
    b"a",
    ["a"],
]


@pytest.mark.parametrize("name", BAD, ids=repr)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="the name"):
        path_inside(Path("/f"), name)


def test_collisions():
    check_distinct(["a", "b/a", "b/c", "ab"])
    for names in (["a", "a"], ["a", "a/b"], ["a/b/c", "x", "a"]):
        with pytest.raises(ValueError, match=r"two files|both as a file"):
            check_distinct(names)
