"""Leftover ranks and stale build locks. They are named, never killed or deleted."""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path

from mmldlm.preflight.probes.storage import file_system

# What a rank or a launcher of this project has in its command line.
_MARKS = ("mmldlm/train.py", "mmldlm.train", "deepspeed.launcher.launch")
_BUILDERS = ("ninja", "nvcc", "cc1plus", "g++", "c++", "clang")
STALE_SECONDS = 60


def processes(args: dict) -> list[dict]:
    """Processes that look like ranks or launchers of a run, the ancestors of this one left out."""
    own = _ancestors()
    ticks, uptime = os.sysconf("SC_CLK_TCK"), float(Path("/proc/uptime").read_text().split()[0])
    found = []
    for pid, command, stat in _all():
        text = " ".join(command)
        is_python = os.path.basename(command[0]).startswith("python")
        if pid in own or not is_python or not any(mark in text for mark in _MARKS) or stat[0] == "Z":
            continue
        uid = os.stat(f"/proc/{pid}").st_uid
        try:
            user = pwd.getpwuid(uid).pw_name
        except KeyError:
            user = str(uid)
        age = uptime - int(stat[19]) / ticks
        own_user = os.geteuid() in (0, uid)  # whether this user may end it
        found.append({"pid": pid, "user": user, "own": own_user, "age": round(age), "command": text[:200]})
    return found


def locks(args: dict) -> list[dict]:
    """Lock files of torch's JIT builds; torch waits for ever while one lies there.

    A lock is stale when it is older than STALE_SECONDS and no compiler runs on this node.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions"
    )
    building = any(os.path.basename(command[0]) in _BUILDERS for _, command, _ in _all())
    found = []
    for path in Path(root).glob("**/lock"):
        age = time.time() - path.stat().st_mtime
        found.append({"path": str(path), "age": round(age), "stale": age > STALE_SECONDS and not building})
    return found


def caches(args: dict) -> dict[str, dict]:
    """Folder and file system of what torch and Triton compile at start."""
    home = os.path.expanduser("~")
    extensions = os.path.join(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache", "torch_extensions")
    folders = {
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR") or extensions,
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache",
    }
    found = {}
    for name, text in folders.items():
        folder = Path(text)
        while not folder.exists():
            folder = folder.parent
        found[name] = {"folder": text, "file_system": file_system(folder)}
    return found


def _all():
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            stat = Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if command:
            yield int(entry), command, stat


def _ancestors() -> set[int]:
    found, pid = {os.getpid()}, os.getppid()
    while pid > 0:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:
            break
    return found
