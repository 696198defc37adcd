"""The agent that preflight starts on every node: `python -m mmldlm.preflight.remote.agent`, one JSON request a line.

Each answer stands behind MARK, so that what a login shell prints cannot be taken for one. The agent ends when its input
does: a head that dies leaves nothing behind.
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

MARK = "@mmldlm "


def collect_facts(args: dict) -> dict:
    """Run the named probes at the same time, each in a child with its time limit."""
    jobs = {}
    for name in args["probes"]:
        function, seconds = PROBES[name]
        jobs[name] = (lambda function=function: function(args), seconds)
    return run_with_timeout(jobs)


def clock(args: dict) -> float:
    """This node's time, seconds since 1970."""
    return time.time()


def write_probe_file(args: dict) -> dict:
    """Write (args["text"] given) or read args["path"], for the proof that a folder is shared."""

    def work():
        if "text" in args:
            with open(args["path"], "w", encoding="utf-8") as file:
                file.write(args["text"])
                file.flush()
                os.fsync(file.fileno())
            return args["text"]
        deadline = time.monotonic() + args.get("wait", 3.0)
        while True:
            try:
                os.listdir(os.path.dirname(args["path"]))  # makes NFS look again
                with open(args["path"], encoding="utf-8") as file:
                    return file.read()
            except OSError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.1)

    return run_with_timeout({"token": (work, 10)})["token"]


def remove(args: dict) -> None:
    """Delete a token file."""
    if os.path.basename(args["path"]).startswith(".mmldlm_preflight_") and os.path.exists(args["path"]):
        os.unlink(args["path"])


def run(args: dict) -> list[dict]:
    """Run args["commands"] ([{"command", "environment"}]) side by side, at most args["seconds"]; status and last output
    of each. Who runs out of time is killed with all that it started."""

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

    with ThreadPoolExecutor(len(args["commands"])) as pool:
        return list(pool.map(one, args["commands"]))


ACTIONS = {
    action.__name__: action for action in (collect_facts, clock, listen, close, connect, write_probe_file, remove, run)
}  # fmt: skip


def main() -> int:
    """Answer requests until the input ends."""
    serve(ACTIONS)
    return 0


def serve(actions: dict[str, Callable[[dict], object]], lease: float | None = None) -> None:
    """Answer requests until the input ends, or until none has come for `lease` seconds."""
    # The login shell may have left a line without its end (a prompt, a terminal's title).
    print("\n" + MARK + json.dumps({"hello": os.getpid()}), flush=True)
    waiting = b""
    while True:
        if lease is not None and not select.select([0], [], [], lease)[0]:
            return
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        *lines, waiting = (waiting + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"value": actions[request["do"]](request.get("args", {}))}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(MARK + json.dumps({"id": request["id"], **answer}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
