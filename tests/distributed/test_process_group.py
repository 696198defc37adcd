"""The start of the process group: ranks of two backends, and a backend that never connects."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mmldlm.utils.network import free_port


@pytest.mark.parametrize(
    ("waiting", "words"),
    [
        ("time.sleep(60)", "rank 3 on"),
        ("ctypes.PyDLL(None).sleep(60)", "most recent call first"),  # holds the GIL
    ],
)
def test_a_backend_that_does_not_connect_the_ranks_ends_them(waiting, words):
    code = (
        "import ctypes, time\n"
        "from mmldlm.distributed import process_group\n"
        "process_group._AFTER_TIMEOUT = 1.0\n"
        "with process_group.end_if_not_connected('nccl', 3, 0.2):\n"
        f"    {waiting}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and words in done.stderr


def test_ranks_with_and_without_a_gpu_do_not_wait_for_each_other():
    code = (
        "import sys, torch\n"
        "from mmldlm.distributed.process_group import start_process_group\n"
        "from mmldlm.errors import UserError\n"
        "try:\n"
        "    start_process_group(torch.device(sys.argv[1]), 60)\n"
        "except UserError as error:\n"
        "    sys.exit(str(error))\n"
    )
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, device],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, device in enumerate(("cuda:0", "cpu"))
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=50)
        assert process.returncode == 1 and "Traceback" not in errors
        assert "none (and so gloo) for ranks on" in errors
