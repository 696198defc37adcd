"""Identity, versions, code, limits, memory and environment of a node."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from mmldlm.cluster.env_propagation import PREFIXES
from mmldlm.utils import resources
from mmldlm.utils.formatting import describe_os_error

PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "pydantic", "mpi4py", "mmldlm")
TEMPORARY_BYTES = 1 << 20  # state files, sockets, files of a compiler


def identity(args: dict) -> dict:
    """Return the identity of the machine: two names of it share the boot id and the namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    spaces = [
        os.readlink(f"/proc/self/ns/{kind}")
        for kind in ("net", "pid", "uts")
        if Path("/proc/self/ns").is_dir()
    ]
    return {
        "hostname": socket.gethostname(),
        "machine": "/".join(
            [
                boot.read_text(encoding="utf-8").strip() if boot.exists() else platform.node(),
                *spaces,
            ]
        ),
        "uptime": float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        if Path("/proc/uptime").exists()
        else None,
        "user": os.environ.get("USER") or str(os.getuid()),
        "time": time.time(),
    }


def versions(args: dict) -> dict:
    """Return package versions from pip's metadata: importing torch takes seconds."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {
        "packages": found,
        "kernel": platform.release(),
        "nccl": _nccl_version(),
        "machine": platform.machine(),
    }


def _nccl_version() -> str | None:
    """Return the version of the NCCL library that torch's wheels load; None without it."""
    import ctypes

    for folder in sys.path:
        for library in Path(folder or ".").glob("nvidia/nccl/lib/libnccl.so.2"):
            number = ctypes.c_int()
            if ctypes.CDLL(str(library)).ncclGetVersion(ctypes.byref(number)) == 0:
                return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return None


def code(args: dict) -> dict:
    """Return the folder of mmldlm, a hash of its sources, and the git commit if known."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(
            path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    commit = None
    if shutil.which("git"):
        done = subprocess.run(
            ["git", "-C", package.parent, "rev-parse", "HEAD"], capture_output=True, text=True
        )
        commit = done.stdout.strip() or None if done.returncode == 0 else None
    return {"folder": str(package), "sources": digest.hexdigest()[:16], "commit": commit}


def limits(args: dict) -> dict:
    """Return the soft limits that a rank would inherit (-1: unlimited), and the space of /dev/shm
    in bytes.
    """
    found = {
        name: resource.getrlimit(number)[0]
        for name, number in (
            ("memlock", resource.RLIMIT_MEMLOCK),
            ("nofile", resource.RLIMIT_NOFILE),
        )
    }
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as error:
        return {
            **found,
            "shm_total": 0,
            "shm_free": 0,
            "shm_writable": False,
            "shm_error": error.strerror,
        }
    found["shm_total"], found["shm_free"] = (
        shm.f_blocks * shm.f_frsize,
        shm.f_bavail * shm.f_frsize,
    )
    probe = Path("/dev/shm") / f".mmldlm_preflight_{os.getpid()}"
    try:
        probe.write_bytes(b"x")
        found["shm_writable"] = True
    except OSError as error:
        found["shm_writable"], found["shm_error"] = False, error.strerror
    finally:
        with contextlib.suppress(OSError):  # fails on a read-only file system
            probe.unlink(missing_ok=True)
    return found


def temporary(args: dict) -> dict:
    """Test whether TEMPORARY_BYTES can be written to the folder for temporary files.

    tempfile.gettempdir() would silently skip a full folder, unlike compilers and shells.
    """
    candidates = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    folder = next((name for name in candidates if os.path.isdir(name)), "/tmp")
    found = {"folder": folder, "bytes": TEMPORARY_BYTES}
    probe = Path(folder) / f".mmldlm_preflight_{os.uname().nodename}_{os.getpid()}"
    try:
        space = os.statvfs(folder)
        found["free"] = space.f_bavail * space.f_frsize
        with open(probe, "wb") as file:
            file.write(bytes(TEMPORARY_BYTES))
    except OSError as error:
        found["error"] = describe_os_error(error)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return found


def memory(args: dict) -> dict:
    """Return the memory in bytes and the cores of this process, within the limits of its container
    or job.
    """
    found = resources.memory()
    return {
        "total": found.total,
        "available": found.available,
        "cores": resources.available_cpus(),
    }


def environment(args: dict) -> dict:
    """Return the variables relevant to a run, in a process that ssh started on this node."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
