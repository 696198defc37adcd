"""GPUs on facts written by hand, without such machines."""

from __future__ import annotations

import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pynvml
import pytest
import torch
from pynvml import NVML_ERROR_NOT_SUPPORTED, NVMLError

from mmldlm.errors import UserError
from mmldlm.preflight.check import FAIL, PASS, SKIP, WARN
from mmldlm.preflight.checks import gpu as probe
from mmldlm.utils.gpus import visible_gpus
from tests.support.preflight_context import GIB, gpu, gpus, make_context, run


def test_healthy_gpus_pass_and_a_cpu_run_skips():
    sound = make_context(gpus=gpus(gpu()))
    for id in ("GPU001", "GPU002", "GPU003", "GPU004", "GPU005", "GPU006"):
        assert {r.status for r in run(id, sound).values()} == {PASS}, id
    cpu = make_context(gpus={"absent": "no NVIDIA driver"})
    for id in ("GPU001", "GPU002", "GPU003", "GPU004", "GPU006"):
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


def test_a_node_of_two_gpu_models_warns():
    alike, mixed = gpus(gpu(), gpu()), gpus(gpu(), {**gpu(), "name": "NVIDIA A100-SXM4-40GB"})
    found = run("GPU005", make_context(slots=2, gpus={"a": alike, "b": mixed, "c": alike}))
    assert [found[name].status for name in "abc"] == [PASS, WARN, PASS]
    assert "A100" in found["b"].measured and "A100" not in found["b"].expected
    # A mixed node is not the usual one, even where the others are few.
    found = run("GPU005", make_context(slots=2, gpus={"a": mixed, "b": mixed, "c": alike}))
    assert [found[name].status for name in "abc"] == [WARN, WARN, PASS]
    # Where all nodes are so, each of them is as slow as its slowest GPU.
    everywhere = run("GPU005", make_context(slots=2, gpus=mixed)).values()
    assert {node.status for node in everywhere} == {WARN}
    # A GPU behind the slots serves no rank.
    unused = run("GPU005", make_context(slots=1, gpus=mixed)).values()
    assert {node.status for node in unused} == {PASS}


def test_an_unanswered_question_is_a_failure_and_not_a_cpu_run():
    context = make_context(gpus=gpus(gpu()))
    context.facts["a"]["gpus"] = {"error": "x", "timeout": True}
    context.facts["b"]["gpus"] = {"error": "ModuleNotFoundError: No module named 'pynvml'"}
    context.facts["c"]["gpus"] = {"error": "NVMLError_Unknown: Unknown Error"}
    found = run("GPU001", context)
    assert [found[name].status for name in "abc"] == [FAIL, FAIL, FAIL]
    assert "the driver hangs" in found["a"].fix and "nvidia-persistenced" in found["a"].fix
    assert "nvidia-ml-py" in found["b"].fix and "pip" not in found["c"].fix


@pytest.mark.parametrize(
    ("changes", "measured", "fix"),
    [
        ({"cuda": {"code": 802, "version": 13000}}, "status 802", "fabric manager"),
        ({"cuda": {"code": 999, "version": 13000}}, "status 999", "reload the driver"),
        ({"cuda": {"error": "libcuda.so.1: missing", "fix": "install it"}}, "missing", "install"),
        # Driver 535 under the torch of PyPI.
        (
            {
                "cuda": {"code": 0, "version": 12020},
                "torch": {"version": "2.13.0", "cuda": "13.0", "hip": None},
            },
            "CUDA 13.0; driver 570.1 supports 12.2",
            "update the driver, or install a torch built for CUDA 12",
        ),
        (
            {"torch": {"version": "2.13.0+cpu", "cuda": None, "hip": None}},
            "2.13.0+cpu is built without CUDA",
            "--skip GPU006",
        ),
    ],
)
def test_gpus_that_torch_cannot_use_fail(changes, measured, fix):
    """The run would train on the CPU."""
    found = run(
        "GPU006", make_context(("a", "b"), gpus={"a": gpus(gpu(), **changes), "b": gpus(gpu())})
    )
    assert found["a"].status == FAIL and found["b"].status == PASS
    assert measured in found["a"].measured and fix in found["a"].fix


def test_other_builds_of_torch_pass():
    """A later minor release of the driver's CUDA, ROCm, and no torch, of which others tell."""
    for build in (
        {"version": "2.9.0+cu129", "cuda": "12.9", "hip": None},
        {"version": "2.9.0+rocm6.4", "cuda": None, "hip": "6.4"},
        None,
    ):
        found = run("GPU006", make_context(gpus=gpus(gpu(), torch=build)))
        assert {result.status for result in found.values()} == {PASS}


def test_the_fix_on_this_machine_is_an_empty_variable():
    build = {"version": "2.13.0+cpu", "cuda": None, "hip": None}
    context = make_context(("localhost",), gpus=gpus(gpu(), torch=build))
    context.local = True
    assert 'CUDA_VISIBLE_DEVICES=""' in run("GPU006", context)["localhost"].fix


LIBCUDA = """
#include <stdlib.h>
int cuDriverGetVersion(int *version) { *version = 12020; return 0; }
int cuInit(unsigned flags) { return getenv("CUDA_VISIBLE_DEVICES") ? 100 : 802; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_driver_of_the_ranks_is_asked(monkeypatch, tmp_path):
    """A library in the LD_LIBRARY_PATH of the ranks, which on other nodes see all GPUs."""
    (tmp_path / "cuda.c").write_text(LIBCUDA)
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "cuda.c"], check=True)
    monkeypatch.setitem(sys.modules, "pynvml", nvml(2))
    monkeypatch.setattr(probe, "_gpu", lambda pynvml, index: gpu(index=index))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = probe.gpus({"local": False, "library_path": str(tmp_path)})
    assert found["cuda"] == {"code": 802, "version": 12020}
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = probe.gpus({"local": True})
    assert found["cuda"] == {"code": 100, "version": 12020}
    assert found["torch"] == {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def test_gpus_that_tell_neither_name_nor_memory_pass(monkeypatch):
    """MIG in a container (no permission), and GPUs that share the host's memory (not
    supported).
    """

    def refuse(*args):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)

    silent = ModuleType("pynvml")
    silent.__dict__.update({name: getattr(pynvml, name) for name in dir(pynvml)})
    functions = [name for name in dir(pynvml) if name.startswith("nvmlDeviceGet")]
    silent.__dict__.update(dict.fromkeys(functions, refuse))
    silent.nvmlDeviceGetHandleByIndex = lambda index: index
    context = make_context(("a",), gpus=gpus(probe._gpu(silent, 0)))
    for id in ("GPU001", "GPU002", "GPU003", "GPU004", "GPU005"):
        assert run(id, context)["a"].status == PASS, id


class NvmlError(Exception):
    pass


def nvml(count: int) -> SimpleNamespace:
    """NVML of a machine whose GPUs have the UUIDs GPU-a0, GPU-b1, ...; the last has one MIG
    instance, MIG-x.
    """

    def by_uuid(uuid):
        if uuid != "MIG-x":
            raise NvmlError
        return uuid

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVMLError_LibraryNotFound=NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "570.1",
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda index: f"GPU-{'abcd'[index]}{index}",
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda instance: count - 1,
        nvmlDeviceGetIndex=lambda index: index,
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("2,3", [2, 3]),
        (" 3, 0", [3, 0]),
        ("", []),
        ("-1", []),
        ("1,9,2", [1]),  # as CUDA, which ignores what follows
        ("GPU-c,GPU-a0", [2, 0]),
        ("MIG-x", [3]),
        ("MIG-y", []),
    ],
)
def test_visible_gpus_are_those_of_cuda(monkeypatch, value, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus(nvml(4)) == expected


def test_a_run_on_this_machine_is_checked_on_its_visible_gpus_and_gets_them(monkeypatch, tmp_path):
    """DeepSpeed's --num_gpus would take the first ones, which others may use."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(4))
    monkeypatch.setattr(probe, "_gpu", lambda pynvml, index: gpu(index=index))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert len(probe.gpus({"local": False})["gpus"]) == 4
    facts = probe.gpus({"local": True})
    assert [entry["index"] for entry in facts["gpus"]] == [3, 1]
    context = make_context(("localhost",), slots=2)
    context.local, context.head = True, {"gpus": {"value": facts}}
    command = context.launcher_command(["train.py"], tmp_path / "hostfile")
    assert command[command.index("--include") + 1] == "localhost:3,1"
    assert "--num_gpus" not in command
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    command = context.launcher_command(["train.py"], tmp_path / "hostfile")
    assert command[command.index("--num_gpus") + 1] == "2" and "--include" not in command
    # DeepSpeed would take another instance of the GPU, or all of it.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-x")
    with pytest.raises(UserError, match="--launcher torchrun"):
        context.launcher_command(["train.py"], tmp_path / "hostfile")


def test_hidden_gpus_are_a_cpu_run_and_the_report_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    context = make_context(("localhost",), gpus=probe.gpus({"local": True}))
    context.local = True
    assert context.has_gpus() is False
    assert "CUDA_VISIBLE_DEVICES= hides all 2 GPU(s)" in run("GPU001", context)["localhost"].why
