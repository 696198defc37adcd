"""GPUs, limits and leftovers on facts written by hand, without such machines."""

from __future__ import annotations

import pytest

from mmldlm.preflight.check import FAIL, PASS, SKIP, WARN
from tests.support.preflight_context import GIB, gpu, gpus, make_context, run


def test_healthy_gpus_pass_and_a_cpu_run_skips():
    sound = make_context(gpus=gpus(gpu()))
    for id in ("GPU001", "GPU002", "GPU003", "GPU004", "GPU005"):
        assert {r.status for r in run(id, sound).values()} == {PASS}, id
    cpu = make_context(gpus={"absent": "no NVIDIA driver"})
    for id in ("GPU001", "GPU002", "GPU003", "GPU004"):
        assert {r.status for r in run(id, cpu).values()} == {SKIP}, id
        assert all("no NVIDIA driver" in r.why for r in run(id, cpu).values())


@pytest.mark.parametrize(
    ("id", "status", "changes", "words"),
    [
        ("GPU002", FAIL, {"ecc_uncorrected": 2}, "2 uncorrected"),
        ("GPU002", FAIL, {"remap_failed": True}, "remapping failed"),
        ("GPU002", FAIL, {"remap_pending": True}, "pending"),
        ("GPU002", FAIL, {"recovery": "reset the GPU"}, "reset the GPU"),
        ("GPU002", FAIL, {"lost": "NVML code 15"}, "NVML code 15"),
        ("GPU003", WARN, {"slowed": ["hardware thermal"]}, "hardware thermal"),
        (
            "GPU004",
            FAIL,
            {"processes": [{"pid": 7, "user": "eve", "command": "python x.py"}]},
            "pid 7 eve",
        ),
        ("GPU004", FAIL, {"memory_free": 60 * GIB}, "no visible process"),
    ],
)
def test_a_bad_gpu_fails_on_its_node_alone(id, status, changes, words):
    found = run(
        id, make_context(gpus={"a": gpus(gpu()), "b": gpus(gpu(**changes)), "c": gpus(gpu())})
    )
    assert found["b"].status == status and words in found["b"].measured and found["b"].fix
    assert found["a"].status == found["c"].status == PASS


def test_a_node_without_gpus_among_others_fails():
    found = run(
        "GPU001",
        make_context(gpus={"a": gpus(gpu()), "b": {"absent": "no driver"}, "c": gpus(gpu())}),
    )
    assert found["b"].status == FAIL and "delete b" in found["b"].fix


def test_more_slots_than_gpus_names_both_numbers():
    found = run("GPU001", make_context(slots=8, gpus=gpus(*[gpu()] * 4)))
    assert found["a"].status == FAIL and "4 GPU(s) for 8 slots" in found["a"].measured


def test_another_driver_warns_on_the_odd_node():
    found = run(
        "GPU005",
        make_context(gpus={"a": gpus(gpu()), "b": gpus(gpu(), driver="535.1"), "c": gpus(gpu())}),
    )
    assert (
        found["b"].status == WARN and "535.1" in found["b"].measured and found["a"].status == PASS
    )


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


def test_another_users_rank_is_not_to_be_killed():
    entry = {"pid": 7, "user": "eve", "age": 9, "command": "python mmldlm/train.py"}
    (own, other) = (
        run("PROC001", make_context(processes=[{**entry, "own": own}]))["a"]
        for own in (True, False)
    )
    assert "kill 7" in own.fix and "kill" not in other.fix and "ask eve" in other.fix


def test_a_build_cache_on_a_network_file_system_warns():
    place = {"TORCH_EXTENSIONS_DIR": {"folder": "/data/x", "file_system": "ext4"}}
    found = run(
        "JIT002",
        make_context(
            caches={
                n: place
                | (
                    {"TRITON_CACHE_DIR": {"folder": "/h", "file_system": "nfs4"}}
                    if n == "b"
                    else {}
                )
                for n in "abc"
            }
        ),
    )
    assert (
        found["b"].status == WARN
        and "TRITON_CACHE_DIR" in found["b"].fix
        and found["a"].status == PASS
    )
