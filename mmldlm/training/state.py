"""The progress of a run, as its checkpoints store it, and what one step reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from mmldlm.data.batch import Batch
from mmldlm.observe.layer_stats import LayerStats
from mmldlm.stability.guard import StepDecision


@dataclass
class TrainingState:
    """Progress of a run; everything else follows from it, the config and the weights.

    The names are keys of training_state.json.

    Attributes:
        global_batch: Samples of one optimizer step.
        num_samples: Training samples in use; with global_batch and seed it fixes the sample order.
        seed: Seed of the run (training.seed).
        step: Optimizer steps, skipped ones included.
        applied_steps: Steps that moved the weights; the clock of the learning-rate schedule.
        consumed_samples: Training samples read.
        skipped_steps: Steps that did not move the weights.
        consecutive_skips: Skipped steps since the last applied one, without fp16 overflows and
            excluded batches.
        first_skip: The first of them, counted from 0; -1: none.
        num_rollbacks: Returns to a checkpoint.
        lr_scale: Factor on the learning rate, lowered by every rollback.
        rolled_back_to: Step of the last rollback's checkpoint; -1: none.
        applied_at_rollback: Value of applied_steps in that checkpoint.
        passed_over: [first, end) steps, counted from 0, whose batches are excluded.
        guard: State of the guard's windows.
        evaluation_left: Whether a stop signal ended or preceded the evaluation of this step, which
            a resumed run repeats, or it was due at an excluded batch.
        plan: Version of the batch plan.
        data: RunData.fingerprint().
        versions: Packages that wrote the checkpoint.
    """

    global_batch: int
    num_samples: int
    seed: int = 0
    step: int = 0
    applied_steps: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    first_skip: int = -1
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
        if decision.apply:
            self.forget_skips()
        elif not decision.is_overflow:
            self.first_skip = self.step if self.first_skip < 0 else self.first_skip
            self.consecutive_skips += 1
        self.step += 1
        self.consumed_samples += num_samples
        self.applied_steps += decision.apply
        self.skipped_steps += not decision.apply

    def forget_skips(self) -> None:
        """Begin to count skips in a row anew."""
        self.consecutive_skips, self.first_skip = 0, -1

    def is_excluded(self) -> bool:
        """Whether the next step's batch is excluded from training."""
        return any(first <= self.step < end for first, end in self.passed_over)

    def exclude_batch(self, num_samples: int) -> None:
        """Count one step whose batch is excluded."""
        self.step += 1
        self.consumed_samples += num_samples
        self.skipped_steps += 1


class Requests(NamedTuple):
    """What this rank tells the others with the step's one reduction.

    Attributes:
        stop: Whether it was asked to stop.
        writing: Whether it still writes a checkpoint.
        save: Whether a user asked for a checkpoint.
    """

    stop: bool = False
    writing: bool = False
    save: bool = False


@dataclass(frozen=True)
class StepCounts:
    """What this rank adds to the step's one reduction, besides losses and the gradient norm.

    Attributes:
        stops: 1 where this rank was asked to stop.
        writing: 1 where this rank still writes a checkpoint.
        save_requests: 1 where a user asked for a checkpoint.
        tokens: Real tokens.
        bad: Samples left out or repaired.
        usable: Samples not left out.
    """

    stops: float
    writing: float
    save_requests: float
    tokens: float
    bad: float
    usable: float

    @classmethod
    def of(cls, batches: Sequence[Batch], requests: Requests) -> StepCounts:
        """Count this rank's micro-batches."""
        return cls(
            stops=requests.stop,
            writing=requests.writing,
            save_requests=requests.save,
            tokens=sum(batch.num_tokens for batch in batches),
            bad=sum(len(batch.bad) for batch in batches),
            usable=sum(int(batch.real.sum()) for batch in batches),
        )


@dataclass(frozen=True)
class SharedNumbers:
    """Result of the reduction: the same on every rank, so that all ranks decide alike.

    Attributes:
        sums: Sums of the objective, by name.
        num_nonfinite_losses: Micro-batches whose loss was not finite.
        grad_norm: Global norm before clipping.
        counts: StepCounts, added up.
    """

    sums: dict[str, float]
    num_nonfinite_losses: int
    grad_norm: float
    counts: StepCounts


@dataclass(frozen=True)
class StepReport:
    """What a step did: the one value that logs, schedule and stability policy read.

    Attributes:
        lr: Learning rate of the step.
        shared: Sums over the ranks and the gradient norm.
        decision: Whether the step was applied.
        num_samples: Number of samples of the global batch.
        layer_stats: Statistics of every layer where they were due.
        losses: Losses of this rank's micro-batches, on the device.
        micro_batches: Micro-batches of this rank.
    """

    lr: float
    shared: SharedNumbers
    decision: StepDecision
    num_samples: int
    layer_stats: LayerStats | None
    losses: list[Tensor]
    micro_batches: list[Batch]

    @property
    def loss(self) -> float:
        """Loss of the global batch."""
        return self.shared.sums["loss"]

    @property
    def batch(self) -> Batch:
        """Any micro-batch of the step: epoch, index and counts are those of the global batch."""
        return self.micro_batches[0]

    @property
    def stop_requested(self) -> bool:
        """Whether any rank was asked to stop."""
        return self.shared.counts.stops > 0

    @property
    def save_requested(self) -> bool:
        """Whether a user asked for a checkpoint."""
        return self.shared.counts.save_requests > 0

    @property
    def write_in_progress(self) -> bool:
        """Whether any rank still writes a checkpoint."""
        return self.shared.counts.writing > 0
