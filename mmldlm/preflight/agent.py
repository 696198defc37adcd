"""Agent of the preflight on every node: probes with time limits, and its part in joint tests.

A probe returns JSON values without an evaluation, and undoes its changes; but for `environment`
it is defined next to the checks that read it. The agent exits at the end of its input, so that a
dead head leaves no process behind. It does not import torch, so that it starts in a fraction of a
second.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

from mmldlm.cluster.agent import LOGIN_LIBRARIES, serve
from mmldlm.cluster.connections import close, connect, listen
from mmldlm.cluster.env_propagation import PREFIXES
from mmldlm.preflight.checks import (
    gpu,
    hosts,
    limits,
    network,
    processes,
    rdma,
    script,
    storage,
    versions,
)
from mmldlm.utils.stop_signals import keep_exit_codes


def environment(args: dict) -> dict:
    """Return the variables relevant to a run, in a process that ssh started on this node, with the
    LD_LIBRARY_PATH of the login, not that of the head.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    of_login = found.pop(LOGIN_LIBRARIES, None)
    if of_login is not None:
        del found["LD_LIBRARY_PATH"]
        if of_login:
            found["LD_LIBRARY_PATH"] = of_login
    return found


# Name -> (probe, a function of the request's arguments; its time limit in seconds).
PROBES = {
    "identity": (hosts.identity, 5),
    "versions": (versions.versions, 10),
    "code": (versions.code, 10),
    "limits": (limits.limits, 5),
    "temporary": (limits.temporary, 10),
    "memory": (limits.memory, 5),
    "environment": (environment, 5),
    "network": (network.network, 30),
    "resolve": (network.resolve, 30),
    "rdma": (rdma.rdma, 5),
    "gpus": (gpu.gpus, gpu.PROBE_SECONDS),
    "processes": (processes.processes, 5),
    "locks": (processes.locks, 5),
    "caches": (processes.caches, 5),
    "data": (storage.data, 20),
    "checkpoints": (storage.checkpoints, 15),
    "script": (script.script, 20),
}


def run_probes(args: dict) -> dict:
    """Run the probes in args["probes"] at the same time, each in a child with its time limit."""
    jobs = {}
    for name in args["probes"]:
        function, seconds = PROBES[name]
        jobs[name] = (lambda function=function: function(args), seconds)
    return run_with_timeout(jobs)


def clock(args: dict) -> float:
    """Return this node's time in seconds since 1970."""
    return time.time()


def write_probe_file(args: dict) -> dict:
    """Write args["text"] to args["path"], to test whether a folder is shared."""
    path, text = Path(args["path"]), args["text"]
    # Other nodes see the file once it is closed: network file systems promise that.
    jobs = {"write": (lambda: path.write_text(text, encoding="utf-8"), 10)}
    return run_with_timeout(jobs)["write"]


def read_probe_file(args: dict) -> dict:
    """Read args["path"], waiting up to three seconds for it; the value is None if it is
    missing.
    """

    def read() -> str | None:
        deadline = time.monotonic() + 3.0
        while True:
            try:
                # Listing the folder refreshes the NFS cache.
                os.listdir(os.path.dirname(args["path"]))
                with open(args["path"], encoding="utf-8") as file:
                    return file.read()
            except OSError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.1)

    return run_with_timeout({"read": (read, 10)})["read"]


def remove_probe_file(args: dict) -> None:
    """Delete the probe file args["path"]."""
    Path(args["path"]).unlink(missing_ok=True)


def run(args: dict) -> list[dict]:
    """Run args["commands"] ([{"command", "environment"}]) in parallel (`run_command`), for at
    most args["seconds"]; of each output, return the end.
    """

    def one(entry: dict) -> dict:
        result = run_command(entry["command"], entry.get("environment", {}), args["seconds"])
        return {**result, "output": result["output"][-20000:]}

    with ThreadPoolExecutor(len(args["commands"])) as executor:
        return list(executor.map(one, args["commands"]))


def run_command(command: list[str], environment: dict[str, str], seconds: float) -> dict[str, Any]:
    """Run a command with further environment variables; return {"code", "output"}.

    After `seconds` it is killed with its children; then the code is None and "timeout" is True.

    Raises:
        OSError: the program cannot be started.
    """
    # A file (in memory): the end of a pipe comes when the last process that holds it ends.
    with open(os.memfd_create("output"), "w+b") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        result: dict[str, Any] = {}
        try:
            result["code"] = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _kill_tree(process)
            result |= {"code": None, "timeout": True}
        output.seek(0)
        return {**result, "output": output.read().decode(errors="replace")}


def _kill_tree(process: subprocess.Popen) -> None:
    """Kill a process and all that it started; torchrun's workers have sessions of their own."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        for each in (process, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_ACTIONS = (
    clock,
    listen,
    close,
    connect,
    write_probe_file,
    read_probe_file,
    remove_probe_file,
    run,
)
ACTIONS = {"collect_facts": run_probes, **{action.__name__: action for action in _ACTIONS}}


def main() -> int:
    """Answer requests until the input ends."""
    keep_exit_codes()
    serve(ACTIONS)
    return 0


def run_with_timeout(
    jobs: Mapping[str, tuple[Callable[[], Any], float]],
) -> dict[str, dict[str, Any]]:
    """Run jobs at the same time, each in a forked child.

    Args:
        jobs: Name -> (function without arguments and with a JSON value, time limit in seconds).

    Returns:
        name -> {"value"} or {"error": one sentence}, after a timeout with "timeout": True. A child
        that cannot be killed (uninterruptible sleep) is left behind without waiting.
    """
    started = time.monotonic()
    running: dict[Connection, tuple[str, int, float]] = {}
    answers: dict[str, dict[str, Any]] = {}
    for name, (function, seconds) in jobs.items():
        receiver, sender = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            _child(function, sender)
        sender.close()
        running[receiver] = (name, pid, started + seconds)
    while running:
        first_deadline = min(deadline for _, _, deadline in running.values())
        ready = wait(list(running), max(first_deadline - time.monotonic(), 0))
        now = time.monotonic()
        for receiver, (name, pid, deadline) in list(running.items()):
            if receiver in ready:
                answers[name] = _receive(receiver)
                os.waitpid(pid, 0)
            elif now >= deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
                error = f"no answer within {deadline - started:.0f} s"
                answers[name] = {"error": error, "timeout": True}
            else:
                continue
            receiver.close()
            del running[receiver]
    return answers


def _child(function: Callable[[], Any], sender: Connection) -> NoReturn:
    """Send the function's value, or its error, and exit."""
    try:
        try:
            answer = {"value": function()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sender.send_bytes(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _receive(receiver: Connection) -> dict[str, Any]:
    try:
        return json.loads(receiver.recv_bytes())
    except (EOFError, OSError):
        return {"error": "the probe exited without an answer"}


if __name__ == "__main__":
    sys.exit(main())
