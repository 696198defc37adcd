"""training.profile=[a,b]: a torch profiler trace of steps a to b, and the time taken by
communication.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mmldlm.engines.muon import LABEL

_COLLECTIVES = ("nccl", "gloo:", "mpi:", "ucc:")  # name prefixes in c10d and NCCL


@dataclass(frozen=True)
class ProfileSummary:
    """Summary of a profile.

    Attributes:
        steps: (first, last).
        trace: Path of the trace.
        communication_share: Fraction of the wall time with a running collective on this rank.
        exposed_share: Fraction with a running collective and no concurrent computation.
        muon_share: Fraction spent on Muon's exchanges and orthogonalization; 0 without Muon.
        error: Reason why the trace could not be written, or None.
    """

    steps: tuple[int, int]
    trace: Path
    communication_share: float | None = None
    exposed_share: float | None = None
    muon_share: float | None = None
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"could not be written to {self.trace}: {self.error}"
        shares = (
            f"{self.communication_share:.1%} of the time, {self.exposed_share:.1%} without"
            " concurrent computation"
        )
        muon = f"; Muon: {self.muon_share:.1%}" if self.muon_share else ""
        return f"{self.trace}; communication: {shares}{muon}"

    def record(self) -> dict:
        """Return the fields for events.jsonl."""
        shares = {
            "communication_share": self.communication_share,
            "exposed_communication_share": self.exposed_share,
        }
        muon = {"muon_share": self.muon_share} if self.muon_share else {}
        return {
            "steps": list(self.steps),
            "path": str(self.trace),
            "error": self.error,
            **shares,
            **muon,
        }


class StepProfiler:
    """Profile steps first to last (numbered as in training_log.jsonl, both included) of one rank.

    Args:
        steps: (first, last), or None.
        folder: Output folder of steps_<first>_<last>_rank<n>.json, for chrome://tracing or
            https://ui.perfetto.dev.
        rank: Rank of this process.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int):
        self.steps, self.folder, self.rank = steps, folder, rank
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Call before each step and before waiting for its data."""
        if (
            self.steps is None
            or self._profile is not None
            or not self.steps[0] <= step <= self.steps[1]
        ):
            return
        activities = [ProfilerActivity.CPU] + (
            [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        )
        # acc_events: torch 2.11 warns that a second cycle would drop the events of the first.
        self._profile = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profile.start()

    def after(self, step: int) -> ProfileSummary | None:
        """Call after each step; return the summary once, after the last profiled step.

        An error is part of the summary: one rank must not fail because of its profile.
        """
        if self._profile is None or self.steps is None or step < self.steps[1]:
            return None
        steps = self.steps
        path = self.folder / f"steps_{steps[0]}_{steps[1]}_rank{self.rank}.json"
        try:
            self._profile.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
            return ProfileSummary(steps, path, *time_shares(self._profile.events()))
        except (OSError, RuntimeError) as error:
            return ProfileSummary(steps, path, error=str(error))
        finally:
            self._profile = self.steps = None


def time_shares(events: Iterable) -> tuple[float, float, float]:
    """Return the fractions of the profiled time with a collective, with a collective and no
    computation, and of Muon.

    Args:
        events: `torch.autograd.profiler_util.FunctionEvent`s of one rank. If there are GPU
            kernels, only these count.
    """
    events = list(events)
    spans = [(event, event.time_range.start, event.time_range.end) for event in events]
    # Events that did not end during the profile have no length.
    spans = [span for span in spans if span[2] > span[1]]
    if not spans:
        return 0.0, 0.0, 0.0
    wall = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
    on_gpu = any(event.device_type == DeviceType.CUDA for event in events)
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    collectives, work, muon = [], [], []
    for event, start, end in spans:
        if event.device_type != device:
            continue
        if event.name == LABEL:
            muon.append((start, end))
        elif event.name.startswith(_COLLECTIVES):
            collectives.append((start, end))
        elif event.name.startswith("aten::") or (on_gpu and not event.is_user_annotation):
            work.append((start, end))
    communication, computation = _union_length(collectives), _union_length(work)
    # Rounding may make the exposed part slightly longer than the communication.
    exposed = min(max(_union_length(collectives + work) - computation, 0.0), communication)
    wall = max(wall, 1e-9)
    return communication / wall, exposed / wall, _union_length(muon) / wall


def _union_length(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
