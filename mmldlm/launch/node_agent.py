"""Per-node agent of the watcher: report rank states, start torchrun, terminate the run's
processes.

It touches only processes with the launch id in their command line or environment. If the head is
gone (end of input, or no request for IDLE_TIMEOUT seconds) and no other agent takes over, it stops
the node's part of the run.
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

import psutil

from mmldlm.cluster import connections
from mmldlm.cluster.agent import serve
from mmldlm.launch import state_files
from mmldlm.launch.rank_wrapper import (
    LAUNCH_ID_VAR,
    heartbeat_file,
    launch_file,
    state_file,
)
from mmldlm.utils.stop_signals import keep_exit_codes

IDLE_TIMEOUT = 25.0
# Seconds for another agent to take over after a broken session.
RECONNECT_GRACE = 10.0
_launches: set[str] = set()
_children: list[subprocess.Popen] = []
_reserved: list[socket.socket] = []
_gone: dict[int, float] = {}  # pid of a wrapper -> when it was first missed, without a status


def write_launch_file(args: dict) -> None:
    """Write the launch file of this node's ranks: args["values"], for rank_wrapper.py.

    Raises:
        OSError: it cannot be written to any folder on this node.
    """
    launch, failures = args["launch"], []
    _launches.add(launch)
    state_files.make_folders(launch)
    folders = state_files.state_folders(launch)
    for folder in folders:
        # Into each of them: a batch job may have another /tmp than this ssh session.
        try:
            state_files.write(
                folder, launch_file(socket.gethostname()), json.dumps(args["values"])
            )
        except OSError as error:
            failures.append(f"{folder}: {error.strerror}")
    if len(failures) == len(folders):
        raise OSError(
            "no folder for the launch file: "
            + (", ".join(failures) or ", ".join(state_files.ROOTS))
        )


def reserve_port(args: dict) -> dict:
    """Reserve args["port"] for a launch while this agent lives; return {}, or what
    `connections.listen` says of the port: {"error"} and more of one that cannot be used.

    The port itself is for rank 0. Two simultaneous launches would both find it free, and their
    ranks would join one process group. An abstract socket with the port in its name, unique per
    host, prevents that.
    """
    port = args["port"]
    if port is None:
        # Only the first node gets a port.
        return {}
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0mmldlm_master_port_{port}")
    except OSError:
        lock.close()
        return {"error": "reserved by another `mmldlm launch`", "holder": None}
    _reserved.append(lock)
    (found,) = connections.listen({"ports": [port]})["ports"]
    connections.close({})
    return found


def launch_processes(launch: str) -> list[int]:
    """Return the processes of a launch on this node, without this agent and its ancestors."""
    this = psutil.Process()
    excluded = {this.pid, *(parent.pid for parent in this.parents())}
    return [
        process.pid
        for process in psutil.process_iter()
        if process.pid not in excluded and _belongs_to(process, launch)
    ]


def _belongs_to(process: psutil.Process, launch: str) -> bool:
    """Return whether a running process has the launch id in its command line or environment."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        in_command = any(launch in word for word in process.cmdline())
        return in_command or process.environ().get(LAUNCH_ID_VAR) == launch
    except psutil.Error:
        # The process has exited, or belongs to another user.
        return False


def _parent(pid: int) -> int | None:
    """Return the parent of a running process; None if it has exited."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.ppid()
    except psutil.Error:
        return None


def report_ranks(args: dict) -> dict:
    """Return {"ranks": rank states, "processes": number of the launch's processes, "ended":
    statuses of torchrun}.

    A rank is "alive" while its wrapper runs, and "orphan" if its launcher has ended; "heartbeat"
    is the last one of a script that sends them, or None. A wrapper that was killed wrote no status
    and no "ended", which is then when it was first missed. The launch file, which may contain
    secrets, is deleted once args["slots"] ranks have read it.
    """
    launch = args["launch"]
    _launches.add(launch)
    ranks, host = [], socket.gethostname()
    state_files.make_folders(launch)
    state_files.write_anywhere(
        launch, _watched_file(host), json.dumps([os.getpid(), time.monotonic()])
    )
    # Processes are read first and states last: a rank that ends in between must not seem to have
    # ended without a status.
    num_processes = len(launch_processes(launch))
    heartbeats = state_files.read_newest(launch, heartbeat_file(host, "*"))
    for name, state in state_files.read_newest(launch, state_file(host, "*")).items():
        parent = _parent(state["pid"]) if state["exit"] is None else None
        if parent is None:
            state = state_files.read_newest(launch, name).get(name, state)
        state["alive"], state["orphan"] = parent is not None, parent not in (None, state["parent"])
        if state["exit"] is None and parent is None:
            state["ended"] = _gone.setdefault(state["pid"], time.time())
        state["heartbeat"] = heartbeats.get(heartbeat_file(host, state["rank"]))
        ranks.append(state)
    if len(ranks) == args.get("slots"):
        state_files.remove(launch, launch_file(host))
    ended = [child.returncode for child in _children if child.poll() is not None]
    return {"ranks": ranks, "processes": num_processes, "ended": ended}


def _watched_file(host: str) -> str:
    """Return the name of the file with the pid and the time of the agent that watches a host."""
    return f"{host}_watched.json"


def start_launcher(args: dict) -> int:
    """Start a launcher on this node (torchrun) with its output in args["log"]; return its pid."""
    _launches.add(args["launch"])
    with open(args["log"], "ab") as log:
        environment = {**os.environ, **args["environment"]}
        child = subprocess.Popen(
            args["command"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children.append(child)
    return child.pid


def signal_ranks(args: dict) -> list[int]:
    """Send args["signal"] to train.py of every rank on this node but those in args["told"]; return
    their pids.
    """
    pids = [state["child"] for state in report_ranks(args)["ranks"] if state["alive"]]
    new = [pid for pid in pids if pid not in args["told"]]
    _send(new, getattr(signal, args["signal"]))
    return new


def stop(args: dict) -> int:
    """Terminate the launch's processes: SIGTERM, SIGKILL after args["grace"] seconds; return their
    number.
    """
    pids = launch_processes(args["launch"])
    _send(pids, signal.SIGTERM)
    deadline = time.monotonic() + args["grace"]
    while time.monotonic() < deadline and launch_processes(args["launch"]):
        time.sleep(0.1)
    for _ in range(20):
        # A killed launcher may have started another process in the meantime.
        remaining = launch_processes(args["launch"])
        if not remaining:
            break
        _send(remaining, signal.SIGKILL)
        time.sleep(0.05)
    return len(pids)


def _send(pids: list[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signum)


def release(args: dict) -> None:
    """Delete all files of a finished launch on this host, and release its port."""
    launch = args["launch"]
    _launches.discard(launch)
    _release_ports()
    state_files.remove(launch, f"{socket.gethostname()}_*")
    state_files.remove_folders(launch)


def _release_ports() -> None:
    """Release reserved ports: a retry may start before this agent has exited."""
    while _reserved:
        _reserved.pop().close()


def _is_superseded(launch: str) -> bool:
    """Return whether another agent on this node takes over the launch within RECONNECT_GRACE
    seconds.
    """
    name, deadline = _watched_file(socket.gethostname()), time.monotonic() + RECONNECT_GRACE
    while time.monotonic() < deadline:
        pid, when = state_files.read_newest(launch, name).get(name, (os.getpid(), 0.0))
        if pid != os.getpid() and time.monotonic() - when < RECONNECT_GRACE:
            return True
        if not launch_processes(launch):
            return False
        time.sleep(0.2)
    return False


def main() -> int:
    """Serve requests; then stop the node's part of every launch without a head."""
    keep_exit_codes()
    actions = (
        write_launch_file,
        reserve_port,
        report_ranks,
        start_launcher,
        signal_ranks,
        stop,
        release,
    )
    try:
        serve({action.__name__: action for action in actions}, IDLE_TIMEOUT)
    finally:
        _release_ports()
        for launch in list(_launches):
            if not _is_superseded(launch):
                stop({"launch": launch, "grace": 3})
                release({"launch": launch})
    return 0


if __name__ == "__main__":
    sys.exit(main())
