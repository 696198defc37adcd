"""The progress of a run, as its checkpoints store it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmldlm.stability.guard import StepDecision


@dataclass
class TrainingState:
    """Where a run stands; everything else follows from it, the config and the weights.

    Attributes:
        global_batch, num_samples, seed: what the order of samples and the noise depend on; plan: and in which way.
        step: optimizer steps taken, skipped ones included. applied_steps: those that moved the weights (the schedule's
            clock). consumed_samples: training samples seen. skipped_steps: refused steps. consecutive_skips: since
            the last applied one. num_rollbacks, lr_scale: returns to a checkpoint, and what they did to the rate.
        rolled_back_to, applied_at_rollback: step and applied steps of the last return's checkpoint.
        passed_over: [first, end) steps, counted from 0, whose batches are not trained on. guard: its windows.
        evaluation_left: a stop signal ended the evaluation of this step, or came before it; a resumed run makes it.
        data: RunData.fingerprint().
    """

    global_batch: int
    num_samples: int
    seed: int = 0
    step: int = 0
    applied_steps: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    num_rollbacks: int = 0
    lr_scale: float = 1.0
    rolled_back_to: int = -1
    applied_at_rollback: int = -1
    passed_over: list[list[int]] = field(default_factory=list)
    guard: dict = field(default_factory=dict)
    evaluation_left: bool = False
    plan: str = ""
    data: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def advance(self, verdict: StepDecision, num_samples: int) -> None:
        """Count one step of `num_samples` samples; an fp16 overflow mends itself and is no reason to roll back."""
        applied = verdict.apply
        self.step += 1
        self.consumed_samples += num_samples
        self.applied_steps += applied
        self.skipped_steps += not applied
        self.consecutive_skips = 0 if applied else self.consecutive_skips + (not verdict.is_overflow)

    def is_excluded(self) -> bool:
        """Whether the next step's batch is not to be trained on."""
        return any(first <= self.step < end for first, end in self.passed_over)

    def skip_batch(self, num_samples: int) -> None:
        """Count one step whose batch is not trained on."""
        self.step += 1
        self.consumed_samples += num_samples
        self.skipped_steps += 1
