"""Limits of a node: the probe of its temporary folder, and verdicts on facts written by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mmldlm.preflight.check import FAIL, PASS, WARN
from mmldlm.preflight.checks import limits
from tests.support.preflight_context import GIB, gpu, gpus, make_context, run


def test_the_temporary_folder_is_that_of_other_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = limits.temporary({})
    assert (
        found["folder"] == str(tmp_path)
        and "error" not in found
        and list(tmp_path.iterdir()) == []
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))  # passed over by everybody
    monkeypatch.delenv("TEMP", raising=False)
    monkeypatch.delenv("TMP", raising=False)
    assert limits.temporary({})["folder"] == "/tmp"
    monkeypatch.setenv("TMPDIR", "/proc")  # nothing can be written there, root or not
    assert "error" in limits.temporary({})


def test_a_full_temporary_folder_fails_on_its_node():
    sound = {"folder": "/tmp", "free": GIB, "bytes": 1 << 20}
    full = {**sound, "folder": "/job/tmp", "free": 0, "error": "No space left on device"}
    found = run("LIM004", make_context(("a", "b"), temporary={"a": sound, "b": full}))
    assert found["a"].status == PASS and found["b"].status == FAIL and "/job/tmp" in found["b"].fix


@pytest.mark.parametrize(
    ("nofile", "slots", "entry", "status"),
    [
        (1024, 1, {}, PASS),  # what an ordinary user's login has; on a CPU that trains
        (256, 1, {}, FAIL),
        (1024, 16, {}, FAIL),  # 48 ranks
        (1024, 1, gpu(), WARN),
        (4096, 1, gpu(), PASS),
        (-1, 16, gpu(), PASS),
    ],
)
def test_open_files(nofile, slots, entry, status):
    found = gpus(entry) if entry else {"absent": "no NVIDIA driver"}
    context = make_context(slots=slots, limits={"nofile": nofile}, gpus=found)
    assert {r.status for r in run("LIM003", context).values()} == {status}


@pytest.mark.parametrize(
    ("free", "slots", "status"), [(0.4, 1, FAIL), (0.6, 1, PASS), (3.9, 8, FAIL), (4.1, 8, PASS)]
)
def test_shared_memory_on_a_node_with_gpus(free, slots, status):
    """Half of 16 GiB of memory, the default, is enough for the GPU of a small machine."""
    space = {"shm_free": int(free * GIB), "shm_total": 8 * GIB}
    context = make_context(slots=slots, limits=space, gpus=gpus(*[gpu()] * slots))
    assert {r.status for r in run("LIM001", context).values()} == {status}


def test_the_limit_of_open_files_is_the_one_that_a_rank_raises(tmp_path):
    """`ulimit -n 100` of a shell, which a rank may raise, is no fault of the node."""
    code = (
        "import resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))\n"
        "from mmldlm.preflight.checks.limits import limits\n"
        "from mmldlm.utils.resources import raise_open_files\n"
        "raise_open_files()\n"
        "print(limits({})['nofile'], *resource.getrlimit(resource.RLIMIT_NOFILE), hard)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(set(done.stdout.split())) == 1
