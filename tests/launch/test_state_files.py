"""A launch's small files on a node: full, foreign and shared folders; a rank with a full disk
still ends as it did.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import uuid

import pytest

from mmldlm.launch import node_agent, rank_wrapper, state_files


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Three roots of a launch's folders; each takes files until it is `full`."""
    roots = [tmp_path / name for name in ("one", "two", "three")]
    for root in roots:
        root.mkdir()
    monkeypatch.setattr(state_files, "ROOTS", tuple(map(str, roots)))
    full: set = set()
    real = os.open

    def refuses(path, flags, *more, **named):
        if flags & os.O_CREAT and any(str(path).startswith(str(root)) for root in full):
            raise OSError(28, "No space left on device")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuses)
    state_files.make_folders("id")
    return roots, full


def test_the_next_folder_is_used_and_the_newest_counts(folders):
    roots, full = folders
    assert state_files.write_anywhere("id", "a.json", json.dumps(1))
    full.add(roots[0])
    assert state_files.write_anywhere("id", "a.json", json.dumps(2))
    assert state_files.read_newest("id", "*.json") == {"a.json": 2}
    full.update(roots)
    assert (
        not state_files.write_anywhere("id", "b.json", json.dumps(1))
        and list(roots[2].rglob("*b.json*")) == []
    )


def test_files_are_private_and_foreign_folders_unused(folders, monkeypatch):
    state_files.write_anywhere("id", "a.json", "{}")
    (path,) = (path for root in folders[0] for path in root.rglob("a.json"))
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert state_files.state_folders("id") == []


def test_a_launch_file_is_deleted_when_all_ranks_have_read_it(folders, monkeypatch):
    launch = uuid.uuid4().hex
    node_agent.write_launch_file(
        {"launch": launch, "values": {"environment": {"WANDB_API_KEY": "secret"}}}
    )
    copies = [path for root in folders[0] for path in root.rglob("*_launch.json")]
    assert len(copies) == 3 and "secret" in copies[0].read_text()
    host = copies[0].name.removesuffix("_launch.json")
    for number in range(2):
        assert all(path.exists() for path in copies)
        ended = {"rank": number, "host": host, "pid": 1, "parent": 1, "exit": 0}
        state_files.write_anywhere(
            launch, rank_wrapper.state_file(host, number), json.dumps(ended)
        )
        assert len(node_agent.report_ranks({"launch": launch, "slots": 2})["ranks"]) == number + 1
    assert not any(path.exists() for path in copies)
    node_agent.release({"launch": launch})
    assert not any(root.joinpath(f"mmldlm_{launch}").exists() for root in folders[0])


def test_a_node_where_no_folder_takes_the_launch_file_says_so(folders):
    folders[1].update(folders[0])
    with pytest.raises(OSError, match="no folder for the launch file.*No space left"):
        node_agent.write_launch_file({"launch": "id", "values": {}})


RANK = """
import errno, shutil, sys
from pathlib import Path
sys.argv = ["rank_wrapper.py", {id!r}]
from mmldlm.launch import rank_wrapper as rank; from mmldlm.launch import state_files as state
real = state.write
def write(folder, name, text):  # every folder is full
    raise OSError(errno.ENOSPC, "No space left on device")
state.write = write
sys.exit(rank.main())
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_whose_state_cannot_be_written_ends_as_it_would(tmp_path, code):
    launch = uuid.uuid4().hex
    (tmp_path / "train.py").write_text(f"import sys; sys.exit({code})")
    values = {"script": str(tmp_path / "train.py"), "args": [], "environment": {}}
    node_agent.write_launch_file(
        {"launch": launch, "values": {**values, "logs": str(tmp_path), "folder": str(tmp_path)}}
    )
    try:
        # TMPDIR of a batch job: the rank finds the launch file of a session without it.
        environment = {
            **os.environ,
            "RANK": "1",
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": os.getcwd(),
        }
        command = [sys.executable, "-c", RANK.format(id=launch)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert done.stderr.count("cannot be written") == 2
    finally:
        node_agent.release({"launch": launch})


def test_a_port_is_held_for_one_launch_at_a_time():
    server = socket.create_server(("", 0))
    port = server.getsockname()[1]
    assert "use" in node_agent.reserve_port({"port": port})["error"]  # somebody listens there
    server.close()
    node_agent.release({"launch": "none"})
    assert "error" not in node_agent.reserve_port({"port": port})
    # Nothing listens there yet, but the ranks of another launch are on their way.
    other = (
        "from mmldlm.launch import node_agent as node; print(node.reserve_port({'port':"
        f" {port}}})['error'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", other], capture_output=True, text=True, check=True
    )
    assert "reserved by another" in done.stdout
    node_agent.release({"launch": "none"})
    # KeyError: it is free.
    assert subprocess.run([sys.executable, "-c", other], capture_output=True).returncode == 1
