"""The strict hostfile reader: everything DeepSpeed would take for something else is named with its
line.
"""

from __future__ import annotations

import argparse
import os

import pytest

from mmldlm.cluster.hostfile import Node, read_hostfile
from mmldlm.commands import preflight
from mmldlm.errors import UserError


@pytest.fixture
def hostfile(tmp_path):
    def write(text: str | bytes):
        path = tmp_path / "hostfile"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_names_slots_and_comments(hostfile):
    path = hostfile("# two machines\nnode1 slots=8\n\n  # more\nnode-2.cluster  slots=4\n")
    assert read_hostfile(path) == [Node("node1", 8, 2), Node("node-2.cluster", 4, 5)]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a slots=2\nb lots=8\n", 2, "'lots=8' after b"),
        ("a slots = 8\n", 1, "'slots = 8' after a"),
        ("a\n", 1, "nothing after a"),
        ("a:8\n", 1, "not a host name"),
        ("a slots=8x\n", 1, "'slots=8x' after a"),
        ("a slots=-1\n", 1, "'slots=-1' after a"),
        ("a slots=0\n", 1, "of at least 1"),
        ("a slots=1\nb slots=1\na slots=1\n", 3, "already in line 1"),
        ("node[1-2] slots=2\n", 1, "a range"),
        ("localhost slots=1\nb slots=2\n", 1, "another machine on every node"),
        ("a slots=2 # big one\n", 1, "'slots=2 # big one' after a"),
        ("root@a slots=2\n", 1, "user"),
        ("\ufeffa slots=2\n", 1, r"'\ufeffa' is not a host name"),
        ("a slots=2 max_slots=3\n", 1, "slots=N of at least 1 is expected"),
        # One line to DeepSpeed.
        (
            "a slots=1\n\nb slots=1\x0cc slots=1\n",
            3,
            "after b",
        ),
        ("a slots=1\rb lots=1\r\n", 2, "'lots=1' after b"),
        ("fe80::1%eth0 slots=1\n", 1, "IPv6"),
        ("[::1] slots=1\n", 1, "IPv6"),
    ],
)
def test_what_deepspeed_would_misread_is_named_with_its_line(hostfile, text, line, words):
    path = hostfile(text)
    with pytest.raises(UserError) as caught:
        read_hostfile(path)
    assert f"{path}:{line}: " in caught.value.found and words in caught.value.found


def test_all_bad_lines_are_named_at_once(hostfile):
    with pytest.raises(UserError) as caught:
        read_hostfile(hostfile("a slots=0\nb slots=1\nc lots=1\n"))
    assert ":1: " in caught.value.found and ":3: " in caught.value.found


@pytest.mark.parametrize("text", ["", "# nothing\n", b"\xff\xfea"])
def test_no_node_or_no_text_is_an_error(hostfile, text):
    with pytest.raises(UserError):
        read_hostfile(hostfile(text))


def test_a_missing_file_is_never_a_local_run(tmp_path):
    with pytest.raises(UserError, match="this machine alone"):
        read_hostfile(tmp_path / "nowhere")


def test_a_pipe_is_read_once_and_never_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr("mmldlm.cluster.hostfile._PIPE_SECONDS", 0.5)
    reader, writer = os.pipe()
    os.write(writer, b"a slots=2\nb slots=2\n")
    with pytest.raises(UserError, match="writer"):
        read_hostfile(f"/dev/fd/{reader}")
    os.write(writer, b"a slots=2\n")
    os.close(writer)
    assert read_hostfile(f"/dev/fd/{reader}") == [Node("a", 2, 1)]
    os.close(reader)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="writer"):
        read_hostfile(tmp_path / "fifo")


@pytest.mark.parametrize(
    ("name", "said"), [("", "Is a directory"), ("/dev/zero", "neither a file nor a pipe")]
)
def test_something_that_is_not_a_file_is_exit_2_and_one_message(tmp_path, capsys, name, said):
    """Through the command, whose receipt hashes the hostfile too."""
    parser = argparse.ArgumentParser()
    preflight.add_arguments(parser)
    args = parser.parse_args(
        ["--level", "0", "--hostfile", name or str(tmp_path), "--only", "HOST001"]
    )
    assert preflight.main(args) == 2
    assert said in capsys.readouterr().out
