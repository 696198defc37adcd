"""training.profile=[a,b]: a torch profiler trace of steps a to b in the run's folder, and what communication took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_COLLECTIVES = ("nccl", "gloo:", "mpi:", "ucc:")  # what c10d and NCCL call theirs


@dataclass(frozen=True)
class ProfileSummary:
    """What was found in steps first to last.

    Attributes:
        trace: the file. communication_share: share of the wall time in which a collective ran on this rank.
        exposed_share: share in which a collective ran and nothing was computed beside it. error: why there is no trace.
    """

    steps: tuple[int, int]
    trace: Path
    communication_share: float | None = None
    exposed_share: float | None = None
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"could not be written to {self.trace}: {self.error}"
        shares = f"{self.communication_share:.1%} of the time, {self.exposed_share:.1%} with nothing computed beside it"
        return f"{self.trace}; communication: {shares}"

    def record(self) -> dict:
        """For events.jsonl."""
        shares = {"communication_share": self.communication_share, "exposed_communication_share": self.exposed_share}
        return {"steps": list(self.steps), "path": str(self.trace), "error": self.error, **shares}


class StepProfiler:
    """Records steps first to last (numbered as in training_log.jsonl, both included) of one rank.

    Args:
        steps: (first, last), None for nothing. folder: receives steps_<first>_<last>_rank<n>.json, which
            chrome://tracing and https://ui.perfetto.dev open. rank: of this process.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int):
        self.steps, self.folder, self.rank = steps, folder, rank
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Call before each step (and before its data is waited for)."""
        if self.steps is None or self._profile is not None or not self.steps[0] <= step <= self.steps[1]:
            return
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def after(self, step: int) -> ProfileSummary | None:
        """Call after each step; what was found, once, after the last of them. One rank must not end over its profile:
        what goes wrong is told there."""
        if self._profile is None or step < self.steps[1]:
            return None
        path = self.folder / f"steps_{self.steps[0]}_{self.steps[1]}_rank{self.rank}.json"
        try:
            self._profile.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
            return ProfileSummary(self.steps, path, *communication_shares(self._profile.events()))
        except (OSError, RuntimeError) as error:
            return ProfileSummary(self.steps, path, error=str(error))
        finally:
            self._profile = self.steps = None


def communication_shares(events: Iterable) -> tuple[float, float]:
    """Shares of the profiled time in which collectives ran, and in which they ran alone.

    On a GPU its kernels are looked at, on a CPU torch's operations.

    Args:
        events: `torch.autograd.profiler_util.FunctionEvent`s of one rank.
    """
    events = list(events)
    spans = [(event, event.time_range.start, event.time_range.end) for event in events]
    spans = [span for span in spans if span[2] > span[1]]  # what had not ended with the profile has no length
    if not spans:
        return 0.0, 0.0
    wall = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
    on_gpu = any(event.device_type == DeviceType.CUDA for event in events)
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    collectives, work = [], []
    for event, start, end in spans:
        if event.device_type != device:
            continue
        if event.name.startswith(_COLLECTIVES):
            collectives.append((start, end))
        elif event.name.startswith("aten::") or (on_gpu and not event.is_user_annotation):
            work.append((start, end))
    taken, computed = _length(collectives), _length(work)
    # Sums in another order round otherwise: alone may come out a little longer than the collectives themselves.
    alone = min(max(_length(collectives + work) - computed, 0.0), taken)
    return taken / max(wall, 1e-9), alone / max(wall, 1e-9)


def _length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
