"""The progress of a run, as its checkpoints store it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmldlm.stability.guard import StepDecision


@dataclass
class TrainingState:
    """Progress of a run; everything else follows from it, the config and the weights.

    The names are keys of training_state.json.

    Attributes:
        global_batch: samples of one optimizer step.
        num_samples: training samples in use; with global_batch and seed it fixes the sample order.
        seed: training.seed.
        step: optimizer steps, skipped ones included.
        applied_steps: steps that moved the weights; the clock of the learning-rate schedule.
        consumed_samples: training samples read.
        skipped_steps: steps that did not move the weights.
        consecutive_skips: skipped steps since the last applied one.
        num_rollbacks: returns to a checkpoint.
        lr_scale: factor on the learning rate, lowered by every rollback.
        rolled_back_to: step of the last rollback's checkpoint; -1: none.
        applied_at_rollback: applied_steps of that checkpoint.
        passed_over: [first, end) steps, counted from 0, whose batches are excluded.
        guard: state of the guard's windows.
        evaluation_left: a stop signal ended or preceded the evaluation of this step; a resumed run
            repeats it.
        plan: version of the batch plan.
        data: RunData.fingerprint().
        versions: packages that wrote the checkpoint.
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

    def advance(self, decision: StepDecision, num_samples: int) -> None:
        """Count one step; an fp16 overflow is handled by the loss scale and does not count towards
        a rollback.
        """
        self.step += 1
        self.consumed_samples += num_samples
        self.applied_steps += decision.apply
        self.skipped_steps += not decision.apply
        self.consecutive_skips = (
            0 if decision.apply else self.consecutive_skips + (not decision.is_overflow)
        )

    def is_excluded(self) -> bool:
        """Whether the next step's batch is excluded from training."""
        return any(first <= self.step < end for first, end in self.passed_over)

    def skip_batch(self, num_samples: int) -> None:
        """Count one step whose batch is excluded."""
        self.step += 1
        self.consumed_samples += num_samples
        self.skipped_steps += 1
