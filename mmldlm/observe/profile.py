"""training.profile=[a,b]: a torch profiler trace of steps a to b in the run's folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


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

    def after(self, step: int) -> str | None:
        """Call after each step; says which trace was written, or why not: one rank must not end over its profile."""
        if self._profile is None or step < self.steps[1]:
            return None
        path = self.folder / f"steps_{self.steps[0]}_{self.steps[1]}_rank{self.rank}.json"
        try:
            self._profile.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
            return str(path)
        except (OSError, RuntimeError) as error:
            return f"could not be written to {path}: {error}"
        finally:
            self._profile = self.steps = None
