"""The watcher's agent on a node: reports how the node's ranks stand, starts torchrun there, stops what is of the run.

Whatever it touches carries the launch's id in its command line or environment. When the head is gone (its input ends,
or nothing is asked for IDLE_TIMEOUT seconds) and no other agent takes over, it ends the node's part of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

from mmldlm.launch import state_files as state_files
from mmldlm.launch.rank_wrapper import LAUNCH_ID_VAR, launch_file, state_file
from mmldlm.preflight.remote.agent import ACTIONS, serve
from mmldlm.preflight.remote.connections import port_owner

IDLE_TIMEOUT = 25.0
RECONNECT_GRACE = 10.0  # seconds for another agent to take over, after a broken session
_launches: set[str] = set()
_children: list[subprocess.Popen] = []
_reserved: list[socket.socket] = []


def prepare(args: dict) -> None:
    """Write the launch file of this node's ranks: args["values"] as rank.py reads them.

    Raises:
        OSError: no folder on this node takes it.
    """
    launch, failures = args["launch"], []
    _launches.add(launch)
    state_files.make_folders(launch)
    folders = state_files.state_folders(launch)
    for folder in folders:  # into each: a batch job may see another /tmp than this ssh session
        try:
            state_files.write(folder, launch_file(socket.gethostname()), json.dumps(args["values"]))
        except OSError as error:
            failures.append(f"{folder}: {error.strerror}")
    if len(failures) == len(folders):
        raise OSError("no folder for the launch file: " + (", ".join(failures) or ", ".join(state_files.ROOTS)))


def reserve(args: dict) -> dict:
    """Hold args["port"] for a launch while this agent lives: {} or {"error", "holder"}.

    The port itself is rank 0's. Two launches that start together would both find it free, and the ranks of one would
    join the other's process group; an abstract socket of that name, which the kernel gives once per host, tells them.
    """
    port = args["port"]
    if port is None:  # not the first node
        return {}
    name, probe = socket.socket(socket.AF_UNIX), socket.socket()
    try:
        name.bind(f"\0mmldlm_master_port_{port}")
    except OSError:
        name.close()
        return {"error": "reserved by another `mmldlm launch`", "holder": None}
    _reserved.append(name)
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            return {"error": error.strerror, "holder": port_owner(port)}
    return {}


def launch_processes(launch: str) -> list[int]:
    """Processes of this node that belong to a launch, this agent and its ancestors left out."""
    kept, pid = set(), os.getpid()
    while pid > 0:
        kept.add(pid)
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(") ")[2].split()[1])
        except OSError:
            break
    token, found = f"{LAUNCH_ID_VAR}={launch}".encode(), []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in kept:
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                if file.read().rpartition(") ")[2][0] == "Z":
                    continue
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                ours = launch.encode() in file.read()
            if not ours:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    ours = token in file.read().split(b"\0")
        except OSError:
            continue  # it ended, or belongs to another user
        if ours:
            found.append(int(entry))
    return found


def _parent(pid: int) -> int | None:
    """Parent of a living process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent, *_ = file.read().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def watch(args: dict) -> dict:
    """{"ranks": states of the node's ranks, "processes": number of the launch's, "ended": statuses of torchrun}.

    A rank is "alive" while rank.py is; "orphan" when the launcher that started it is gone. The launch file, which may
    hold keys, is deleted as soon as args["slots"] ranks have read it.
    """
    launch = args["launch"]
    _launches.add(launch)
    ranks, host = [], socket.gethostname()
    state_files.make_folders(launch)
    state_files.write_anywhere(launch, _watched(host), json.dumps([os.getpid(), time.monotonic()]))
    # Processes first and states last: what ended in between must not seem to have ended without a status.
    processes = len(launch_processes(launch))
    pattern = state_file(host, "*")
    for name, state in state_files.read_newest(launch, pattern).items():
        parent = _parent(state["pid"]) if state["exit"] is None else None
        if parent is None:
            state = state_files.read_newest(launch, name).get(name, state)
        state["alive"], state["orphan"] = parent is not None, parent not in (None, state["parent"])
        ranks.append(state)
    if len(ranks) == args.get("slots"):
        state_files.remove(launch, launch_file(host))
    ended = [child.returncode for child in _children if child.poll() is not None]
    return {"ranks": ranks, "processes": processes, "ended": ended}


def _watched(host: str) -> str:
    return f"{host}_watched.json"


def start(args: dict) -> int:
    """Start a launcher on this node (torchrun) with its output in args["log"]; its pid."""
    _launches.add(args["launch"])
    with open(args["log"], "ab") as log:
        environment = {**os.environ, **args["environment"]}
        child = subprocess.Popen(
            args["command"], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    _children.append(child)
    return child.pid


def signal_ranks(args: dict) -> int:
    """Send args["signal"] to train.py of every rank here (a request to save and end); how many there were."""
    states = [state for state in watch(args)["ranks"] if state["alive"]]
    for state in states:
        with contextlib.suppress(OSError):
            os.kill(state["child"], getattr(signal, args["signal"]))
    return len(states)


def stop(args: dict) -> int:
    """End all processes of the launch here: SIGTERM, and SIGKILL after args["grace"] seconds. How many there were."""
    pids = launch_processes(args["launch"])
    _send(pids, signal.SIGTERM)
    deadline = time.monotonic() + args["grace"]
    while time.monotonic() < deadline and launch_processes(args["launch"]):
        time.sleep(0.1)
    for _ in range(20):  # a killed launcher may have started another meanwhile
        left = launch_processes(args["launch"])
        if not left:
            break
        _send(left, signal.SIGKILL)
        time.sleep(0.05)
    return len(pids)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def release(args: dict) -> None:
    """Delete all that this host's agent and ranks wrote of a launch that is over."""
    launch = args["launch"]
    _launches.discard(launch)
    _release()
    state_files.remove(launch, f"{socket.gethostname()}_*")
    state_files.remove_folders(launch)


def _release() -> None:
    """Give reserved ports back: a retry may be next, before this agent has ended."""
    while _reserved:
        _reserved.pop().close()


def _is_superseded(launch: str) -> bool:
    """Whether another agent of this node watches the launch, or starts to within RECONNECT_GRACE seconds."""
    name, deadline = _watched(socket.gethostname()), time.monotonic() + RECONNECT_GRACE
    while time.monotonic() < deadline:
        pid, when = state_files.read_newest(launch, name).get(name, (os.getpid(), 0.0))
        if pid != os.getpid() and time.monotonic() - when < RECONNECT_GRACE:
            return True
        if not launch_processes(launch):
            return False
        time.sleep(0.2)
    return False


def main() -> int:
    """Serve; then, if a launch is still watched, its head is gone: end the node's part of it."""
    own = (prepare, reserve, watch, start, signal_ranks, stop, release)
    actions = {**ACTIONS, **{action.__name__: action for action in own}}
    try:
        serve(actions, IDLE_TIMEOUT)
    finally:
        _release()
        for launch in list(_launches):
            if not _is_superseded(launch):
                stop({"launch": launch, "grace": 3})
                release({"launch": launch})
    return 0


if __name__ == "__main__":
    sys.exit(main())
