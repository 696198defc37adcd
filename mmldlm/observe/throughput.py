"""What a step cost: its rate, the share of the hardware's peak, and where the wall time went."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mmldlm.config.schema import Config
from mmldlm.observe.flops import peak_flops
from mmldlm.tasks.base import Task

PARTS = ("data", "checkpoint", "evaluation")


class StepTimer:
    """Measures from one step's record to the next. Wall clock of this rank; no device is asked to wait.

    Args:
        task: counts the FLOPs. config: the run's. world_size: devices. device: of this rank.
    """

    def __init__(self, task: Task, config: Config, world_size: int, device: torch.device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self._peak = peak_flops(name, config.training.dtype, config.logging.peak_tflops)
        self._task, self._config, self._world_size, self.device = task, config, world_size, device
        self.restart()

    def restart(self) -> None:
        """Begin to measure now: what came before was set-up."""
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what runs inside as one of PARTS."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent[name] += time.perf_counter() - started

    def step(self, num_samples: int, num_tokens: float, sums: Mapping[str, float]) -> dict[str, Any]:
        """Fields of the record of the step that has just ended; counts are over all ranks.

        Returns:
            tokens_per_second (real text tokens; checkpoints and evaluation do not count), tflops (a device's, of the
            step's real work), mfu (None where the device's peak is not known), data_share and checkpoint_share (of the
            wall time since the last record; a checkpoint is written after a step's record and so counts in the next
            one's), peak_memory_gib (allocated on the GPU; on a CPU resident in the process).
        """
        now = time.perf_counter()
        whole = max(now - self._last, 1e-9)
        working = max(whole - self._spent["checkpoint"] - self._spent["evaluation"], 1e-9)
        flops = self._task.training_flops(self._config, num_samples, num_tokens, sums)
        rate = flops / working / self._world_size  # per device
        record = {
            "tokens_per_second": num_tokens / working,
            "tflops": rate / 1e12,
            "mfu": None if self._peak is None else rate / self._peak,
            "data_share": self._spent["data"] / whole,
            "checkpoint_share": self._spent["checkpoint"] / whole,
            "peak_memory_gib": self._peak_bytes() / 2**30,
        }
        self._spent, self._last = dict.fromkeys(PARTS, 0.0), now
        return record

    def _peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
