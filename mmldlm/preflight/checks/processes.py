"""Leftovers of earlier runs on a node: ranks, locks of builds, build caches.

They are reported, never killed or deleted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from mmldlm.preflight.check import Results, check, fail, ok, warn
from mmldlm.preflight.checks.storage import file_system
from mmldlm.preflight.context import Context

NETWORK_FILE_SYSTEMS = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "fuse.",
    "9p",
    "wekafs",
)
# Parts of the command line of a rank or launcher of this project.
_MARKS = (
    "mmldlm/train.py",
    "mmldlm.train",
    "deepspeed.launcher.launch",
    # A rank of a script of the user's own, under `mmldlm launch`.
    "mmldlm/launch/rank_wrapper.py",
)
_BUILDERS = ("ninja", "nvcc", "cc1plus", "g++", "c++", "clang")
STALE_SECONDS = 60


def processes(args: dict) -> list[dict]:
    """Return the ranks and launchers of a run on this node, without ancestors of this process."""
    import psutil

    this = psutil.Process()
    ancestors = {this.pid, *(parent.pid for parent in this.parents())}
    ranks = []
    for process in _running("uids", "username", "create_time"):
        command = " ".join(process.info["cmdline"])
        is_python = os.path.basename(process.info["cmdline"][0]).startswith("python")
        if is_python and process.pid not in ancestors and any(mark in command for mark in _MARKS):
            ranks.append(
                {
                    "pid": process.pid,
                    "user": process.info["username"],
                    # Whether this user may end it.
                    "own": os.geteuid() in (0, process.info["uids"].effective),
                    "age": round(time.time() - process.info["create_time"]),
                    "command": command[:200],
                }
            )
    return ranks


def _running(*attributes: str) -> Iterator:
    """Yield the processes of this node that have a command line; `info` has the attributes."""
    import psutil

    for process in psutil.process_iter(["cmdline", *attributes]):
        if process.info["cmdline"]:
            yield process


def locks(args: dict) -> list[dict]:
    """Return the lock files of torch's JIT builds, on which torch waits forever.

    A lock is stale if it is older than STALE_SECONDS and no compiler runs on this node.
    """
    building = any(
        os.path.basename(process.info["cmdline"][0]) in _BUILDERS for process in _running()
    )
    lock_files = []
    for path in Path(_torch_extensions()).glob("**/lock"):
        age = time.time() - path.stat().st_mtime
        lock_files.append(
            {"path": str(path), "age": round(age), "stale": age > STALE_SECONDS and not building}
        )
    return lock_files


def caches(args: dict) -> dict[str, dict]:
    """Return folder and file system of the build caches of torch and Triton."""
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")
    folders = {"TORCH_EXTENSIONS_DIR": _torch_extensions(), "TRITON_CACHE_DIR": triton}
    by_variable = {}
    for name, text in folders.items():
        folder = Path(text)
        while not folder.exists():
            folder = folder.parent
        by_variable[name] = {"folder": text, "file_system": file_system(folder)}
    return by_variable


def _torch_extensions() -> str:
    """Return the folder of torch's JIT builds."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")


def _ssh_prefix(context: Context, name: str) -> str:
    """Return the prefix of a shell command for a node."""
    return "" if context.local else f"ssh {name} "


@check("PROC001", 1, "node", "leftover ranks")
def no_leftover_ranks(context: Context) -> Results:
    """No rank or launcher of an earlier run is alive."""
    for name, ranks in context.probe_values("processes").items():
        # Only the user can distinguish a leftover from a running launch.
        for entry in ranks:
            measured = (
                f"pid {entry['pid']} of {entry['user']}, {entry['age']} s old: {entry['command']}"
            )
            fix = f"if it is a leftover: {_ssh_prefix(context, name)}kill {entry['pid']}"
            if not entry["own"]:
                fix = (
                    "another user's: check that the node has space for both, or ask"
                    f" {entry['user']} to end it"
                )
            yield warn(measured, "no other rank", fix, name)
        if not ranks:
            yield ok("none", name)


@check("JIT001", 1, "node", "build locks")
def no_stale_locks(context: Context) -> Results:
    """torch's extension cache has no lock of a killed JIT build, on which torch would wait
    forever.

    A warning without GPUs, where a run builds nothing but what its own task builds.
    """
    report = fail if context.has_gpus() else warn
    for name, lock_files in context.probe_values("locks").items():
        stale = [entry for entry in lock_files if entry["stale"]]
        for entry in stale:
            measured = f"{entry['path']}, {entry['age']} s old, without a running compiler"
            yield report(
                measured,
                "no lock without its build",
                f"{_ssh_prefix(context, name)}rm {entry['path']}",
                name,
            )
        if not stale:
            yield ok("none", name)


@check("JIT002", 1, "node", "build caches")
def caches_are_local(context: Context) -> Results:
    """torch and Triton compile to a local disk; on a shared one, the ranks of all nodes race for
    the cache.
    """
    for name, by_variable in context.probe_values("caches").items():
        shared = {
            k: v
            for k, v in by_variable.items()
            if v["file_system"].startswith(NETWORK_FILE_SYSTEMS)
        }
        for variable, cache in shared.items():
            measured = f"{cache['folder']} is on {cache['file_system']}"
            yield warn(
                measured,
                "a local disk",
                f"export {variable}=/tmp/$USER/{variable.lower()} (propagated: ENV002)",
                name,
            )
        if not shared:
            yield ok("local", name)
