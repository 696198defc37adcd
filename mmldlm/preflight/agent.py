"""The agent that preflight starts on every node: `python -m mmldlm.preflight.agent`, one JSON request a line.

Each answer stands behind MARK, so that what a login shell prints cannot be taken for one. The agent ends when its input
does: a head that dies leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mmldlm.preflight.limited import run_limited
from mmldlm.preflight.probes import PROBES

MARK = "@mmldlm "
CONNECT_SECONDS = 3.0
_listening: list[socket.socket] = []


def facts(args: dict) -> dict:
    """Run the named probes at the same time, each in a child with its time limit."""
    jobs = {}
    for name in args["probes"]:
        function, seconds = PROBES[name]
        jobs[name] = (lambda function=function: function(args), seconds)
    return run_limited(jobs)


def clock(args: dict) -> float:
    """This node's time, seconds since 1970."""
    return time.time()


def listen(args: dict) -> dict:
    """Open listening sockets for the others to reach: args["ports"] (0: any), kept until close.

    A port that cannot be had is answered with {"error", "holder"}.
    """
    found = []
    for port in args["ports"]:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # As torch's store binds it: a port in TIME_WAIT from the last run is free.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen(256)
        except OSError as error:
            server.close()
            found.append({"port": port, "error": error.strerror, "holder": holder_of(port)})
            continue
        _listening.append(server)
        found.append({"port": server.getsockname()[1]})
    return {"ports": found}


def close(args: dict) -> None:
    """Close all listening sockets."""
    while _listening:
        _listening.pop().close()


def connect(args: dict) -> list[dict]:
    """Connect to each (address, port) of args["to"]; the kernel of the other side completes the handshake."""

    def attempt(target):
        started = time.perf_counter()
        try:
            with socket.create_connection((target[0], target[1]), timeout=CONNECT_SECONDS):
                return {"ms": round((time.perf_counter() - started) * 1000, 2)}
        except OSError as error:
            return {"error": error.strerror or str(error) or type(error).__name__}

    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(attempt, args["to"]))


def token(args: dict) -> dict:
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

    return run_limited({"token": (work, 10)})["token"]


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


def holder_of(port: int) -> dict | None:
    """pid, user and command of who listens on a TCP port here, as far as this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        inodes |= {row[9] for row in rows if int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A"}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and wanted & set(_open_files(entry)):
            with contextlib.suppress(OSError), open(f"/proc/{entry}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
                return {"pid": int(entry), "command": command[:160]}
    return None


def _open_files(pid: str):
    """What a process has open, as far as this user may look."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                yield os.readlink(f"/proc/{pid}/fd/{fd}")


ACTIONS = {
    action.__name__: action for action in (facts, clock, listen, close, connect, token, remove, run)
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
