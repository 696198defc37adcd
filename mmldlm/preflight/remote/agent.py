"""Agent of the preflight on every node: `python -m mmldlm.preflight.remote.agent`, one JSON
request per line.

Each answer follows MARK, to distinguish it from output of the login shell. The agent exits at the
end of its input, so that a dead head leaves no process behind. Standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mmldlm.preflight.probes import PROBES
from mmldlm.preflight.remote.connections import close, connect, listen
from mmldlm.preflight.remote.timeouts import run_with_timeout
from mmldlm.utils.stop_signals import keep_exit_codes

MARK = "@mmldlm "


def collect_facts(args: dict) -> dict:
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

    def write() -> str:
        with open(args["path"], "w", encoding="utf-8") as file:
            file.write(args["text"])
            file.flush()
            os.fsync(file.fileno())
        return args["text"]

    return run_with_timeout({"write": (write, 10)})["write"]


def read_probe_file(args: dict) -> dict:
    """Read args["path"], waiting up to three seconds for it; the value is None if it is
    missing.
    """

    def read() -> str | None:
        deadline = time.monotonic() + 3.0
        while True:
            try:
                os.listdir(os.path.dirname(args["path"]))  # refreshes the NFS cache
                with open(args["path"], encoding="utf-8") as file:
                    return file.read()
            except OSError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.1)

    return run_with_timeout({"read": (read, 10)})["read"]


def remove_probe_file(args: dict) -> None:
    """Delete the probe file args["path"]."""
    if os.path.basename(args["path"]).startswith(".mmldlm_preflight_") and os.path.exists(
        args["path"]
    ):
        os.unlink(args["path"])


def run(args: dict) -> list[dict]:
    """Run args["commands"] ([{"command", "environment"}]) in parallel, for at most
    args["seconds"].

    A command that exceeds the limit is killed with its children.

    Returns:
        per command {"code", "output": its end}; after a timeout the code is None and "timeout" is
        True.
    """

    def one(entry: dict) -> dict:
        process = subprocess.Popen(
            entry["command"],
            env={**os.environ, **entry.get("environment", {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=args["seconds"])
            return {"code": process.returncode, "output": output[-20000:]}
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return {"code": None, "output": output[-20000:], "timeout": True}

    with ThreadPoolExecutor(len(args["commands"])) as executor:
        return list(executor.map(one, args["commands"]))


_ACTIONS = (
    collect_facts,
    clock,
    listen,
    close,
    connect,
    write_probe_file,
    read_probe_file,
    remove_probe_file,
    run,
)
ACTIONS = {action.__name__: action for action in _ACTIONS}


def main() -> int:
    """Answer requests until the input ends."""
    keep_exit_codes()
    serve(ACTIONS)
    return 0


def serve(actions: dict[str, Callable[[dict], object]], idle_timeout: float | None = None) -> None:
    """Answer requests until the input ends, or until `idle_timeout` seconds without a request."""
    # The login shell may have printed an incomplete line (a prompt, a terminal title).
    print("\n" + MARK + json.dumps({"hello": os.getpid()}), flush=True)
    partial = b""
    while True:
        if idle_timeout is not None and not select.select([0], [], [], idle_timeout)[0]:
            return
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        *lines, partial = (partial + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"value": actions[request["do"]](request.get("args", {}))}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(MARK + json.dumps({"id": request["id"], **answer}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
