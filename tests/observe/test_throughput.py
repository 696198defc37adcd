"""Cost of a step: throughput, MFU, fractions of the wall time, peak memory, and the profiler
trace.
"""

from __future__ import annotations

import json
import random

import pytest
import torch

from mmldlm.config.schema import Config
from mmldlm.models.flops import estimate_flops
from mmldlm.observe.throughput import StepTimer, peak_flops
from mmldlm.tasks.registry import find_task
from mmldlm.tasks.translation.config import TranslationConfig
from tests.support.helpers import read_log, train_words

TASK = find_task("translation")


def config(**logging) -> Config:
    return TranslationConfig(model={"latent_dim": 32, "vocab_size": 500}, logging=logging)


def test_parts_are_shares_of_the_whole_and_start_anew(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 4.0, 9.0, 10.0, 20.0])
    monkeypatch.setattr("mmldlm.observe.throughput.time.perf_counter", lambda: next(clock))
    meter = StepTimer(TASK, config(peak_tflops=2.0), 4, torch.device("cpu"))
    with meter.section("data"):  # 1 to 3
        pass
    with meter.section("checkpoint"):  # 4 to 9
        pass
    record = meter.step(num_samples=8, num_tokens=100.0, sums={"text_masked": 50.0})  # at 10
    assert record["data_share"] == 0.2 and record["checkpoint_share"] == 0.5
    assert record["tokens_per_second"] == 100 / 5, "writing a checkpoint is not training"
    assert record["mfu"] == pytest.approx(record["tflops"] / 2.0)
    again = meter.step(num_samples=8, num_tokens=100.0, sums={"text_masked": 50.0})
    assert (
        again["data_share"] == again["checkpoint_share"] == 0 and again["tokens_per_second"] == 10
    )


def test_peak_memory_is_reset_when_the_epoch_changes(monkeypatch):
    resets = []
    monkeypatch.setattr("mmldlm.observe.throughput.reset_peak_memory", resets.append)
    meter = StepTimer(TASK, config(), 1, torch.device("cpu"))
    for epoch, expected in ((0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (None, 2)):
        assert meter.step(4, 40.0, {"text_masked": 20.0}, epoch)["peak_memory_gib"] > 0.05
        assert len(resets) == expected


def test_utilisation_of_an_unknown_device_is_not_invented():
    record = StepTimer(TASK, config(), 1, torch.device("cpu")).step(4, 40.0, {"text_masked": 20.0})
    assert record["mfu"] is None and record["tflops"] > 0 and record["peak_memory_gib"] > 0.05


def test_a_run_logs_its_cost_and_writes_a_trace(store, tmp_path, capsys):
    from mmldlm.train import main

    more = [
        "engine.kind=single",
        "training.num_train_steps=4",
        "training.profile=[2,3]",
        "logging.peak_tflops=0.5",
    ]
    assert main(train_words(store, tmp_path, "run", *more, "logging.save_freq=2")) == 0
    records = read_log(tmp_path, "run")
    for record in records:
        assert 0 <= record["data_share"] <= 1 and 0 < record["mfu"] < 1
        assert record["mfu"] == pytest.approx(record["tflops"] / 0.5)
    assert records[2]["checkpoint_share"] > 0 and records[1]["checkpoint_share"] == 0
    assert "mfu: " in capsys.readouterr().out
    trace = json.loads((tmp_path / "run" / "profile" / "steps_2_3_rank0.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names


def test_shares_of_communication():
    """Collectives that overlap each other count once, operations inside operations too;
    annotations never.
    """
    from torch.autograd import DeviceType
    from torch.autograd.profiler_util import FunctionEvent

    from mmldlm.observe.profiler import time_shares

    def event(name, start, end, device=DeviceType.CPU, note=False):
        found = FunctionEvent(0, name, 0, start, end, device_type=device)
        found.is_user_annotation = note
        return found

    on_cpu = [
        event("aten::mm", 0, 40), event("aten::copy_", 10, 20), event("c10d::allreduce_", 40, 90),
        event("gloo:all_reduce", 30, 70, note=True), event("gloo:all_reduce", 60, 80, note=True),
        event("aten::add", 75, 100),
    ]  # fmt: skip
    assert time_shares(on_cpu) == pytest.approx((0.5, 0.35, 0))
    gpu = DeviceType.CUDA
    on_gpu = [
        event("aten::mm", 0, 100),
        event("step", 0, 100, gpu, note=True),
        event("gemm_kernel", 10, 50, gpu),
        event("muon", 20, 50, gpu, note=True),
        event("muon", 0, 5),
        event("ncclDevKernel_AllGather_RING_LL", 40, 60, gpu),
        event("nccl:all_gather", 40, 60, gpu, note=True),
    ]
    assert time_shares(on_gpu) == pytest.approx((0.2, 0.1, 0.3))
    assert time_shares([]) == (0, 0, 0)
    # Never beside work: all of it is exposed, and rounding must not make that more than all.
    draw = random.Random(0)
    for _ in range(50):
        edges = [edge / 3 for edge in sorted(draw.uniform(0, 1e6) for _ in range(24))]
        apart = [
            event("gloo:all_reduce" if number % 2 else "aten::mm", start, end)
            for number, (start, end) in enumerate(zip(edges[::2], edges[1::2]))
        ]
        share, alone, _ = time_shares(apart)
        assert 0 < alone <= share < 1 and alone == pytest.approx(share)


def test_the_records_flops_are_those_of_the_batch():
    """What the loop counts (samples, tokens, scored positions) suffices: equal to the count from
    every length.
    """
    lengths, scored = [20, 21, 22, 23], 40
    found = TASK.training_flops(config(), 4, float(sum(lengths)), {"text_masked": float(scored)})
    expected = estimate_flops(config().model, lengths, scored).training
    assert found == pytest.approx(expected, rel=1e-3)
    assert TASK.training_flops(config(), 0, 0.0, {"text_masked": 0.0}) == 0.0


def test_peaks_are_known_or_not_given():
    assert peak_flops("NVIDIA H200", "bf16") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert (
        peak_flops("NVIDIA H200 NVL", "fp16") == peak_flops("NVIDIA H200 NVL", "bf16") == 835.5e12
    )
    assert peak_flops("NVIDIA GB200", "bf16") == 2.5e15
    assert peak_flops("NVIDIA B200", "bf16") == 2.25e15
    assert peak_flops("NVIDIA L4", "fp32") == 30.3e12 and peak_flops("NVIDIA L40", "fp32") is None
    assert peak_flops("AMD Instinct MI300X", "bf16") == 1307.4e12
    assert peak_flops(None, "bf16") is None and peak_flops("Some GPU 1", "bf16") is None
    assert peak_flops(None, "bf16", 2.5) == 2.5e12
