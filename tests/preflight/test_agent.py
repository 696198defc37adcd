"""Time-limited children: a hung probe, a broken one and a large answer."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import psutil

from mmldlm.preflight.agent import run_command, run_with_timeout


def _raise():
    raise OSError("stale file handle")


def test_values_errors_and_hangs():
    answers = run_with_timeout(
        {
            "fine": (lambda: {"bytes": 3}, 20),
            "large": (lambda: "x" * 300_000, 20),
            "broken": (_raise, 20),
            "hung": (lambda: time.sleep(1000), 0.5),
            "dead": (lambda: os.kill(os.getpid(), signal.SIGKILL), 20),
        }
    )
    assert answers["fine"]["value"] == {"bytes": 3}
    assert len(answers["large"]["value"]) == 300_000
    assert answers["broken"]["error"] == "OSError: stale file handle"
    assert answers["hung"]["timeout"] and "no answer" in answers["hung"]["error"]
    assert "without an answer" in answers["dead"]["error"]


def test_a_hung_probe_is_killed():
    read_end, write_end = os.pipe()

    def hang():
        os.write(write_end, str(os.getpid()).encode())
        time.sleep(1000)

    run_with_timeout({"hung": (hang, 1.0)})
    pid = int(os.read(read_end, 20))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if os.waitpid(pid, os.WNOHANG) == (pid, signal.SIGKILL):
                return
        except ChildProcessError:
            return  # reaped already
        time.sleep(0.05)
    raise AssertionError("the hung child is still there")


STARTS_A_SESSION = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(1000)
"""


def test_a_command_that_takes_too_long_ends_with_all_that_it_started():
    """torchrun starts its workers in sessions of their own; they hold the output."""
    started = time.monotonic()
    result = run_command([sys.executable, "-c", STARTS_A_SESSION], {}, 3.0)
    assert result["code"] is None and result["timeout"] and time.monotonic() - started < 60
    deadline = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie, until somebody reaps it
        while psutil.Process(int(result["output"])).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
