"""Processes of this host, read from /proc; standard library only, because the preflight agent uses
it.

Every reader returns None where the process has exited or the system has no /proc.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProcessStat:
    """Selected fields of /proc/PID/stat (proc(5)).

    Attributes:
        state: one letter, Z for a zombie.
        parent: PID of the parent.
        cpu_ticks: user and system time in clock ticks.
        start_time: clock ticks after boot; with the PID it identifies a process.
    """

    state: str
    parent: int
    cpu_ticks: int
    start_time: str


def read_stat(pid: int | str) -> ProcessStat | None:
    """Read /proc/PID/stat."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(") ")[2].split()
        return ProcessStat(
            fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), fields[19]
        )
    except (OSError, IndexError, ValueError):
        return None


def read_command(pid: int | str) -> list[str] | None:
    """Read the arguments of a process from /proc/PID/cmdline."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return None


def list_pids() -> list[int]:
    """Return the PIDs of all visible processes."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def list_ancestors(pid: int) -> set[int]:
    """Return the PIDs of a process and of all its ancestors."""
    found: set[int] = set()
    while pid > 0:
        found.add(pid)
        stat = read_stat(pid)
        pid = 0 if stat is None else stat.parent
    return found


def set_parent_death_signal(number: signal.Signals) -> None:
    """Ask the kernel to send `number` to this process when its parent exits (prctl(2)); Linux
    only.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
