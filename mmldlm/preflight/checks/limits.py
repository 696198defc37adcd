"""Limits of a process on a node: locked memory, open files, /dev/shm, temporary files, memory."""

from __future__ import annotations

import os
import resource
from typing import Any

from mmldlm.preflight.check import Results, check, fail, ok, skip, warn
from mmldlm.preflight.checks.storage import probe_file
from mmldlm.preflight.context import Context
from mmldlm.preflight.memory_model import GIB
from mmldlm.utils import resources
from mmldlm.utils.formatting import describe_os_error, format_bytes

# Bytes of /dev/shm for gloo and dataloader workers; with GPUs as many for each rank, for NCCL.
SHM_NEEDED = GIB // 2
# For libraries and shards, and for sockets to each rank.
NOFILE_MIN, NOFILE_PER_RANK = 512, 16
# With GPUs, for NCCL channels and pipes of workers.
NOFILE_GPU = 4096
# Memory that GPUDirect and InfiniBand register (limit of Primus).
MEMLOCK_NEEDED = 32 * GIB
# For state files, sockets, and files of a compiler.
TEMPORARY_BYTES = 1 << 20


def limits(args: dict) -> dict:
    """Return the limits of a rank (-1: unlimited), which raises that of open files to the hard
    one, and the space of /dev/shm in bytes.
    """
    facts: dict[str, Any] = {
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    }
    try:
        shm = os.statvfs("/dev/shm")
        facts["shm_total"] = shm.f_blocks * shm.f_frsize
        facts["shm_free"] = shm.f_bavail * shm.f_frsize
        with probe_file("/dev/shm") as probe:
            probe.write_bytes(b"x")
    except OSError as error:
        facts["shm_error"] = error.strerror
    return facts


def temporary(args: dict) -> dict:
    """Test whether TEMPORARY_BYTES can be written to the folder for temporary files.

    tempfile.gettempdir() would silently skip a full folder, unlike compilers and shells.
    """
    candidates = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    folder = next((name for name in candidates if os.path.isdir(name)), "/tmp")
    facts: dict[str, Any] = {"folder": folder, "bytes": TEMPORARY_BYTES}
    try:
        space = os.statvfs(folder)
        facts["free"] = space.f_bavail * space.f_frsize
        with probe_file(folder) as probe:
            probe.write_bytes(bytes(TEMPORARY_BYTES))
    except OSError as error:
        facts["error"] = describe_os_error(error)
    return facts


def memory(args: dict) -> dict:
    """Return the memory in bytes and the cores of this process, within the limits of its container
    or job.
    """
    return {**resources.memory()._asdict(), "cores": resources.available_cpus()}


@check("LIM001", 1, "node", "/dev/shm")
def shared_memory(context: Context) -> Results:
    """/dev/shm is writable and large enough for gloo, NCCL and workers."""
    for name, facts in context.probe_values("limits").items():
        needed = SHM_NEEDED * (context.slots(name) if context.has_gpus() else 1)
        fix = (
            "docker run --shm-size=16g (Kubernetes: emptyDir, medium Memory), or mount -o"
            " remount,size=50% /dev/shm"
        )
        if "shm_error" in facts:
            yield fail(f"/dev/shm: {facts['shm_error']}", "a writable /dev/shm", fix, name)
        elif facts["shm_free"] < needed:
            measured = (
                f"{format_bytes(facts['shm_free'])} free of {format_bytes(facts['shm_total'])}"
            )
            yield fail(measured, f"at least {format_bytes(needed)} free", fix, name)
        else:
            yield ok(f"{format_bytes(facts['shm_free'])} free", name)


@check("LIM002", 1, "node", "locked memory")
def locked_memory(context: Context) -> Results:
    """Locked memory is unlimited on nodes with GPUs, as InfiniBand and GPUDirect require."""
    for name, facts in context.probe_values("limits").items():
        limit = facts["memlock"]
        if not (context.value(name, "gpus") or {}).get("gpus"):
            yield skip("no GPU: no memory is registered", name)
        elif limit != -1 and limit < MEMLOCK_NEEDED:
            fix = "ulimit -l unlimited (docker run --ulimit memlock=-1; /etc/security/limits.conf)"
            yield warn(format_bytes(limit), "unlimited", fix, name)
        else:
            yield ok("unlimited" if limit == -1 else format_bytes(limit), name)


@check("LIM003", 1, "node", "open files")
def open_files(context: Context) -> Results:
    """A rank may open enough files: sockets to all ranks, shards, pipes of workers.

    It raises its soft limit, usually 1024, to the hard one, which is judged. With GPUs, less than
    4096 warns.
    """
    minimum = NOFILE_MIN + NOFILE_PER_RANK * context.world_size
    recommended = max(minimum, NOFILE_GPU) if context.has_gpus() else minimum
    for name, facts in context.probe_values("limits").items():
        if facts["nofile"] != -1 and facts["nofile"] < recommended:
            fix = f"raise the hard limit to {recommended}: nofile in /etc/security/limits.conf"
            if not context.local:
                fix += ", or LimitNOFILE of the ssh service"
            result = fail if facts["nofile"] < minimum else warn
            measured = f"nofile {facts['nofile']} (ulimit -Hn)"
            yield result(measured, f"at least {recommended}", fix, name)
        else:
            yield ok(f"nofile {facts['nofile']}", name)


@check("LIM004", 1, "node", "temporary files")
def temporary_files(context: Context) -> Results:
    """A file can be written to the folder for temporary files (TMPDIR, else /tmp): state files,
    sockets, builds.
    """
    for name, facts in context.probe_values("temporary").items():
        if "error" in facts:
            measured = f"{facts['folder']}: {facts['error']}"
            if "free" in facts:
                measured += f" ({format_bytes(facts['free'])} free)"
            fix = (
                f"free some space in {facts['folder']} on {name}, or set TMPDIR there to another"
                " folder"
            )
            yield fail(measured, f"{format_bytes(facts['bytes'])} of writable space", fix, name)
        else:
            yield ok(f"{facts['folder']}, {format_bytes(facts['free'])} free", name)
