"""A fatal error before there is a process group is printed exactly once per node."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest

from tests.support.helpers import environment

HOST = re.escape(socket.gethostname())
SAY = """
import sys
from mmldlm.distributed.error_reporting import report_error_once
from mmldlm.errors import UserError
report_error_once(UserError("a file", sys.argv[1], "look for it"))
"""


def said(folder, ranks: dict[tuple[int, int], str]) -> list[str]:
    """First lines printed by ranks {(rank, local rank): what it found}, which all have the same
    launcher (this).
    """
    numbers = {"WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TMPDIR": str(folder)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SAY, found],
            env=environment(**numbers, RANK=str(rank), LOCAL_RANK=str(local_rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for (rank, local_rank), found in ranks.items()
    ]
    lines = "".join(process.communicate(timeout=60)[1] for process in started).splitlines()
    return [line.split("] ")[1] for line in lines if line.startswith("[")]


@pytest.mark.parametrize(
    ("ranks", "prefixes"),
    [
        ({(0, 0): "none", (1, 1): "none", (2, 2): "none"}, ["error: "]),
        ({(1, 1): "none"}, [f"error on rank 1 \\({HOST}\\): "]),
        ({(2, 0): "none", (3, 1): "none"}, [f"error on rank 2 \\({HOST}\\): "]),
        ({(2, 2): "none", (3, 3): "none"}, [f"error on rank [23] \\({HOST}\\): "]),
        ({(0, 0): "another", (1, 1): "none"}, ["error: ", f"error on rank 1 \\({HOST}\\): "]),
    ],
)
def test_one_rank_of_a_node_says_what_its_ranks_found(tmp_path, ranks, prefixes):
    lines = said(tmp_path, ranks)
    assert len(lines) == len(prefixes), lines
    for line, prefix in zip(lines, prefixes, strict=True):
        assert re.fullmatch(prefix + "expected a file", line), lines


def test_the_next_attempt_says_it_again(tmp_path):
    assert len(said(tmp_path, {(1, 1): "none"})) == 1
    assert said(tmp_path, {(1, 1): "none"}) == [], "the same attempt: another rank has said it"
    (claim,) = (tmp_path / f"mmldlm_errors_{os.getuid()}").iterdir()
    os.utime(claim, (0, 0))
    assert len(said(tmp_path, {(1, 1): "none"})) == 1
