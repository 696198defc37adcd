"""Real runs on one GPU; skipped where there is none.

The other tests hide GPUs from what they start (tests/conftest.py), since they count on several
ranks of one machine and on the CPU's arithmetic.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import VISIBLE_GPUS
from tests.support.gpu_worker import BAD_STEP, ENGINES, OPTIONS, STEPS
from tests.support.helpers import ROOT, launch, read_log, torchrun, train_words
from tests.support.image_store import make_image_store
from tests.support.rank_server import SHARED

WORKER = str(ROOT / "tests" / "support" / "gpu_worker.py")
pytestmark = pytest.mark.skipif(VISIBLE_GPUS is None, reason="needs a GPU")


@pytest.fixture(scope="module")
def gpu() -> dict[str, str]:
    """Variables of a process that may use the machine's GPU."""
    variables = {"CUDA_VISIBLE_DEVICES": VISIBLE_GPUS, "DS_ACCELERATOR": "cuda"}
    code = "import torch; print(torch.cuda.is_available())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    if found.stdout.strip() != "True":
        pytest.skip("torch sees no GPU here")
    return variables


def work(case: str, store, folder, gpu: dict[str, str], timeout: float = 300) -> str:
    done = launch(torchrun(1, WORKER, case, str(store), str(folder)), timeout, **gpu)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def losses(folder, name: str) -> list[float]:
    return [record["loss"] for record in read_log(folder, name)]


def test_every_engine_has_the_losses_of_the_cpu_and_skips_a_nan(store, tmp_path, gpu):
    words = ["training.num_train_steps=2", "engine.kind=single", "logging.plot=false"]
    done = launch(
        [sys.executable, "-m", "mmldlm.train", *train_words(store, tmp_path, "cpu", *words)]
    )
    assert done.returncode == 0, done.stdout[-3000:]
    work("engines", store, tmp_path, gpu)
    for dtype, rel in (("fp32", 1e-4), ("bf16", 3e-2)):
        first = losses(tmp_path, f"{dtype}_single")
        assert first[:2] == pytest.approx(losses(tmp_path, "cpu"), rel=rel), dtype
        for name in ENGINES:
            records = read_log(tmp_path, f"{dtype}_{name}")
            assert [r["skipped"] for r in records] == [
                step == BAD_STEP for step in range(1, STEPS + 1)
            ], (dtype, name)
            assert [r["loss"] for r in records if not r["skipped"]] == pytest.approx(
                [loss for loss in first if loss is not None], rel=rel
            ), (dtype, name)


def test_every_option_has_the_losses_of_the_cpu(store, tmp_path, gpu):
    """Dropout, noise and masks are drawn from keys: the same numbers on every device."""
    for folder in ("cpu", "gpu"):
        make_image_store(tmp_path / folder / "images")
        make_image_store(tmp_path / folder / "codes", codes=48)
    work("options", store, tmp_path / "gpu", gpu)
    work("options", store, tmp_path / "cpu", {})
    for name in OPTIONS:
        expected = losses(tmp_path / "cpu", name)
        assert losses(tmp_path / "gpu", name) == pytest.approx(expected, rel=1e-3), name


def test_fp16_overflows_and_goes_on(store, tmp_path, gpu):
    work("half", store, tmp_path, gpu)
    expected = losses(tmp_path, "fp16_single")
    for name in ENGINES:
        found = losses(tmp_path, f"fp16_{name}")
        assert len(found) == STEPS and found == pytest.approx(expected, rel=3e-2), name


def test_compiled_blocks_train(store, tmp_path, gpu):
    work("compiled", store, tmp_path, gpu)
    for name in ("single", "zero2"):
        assert all(loss is not None for loss in losses(tmp_path, f"compiled_{name}")), name


def test_the_host_waits_once_a_step(store, tmp_path, gpu):
    output = work("syncs", store, tmp_path, gpu)
    (line,) = [line for line in output.splitlines() if line.startswith('{"syncs"')]
    for name, places in json.loads(line)["syncs"].items():
        functions = {place.split()[0] for place in places}
        # DeepSpeed's norm copies constants to the GPU, right before the guard reads it.
        assert functions - {"grad_norm"} == {"sum_on_host"}, (name, places)
        assert name == "zero2" or len(places) == 1, (name, places)


@pytest.mark.parametrize("engine", ["zero2", "fsdp"])
def test_a_run_stops_resumes_converts_and_samples(store, tmp_path, gpu, engine):
    common = [
        *ENGINES[engine],
        "training.dtype=bf16",
        "logging.plot=false",
        "logging.eval_freq=100",
    ]

    def train(name: str, *words: str) -> None:
        arguments = train_words(store, tmp_path, name, *common, *words)
        done = launch([sys.executable, "-m", "mmldlm.cli", "train", *arguments], **gpu)
        assert done.returncode == 0, done.stdout[-4000:]

    train(
        "straight", "training.num_train_steps=8", "logging.save_freq=4", "checkpoints.keep_last=5"
    )
    start = tmp_path / "straight" / "checkpoints" / "step_00000004"
    train("resumed", "training.num_train_steps=8", f"training.resume={start}")
    expected, found = losses(tmp_path, "straight")[4:], losses(tmp_path, "resumed")
    # The state is restored to the bit; then kernels add in an order of their own, each time.
    assert found[0] == expected[0]
    assert found == pytest.approx(expected, rel=1e-3)
    for command in (
        ["convert", str(tmp_path / "straight" / "latest"), str(tmp_path / "model")],
        [
            *("sample", "l2t", "--checkpoint", str(tmp_path / "model")),
            *("--data", str(store), "--num-samples", "8", "--output-dir", str(tmp_path / "texts")),
        ],
    ):
        done = launch([sys.executable, "-m", "mmldlm.cli", *command], **gpu)
        assert done.returncode == 0, done.stdout[-4000:]


def test_preflight_trains_two_steps_on_the_gpu(store, tmp_path, gpu):
    words = train_words(store, tmp_path, "run", "engine.zero_stage=2", "training.dtype=bf16")
    # Tests beside this one use the GPU.
    options = ["--level", "4", "--nproc", "1", "--skip", "GPU004,PROC001"]
    done = launch([sys.executable, "-m", "mmldlm.cli", "preflight", *options, *words], **gpu)
    assert done.returncode == 0, done.stdout[-6000:]


def test_a_benchmark_of_several_ranks_runs_on_the_cpu_beside_one_gpu(
    store, tmp_path, gpu, monkeypatch
):
    """The fourth step of the quickstart, which compares ZeRO on two ranks with one process."""
    monkeypatch.delenv(SHARED, raising=False)  # the server of the tests sees no GPU
    report = tmp_path / "parity.json"
    words = ["--steps", "2", "--data", str(store), "--json", str(report)]
    parity = [sys.executable, str(ROOT / "benchmarks" / "zero_parity.py"), "--quick", *words]
    done = launch(parity, **gpu)
    assert done.returncode == 0, done.stdout[-4000:]
    assert json.loads(report.read_text(encoding="utf-8"))["claims"][0]["holds"]
