"""The cluster itself: hosts of their own that log in to one another, and nothing left when it is
taken down.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.virtual_cluster import VirtualCluster, reason_to_skip, sh


def test_hosts_are_separate_and_leave_nothing(tmp_path):
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    links, mounts = sh("ip", "-o", "link"), Path("/proc/self/mounts").read_text(encoding="utf-8")
    with VirtualCluster(tmp_path / "two", num_hosts=2) as cluster:
        n1, n2 = cluster.hosts
        done = n1.run(
            "ssh",
            "-o",
            "BatchMode=yes",
            "n2",
            "hostname; hostname -I; ls /proc | grep -c '^[0-9]'",
        )
        name, address, processes = done.stdout.split()
        assert (done.returncode, name, address) == (0, "n2", n2.address) and int(processes) < 20
        with n2.tmpfs("/dev/shm", "size=1m"), n2.process("sleep", "1000") as child:
            assert "1.0M" in n2.sh("df", "-h", "/dev/shm") and "1.0M" not in n1.sh(
                "df", "-h", "/dev/shm"
            )
            assert child.poll() is None
        pids = [host.pid for host in cluster.hosts]
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert (sh("ip", "-o", "link"), Path("/proc/self/mounts").read_text(encoding="utf-8")) == (
        links,
        mounts,
    )
