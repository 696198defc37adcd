"""CPUs, memory and open files that this process may use; standard library only. As a script:
print the number of CPUs.

A container or a batch job has less than its machine: its limits stand in control groups
(cgroups(7)), of which every one from that of the process up to the root counts, and in the CPU
affinity (taskset, cpusets, Slurm).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOUNT = Path("/sys/fs/cgroup")
_CFS = ("quota", "period")  # version 1's files of the CPU limit


class Memory(NamedTuple):
    """Memory of this process in bytes: the smallest limit, and what is still free below every
    limit.
    """

    total: int
    available: int


def release_freed_memory() -> None:
    """Return the memory that this process has freed to the system, which glibc's malloc keeps.

    Batches of ever different sizes leave holes that the next ones do not fit. On a CPU, where
    tensors lie in that heap, a run of 12 million parameters came to hold 4.3 GiB with 0.3 in use,
    under the settings of malloc with which launchers/_quickstart.sh saves page faults.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let glibc's malloc keep up to 256 MiB of what this process frees.

    For work on arrays of some MiB, each of which would come from the kernel anew, page by page.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, its maximum
        mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD


def raise_open_files() -> int:
    """Raise the soft limit of open files, usually 1,024, to the hard limit, and return the one
    that holds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS has no hard limit, and refuses what its kernel cannot do
        return soft
    return hard


def available_cpus() -> int:
    """Return how many CPUs this process may use at the same time, at least 1."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for folder in _control_groups("cpu"):
        words = _read(folder / "cpu.max").split()
        quota, period = (
            words if len(words) == 2 else (_read(folder / f"cpu.cfs_{kind}_us") for kind in _CFS)
        )
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            # Not "max", not -1.
            cpus = min(cpus, int(quota) // int(period))
    return max(cpus, 1)


def threads_per_rank(num_ranks: int) -> int:
    """Return the share of each of `num_ranks` processes in the CPUs, at least 1."""
    return max(available_cpus() // num_ranks, 1)


def memory() -> Memory:
    """Return the memory of this process.

    Page cache and reclaimable kernel memory do not count as used: the kernel frees them on demand.

    Raises:
        OSError: no /proc/meminfo.
    """
    lines = dict(
        line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    )
    total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for folder in _control_groups("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            # Version 1; without a limit a number near 2^63.
            (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            ),
        ):
            limit, used = _read(folder / limit_name), _read(folder / used_name)
            if limit.isdigit():
                total = min(total, int(limit))
                if used.isdigit():
                    in_use = max(int(used) - _reclaimable(folder), 0)
                    available = min(available, max(int(limit) - in_use, 0))
    # That of `ulimit -v`.
    most_mapped, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most_mapped != resource.RLIM_INFINITY:
        mapped = int(_read(Path("/proc/self/statm")).split()[0]) * resource.getpagesize()
        total = min(total, most_mapped)
        available = min(available, max(most_mapped - mapped, 0))
    return Memory(total, min(available, total))


def require_memory(num_bytes: int, what: str, fix: str) -> None:
    """Check that memory for something is free, before it is taken: the kernel ends a process that
    takes more.

    Args:
        what: What needs it, and how it came to be so large.

    Raises:
        UserError: less is free.
    """
    # As a script, this file is started without its package.
    from mmldlm.errors import UserError
    from mmldlm.utils.formatting import format_bytes

    if num_bytes > (available := memory().available):
        raise UserError(
            f"{format_bytes(num_bytes)} of free memory for {what}",
            format_bytes(available),
            fix,
        )


def _reclaimable(folder: Path) -> int:
    """Return the bytes of a control group and its children that the kernel frees on demand."""
    values = dict(
        line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line
    )
    # In version 1 the plain names are those of the group alone, without its children.
    names = (
        (f"total_{name}", name) for name in ("inactive_file", "active_file", "slab_reclaimable")
    )
    return sum(int(values.get(total, values.get(own, 0))) for total, own in names)


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from its own to the root, of versions 1
    and 2.

    A path that does not exist belongs to the host of a container, whose own group is the root of
    its mount.
    """
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [_MOUNT, _MOUNT / "unified"]
        elif controller in controllers.split(","):
            mounts = [_MOUNT / controllers, _MOUNT / controller]
        else:
            continue
        for mount in mounts:
            own = Path(os.path.normpath(f"{mount}/{path}"))
            groups = [own, *own.parents] if own.is_relative_to(mount) else [mount]
            yield from (
                group for group in groups if group.is_relative_to(mount) and group.is_dir()
            )


def _read(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return ""


if __name__ == "__main__":
    print(available_cpus())
