"""The code that a GPU runs, on machines without one: no mixed devices, nothing that makes the host
wait.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.support.helpers import launch
from tests.support.toy_models import checkpoint  # noqa: F401 (a fixture)

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if torch.version.cuda is not None:
        pytest.skip("this torch has real CUDA devices, which a made-up one would replace")
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    path = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    command = [
        "g++",
        "-shared",
        "-fPIC",
        "-std=c++20",
        str(SUPPORT / "fake_cuda.cpp"),
        "-o",
        str(path),
    ]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{folder}" for folder in cpp_extension.include_paths()]
    for folder in cpp_extension.library_paths():
        command += [f"-L{folder}", f"-Wl,-rpath,{folder}"]
    done = subprocess.run([*command, "-ltorch_cpu", "-lc10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def test_a_step_never_makes_the_host_wait(library, store):
    """Outside what the loop asks for itself: no copy from the host, no value read by it, all on
    one device.
    """
    done = launch([sys.executable, str(SUPPORT / "host_sync_worker.py"), str(library), str(store)])
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 15 and all(seen == [] for seen in found.values()), found


def test_results_on_a_pretended_gpu_are_those_of_the_cpu(library, checkpoint, store, tmp_path):  # noqa: F811
    """Samplers; training with a skip, an evaluation and resumes; evaluation, replay, a search
    with the encoder, images: what a GPU refuses is an error, all values are those of the CPU.
    """
    worker = str(SUPPORT / "pretended_gpu_worker.py")
    done = launch(
        [sys.executable, worker, str(library), str(checkpoint), str(store), str(tmp_path)]
    )
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("a mixture").startswith(
        "RuntimeError: add.Tensor on tensors of cuda:0 and cpu"
    )
    wrong = {name: result for name, result in found.items() if result != "equal"}
    assert len(found) == 28 and not wrong, wrong
