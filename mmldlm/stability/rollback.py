"""Decide on a rollback or a stop when skipping steps is not enough."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.config.schema import StabilityConfig
from mmldlm.errors import StabilityStop
from mmldlm.utils.formatting import join_some
from mmldlm.utils.run_files import EVENTS


@dataclass(frozen=True)
class RollbackReason:
    """Why a run cannot continue from its current state.

    Attributes:
        step: Step of the finding.
        reason: One sentence.
        first_skip: 0-based step of the first batch to exclude after the rollback; None if no batch
            is responsible.
        tensors: Number of non-finite elements by name, if an audit failed.
    """

    step: int
    reason: str
    first_skip: int | None = None
    tensors: dict[str, int] | None = None

    def event_fields(self) -> dict[str, Any]:
        """Return the fields about tensors, at most 50 of them, of the events of this cause."""
        return {} if self.tensors is None else {"tensors": dict(list(self.tensors.items())[:50])}


def needs_rollback(
    config: StabilityConfig,
    step: int,
    consecutive_skips: int,
    first_skip: int,
    nonfinite: dict[str, int],
) -> RollbackReason | None:
    """Return why a rollback is needed, or None. All arguments are equal on all ranks.

    Args:
        consecutive_skips: That of TrainingState, as `first_skip`: between the first and the last
            of these steps may lie others, which do not count.
        nonfinite: Result of the audit.
    """
    if nonfinite:
        names = join_some(f"{name} ({count})" for name, count in nonfinite.items())
        return RollbackReason(
            step, f"non-finite values in the training state: {names}", None, nonfinite
        )
    if consecutive_skips >= config.max_consecutive_skips:
        reason = f"{consecutive_skips} steps in a row were skipped"
        return RollbackReason(step, reason, first_skip)
    return None


def stability_stop_error(
    cause: RollbackReason,
    num_rollbacks: int,
    run_dir: Path,
    last_reasons: list[str],
    saved_step: int | None,
) -> StabilityStop:
    """Return the error that ends the run on every rank with exit code 4.

    Args:
        saved_step: Step of the newest checkpoint; None before the first.
    """
    tried = (
        f"after {num_rollbacks} rollback(s)"
        if num_rollbacks
        else "with no rollbacks left, or no checkpoint available"
    )
    skips = "; ".join(dict.fromkeys(last_reasons)) or "none"
    replay = (
        f" `mmldlm replay {run_dir} last` names the module and the samples of the last skip."
        if last_reasons
        else ""
    )
    last = (
        "No checkpoint was saved yet"
        if saved_step is None
        else f"The last checkpoint is that of step {saved_step}"
    )
    restart = "start again" if saved_step is None else "add training.resume=auto"
    return StabilityStop(
        f"stopped at step {cause.step}: {cause.reason}, {tried}. The last skips: {skips}. Skipped"
        f" steps did not change the weights. {last}; samples and tensors:"
        f" {run_dir / EVENTS}.{replay} Lower optimizer.lr or optimizer.grad_clip_norm,"
        f" check the data with `mmldlm verify-data`, then {restart}."
    )


def no_step_applied_error(step: int, run_dir: Path, last_reasons: list[str]) -> StabilityStop:
    """Return the error, with exit code 4, of a run that is done and whose weights no step has
    moved.
    """
    skips = "; ".join(dict.fromkeys(last_reasons)) or f"see {EVENTS}"
    return StabilityStop(
        f"all steps up to {step} are done, and none was applied: the weights are those of the"
        f" start. The last skips: {skips}. `mmldlm replay {run_dir} last` names the module and the"
        " samples. Correct the config or the data (`mmldlm verify-data`), then start again under"
        " another logging.run_name, or raise training.num_train_steps and add"
        " training.resume=auto."
    )
