"""Run functions in child processes with time limits: a hung file system or driver must not hang
the preflight.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any


def run_with_timeout(
    jobs: dict[str, tuple[Callable[[], Any], float]],
) -> dict[str, dict[str, Any]]:
    """Run jobs at the same time, each in a forked child.

    Args:
        jobs: name -> (function without arguments and with a JSON value, time limit in seconds).

    Returns:
        name -> {"value"} or {"error": one sentence}, with "seconds" and, after a timeout,
        "timeout": True. A child that cannot be killed (uninterruptible sleep) is left behind
        without waiting.
    """
    started = time.monotonic()
    running: dict[int, tuple[str, int, float]] = {}  # read end -> name, pid, deadline
    collected: dict[int, bytes] = {}
    answers: dict[str, dict[str, Any]] = {}
    for name, (function, seconds) in jobs.items():
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            _child(function, write_end)
        os.close(write_end)
        running[read_end] = (name, pid, started + seconds)
        collected[read_end] = b""
    while running:
        wait = max(min(deadline for _, _, deadline in running.values()) - time.monotonic(), 0)
        ready = select.select(list(running), [], [], wait)[0]
        now = time.monotonic()
        for end in list(running):
            name, pid, deadline = running[end]
            if end in ready:
                chunk = os.read(end, 1 << 16)
                collected[end] += chunk
                if chunk:
                    continue
                os.waitpid(pid, 0)
                try:
                    answer = json.loads(collected[end])
                except ValueError:
                    answer = {"error": "the probe exited without an answer"}
            elif now >= deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
                answer = {"error": f"no answer within {deadline - started:.0f} s", "timeout": True}
            else:
                continue
            answers[name] = {**answer, "seconds": round(now - started, 3)}
            os.close(end)
            del running[end]
    return answers


def _child(function: Callable[[], Any], write_end: int) -> None:
    """Run the function and write its answer to the pipe; never returns."""
    try:
        try:
            answer = {"value": function()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(write_end, data) :]
    finally:
        os._exit(0)
