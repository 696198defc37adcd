"""Cost of a step: throughput, MFU (with the peak FLOPs of known devices), fractions of the wall
time, peak memory.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mmldlm.config.schema import Config
from mmldlm.tasks.base import Task

SECTIONS = ("data", "checkpoint", "evaluation")


class StepTimer:
    """Measure from one step's record to the next, by the wall clock of this rank and without
    device synchronization.

    Args:
        task: Task, which counts the FLOPs.
        config: Config of the run.
        world_size: Number of devices.
        device: Device of this rank.
    """

    def __init__(self, task: Task, config: Config, world_size: int, device: torch.device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self._peak = peak_flops(name, config.training.dtype, config.logging.peak_tflops)
        self._task, self._config, self._world_size, self.device = task, config, world_size, device
        self._epoch: int | None = None
        self.restart()

    def restart(self) -> None:
        """Restart the measurement, so that set-up does not count."""
        self._spent = dict.fromkeys(SECTIONS, 0.0)
        self._last = time.perf_counter()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the time of the block as one of SECTIONS."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent[name] += time.perf_counter() - started

    def step(
        self,
        num_samples: int,
        num_tokens: float,
        sums: Mapping[str, float],
        epoch: int | None = None,
    ) -> dict[str, Any]:
        """Return the fields of the record of the step that has just ended.

        Args:
            num_samples: Number of samples over all ranks.
            num_tokens: Number of real text tokens over all ranks.
            sums: Sums of the objective over all ranks and counts of the global batch, by name.
            epoch: Epoch of the step; the peak memory is that since the first step of the epoch.

        Returns:
            tokens_per_second: Real text tokens per second, without the time of checkpoints and
                evaluations.
            (the task's sample_rate, if it has one): Samples per second of the same time.
            tflops: TFLOP/s per device, of the step's real work.
            mfu: Model FLOPs utilization; None if the device's peak is unknown.
            data_share, checkpoint_share: Fractions of the wall time since the last record. A
                checkpoint is written after a step's record and therefore counts in the next one.
            peak_memory_gib: Memory allocated on the GPU; on a CPU, resident in the process.
        """
        if epoch is not None and epoch != self._epoch:
            if self._epoch is not None:
                reset_peak_memory(self.device)
            self._epoch = epoch
        now = time.perf_counter()
        elapsed = max(now - self._last, 1e-9)
        training = max(elapsed - self._spent["checkpoint"] - self._spent["evaluation"], 1e-9)
        flops = self._task.training_flops(self._config, num_samples, num_tokens, sums)
        rate = flops / training / self._world_size  # per device
        record = {
            "tokens_per_second": num_tokens / training,
            **({self._task.sample_rate: num_samples / training} if self._task.sample_rate else {}),
            "tflops": rate / 1e12,
            "mfu": None if self._peak is None else rate / self._peak,
            "data_share": self._spent["data"] / elapsed,
            "checkpoint_share": self._spent["checkpoint"] / elapsed,
            "peak_memory_gib": peak_memory(self.device)[0] / 2**30,
        }
        self._spent, self._last = dict.fromkeys(SECTIONS, 0.0), now
        return record


def peak_memory(device: torch.device) -> tuple[int, str]:
    """Return (bytes, kind): allocated on the GPU, or resident in the process, since the last
    reset.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "GPU memory, allocated"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "host memory, entire process"


def reset_peak_memory(device: torch.device) -> None:
    """Reset `peak_memory`; for host memory where the system allows it (Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


# Dense peak of one device, TFLOP/s: (bf16, fp32 outside tensor cores). Sources: NVIDIA's data
# sheets of the H100 and H200 Tensor Core GPUs (2024), the A100 (2022), the L4 and L40S (2023) and
# Blackwell (2024), AMD's of the MI300X (2023); figures given with sparsity are halved. Names are
# whole words of what torch.cuda.get_device_name returns; the longest that fits counts. Of these
# devices mmldlm has run on the H200 alone. logging.peak_tflops names the peak of others.
PEAK_TFLOPS = {
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "H200": (989.4, 66.9),
    "H200 NVL": (835.5, 60.0),
    "H100 PCIe": (756.0, 51.2),
    "H100 NVL": (835.5, 60.0),
    "H100": (989.4, 66.9),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "MI300X": (1307.4, 163.4),
}


def peak_flops(
    device_name: str | None, dtype: str, override_tflops: float | None = None
) -> float | None:
    """Return the peak FLOP/s of one device; None where it is not known (a CPU, a device outside
    the table).

    Args:
        device_name: Name from torch.cuda.get_device_name; None for a CPU.
        dtype: Compute dtype (training.dtype; bf16 and fp16 have one peak).
        override_tflops: Peak in TFLOP/s that replaces the table's (logging.peak_tflops).
    """
    if override_tflops is not None:
        return override_tflops * 1e12
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if device_name is not None and re.search(rf"\b{name}\b", device_name):
            return PEAK_TFLOPS[name][dtype == "fp32"] * 1e12
    return None
