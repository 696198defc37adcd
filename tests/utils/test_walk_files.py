"""Files below a folder: through links, each folder once, and everything else named."""

from __future__ import annotations

import os

from mmldlm.utils.input_files import LeftOut, is_of_macos, walk_files


def test_links_are_followed_and_everything_else_is_named(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own / "b", other):
        folder.mkdir(parents=True)
    for path in (own / "b" / "1.txt", other / "2.txt", own / ".DS_Store", own / "._3.txt"):
        path.touch()
    os.mkfifo(own / "4.txt")
    links = {
        "a": own / "b",
        "c": other,
        "d": other,
        "loop": own,
        "5.txt": tmp_path / "none",
        "6.txt": other / "2.txt",
    }
    for name, target in links.items():
        (own / name).symlink_to(target)
    left_out = LeftOut()
    assert [path.relative_to(own).as_posix() for path in walk_files(own, left_out)] == [
        "6.txt",
        "b/1.txt",
        "c/2.txt",
    ]
    found = left_out.entry()["not_read"]

    assert {reason: value["number"] for reason, value in found.items()} == {
        "FIFOs, sockets and devices": 1,
        "files of macOS": 2,
        "folders reached twice": 3,
        "links to nothing": 1,
    }


def test_only_some_names_are_kept():
    left_out = LeftOut()
    for number in range(10):
        left_out.add("others", number)
    both = LeftOut().update([left_out, left_out])
    assert both.entry() == {"not_read": {"others": {"number": 20, "such_as": ["0", "1", "2"]}}}
    assert (
        is_of_macos("__MACOSX/a.png") and is_of_macos("a/._b.txt") and not is_of_macos("a/.b.txt")
    )
