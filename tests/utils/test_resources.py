"""CPUs and memory of a process in control groups of both versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from mmldlm.errors import UserError
from mmldlm.utils import resources

MIB = 1 << 20
HOST = "MemTotal: 65536000 kB\nMemFree: 1 kB\nMemAvailable: 60000000 kB\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """write(own groups, {file: text}) makes the control groups of a machine of 64 GB and
    16 CPUs.
    """
    mount = tmp_path / "cgroup"
    texts = {"/proc/meminfo": HOST}
    real = Path.read_text

    def read(self, *args, **more):
        return texts[str(self)] if str(self) in texts else real(self, *args, **more)

    def write(own: str, files: dict[str, str]) -> None:
        texts["/proc/self/cgroup"] = own
        for name, text in files.items():
            (mount / name).parent.mkdir(parents=True, exist_ok=True)
            (mount / name).write_text(text + "\n")

    monkeypatch.setattr(resources, "_MOUNT", mount)
    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    mount.mkdir()
    return write


STAT = (
    f"anon 1\ninactive_file {300 * MIB}\nactive_file {100 * MIB}\nslab_reclaimable"
    f" {50 * MIB}\nshmem {40 * MIB}"
)
STAT_1 = (
    f"inactive_file 1\nactive_file 1\ntotal_inactive_file {300 * MIB}\ntotal_active_file"
    f" {150 * MIB}"
)


@pytest.mark.parametrize(
    ("own", "files", "total", "available"),
    [
        ("0::/", {}, 64000, 58593),
        (
            "0::/",
            {"memory.max": f"{1000 * MIB}", "memory.current": f"{900 * MIB}", "memory.stat": STAT},
            1000,
            550,
        ),
        (
            "0::/a/b",
            {
                "a/memory.max": f"{500 * MIB}",
                "a/memory.current": f"{100 * MIB}",
                "a/b/memory.max": "max",
            },
            500,
            400,
        ),
        (
            "0::/a/b",
            {
                "a/memory.max": f"{500 * MIB}",
                "a/memory.current": "0",
                "a/b/memory.max": f"{200 * MIB}",
                "a/b/memory.current": f"{150 * MIB}",
            },
            200,
            50,
        ),
        # of the host
        ("0::/gone/elsewhere", {"memory.max": f"{300 * MIB}", "memory.current": "0"}, 300, 300),
        ("0::/../other", {"memory.max": f"{300 * MIB}", "memory.current": "0"}, 300, 300),
        (
            "3:cpu:/\n2:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": f"{800 * MIB}",
                "memory/job/memory.stat": STAT_1,
                "memory/job/memory.usage_in_bytes": f"{700 * MIB}",
            },
            800,
            550,
        ),
        (
            "2:memory:/",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "5",
            },
            64000,
            58593,
        ),
        ("", {}, 64000, 58593),
    ],
)
def test_memory_is_that_of_the_smallest_limit_without_cache(machine, own, files, total, available):
    machine(own, files)
    assert [value // MIB for value in resources.memory()] == [total, available]


def test_the_limit_of_addresses_is_one_of_memory(machine, monkeypatch):
    """`ulimit -v`, of which this process has taken a part."""
    machine("0::/", {})
    monkeypatch.setattr(resources.resource, "getrlimit", lambda kind: (1 << 40, 1 << 41))
    assert resources.memory().total == 64000 * MIB
    monkeypatch.setattr(resources.resource, "getrlimit", lambda kind: (30000 * MIB, 1 << 41))
    total, available = resources.memory()
    assert total == 30000 * MIB and 0 < available < total


def test_memory_that_is_not_free_is_refused_before_it_is_taken(machine):
    machine("0::/", {"memory.max": f"{1000 * MIB}", "memory.current": f"{900 * MIB}"})
    resources.require_memory(100 * MIB, "a table", "cut it")
    with pytest.raises(
        UserError, match=r"101.0 MiB of free memory for a table\s+found: 100.0 MiB"
    ):
        resources.require_memory(101 * MIB, "a table", "cut it")


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/", {}, 16),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "3200000 100000"}, 16),
        (
            "4:cpu,cpuacct:/j",
            {
                "cpu,cpuacct/j/cpu.cfs_quota_us": "200000",
                "cpu,cpuacct/j/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        (
            "4:cpu,cpuacct:/",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            16,
        ),
    ],
)
def test_cpus_are_those_of_the_affinity_and_of_the_smallest_quota(machine, own, files, expected):
    machine(own, files)
    assert resources.available_cpus() == expected
    assert resources.threads_per_rank(3) == max(expected // 3, 1)


FRAGMENTED = """
from mmldlm.utils.resources import release_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

kept, freed = zip(*((b"k" * (1000 + i % 7), b"f" * 100_000) for i in range(2000)))
full = resident()
del freed  # 200 MB, between objects that stay
before = resident()
release_freed_memory()
print(full - before, full - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_freed_memory_goes_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", FRAGMENTED], capture_output=True, text=True)
    freed, released = map(int, done.stdout.split())
    assert freed < 50e6 and released > 150e6
