"""What the run does when skipping is not enough: back to the last good checkpoint, or stop with a report."""

from __future__ import annotations

from dataclasses import dataclass

from mmldlm.config.schema import StabilityConfig
from mmldlm.errors import StabilityStop


@dataclass(frozen=True)
class RollbackReason:
    """Why a run cannot go on from where it is.

    Attributes:
        step: the step it was found at. reason: one sentence. first_bad: 0-based step of the first batch to pass over on
            the way back (None: no batch is to blame). tensors: name -> non-finite elements, of a bad audit.
    """

    step: int
    reason: str
    first_bad: int | None = None
    tensors: dict[str, int] | None = None


def needs_rollback(config: StabilityConfig, step: int, consecutive_skips: int, bad_state: dict[str, int]):
    """Trouble, or None. A function of what all ranks share."""
    if bad_state:
        names = ", ".join(f"{name} ({count})" for name, count in list(bad_state.items())[:4])
        more = f" and {len(bad_state) - 4} more" if len(bad_state) > 4 else ""
        return RollbackReason(step, f"non-finite values in the training state: {names}{more}", None, bad_state)
    if consecutive_skips >= config.max_consecutive_skips:
        reason = f"{consecutive_skips} steps in a row were skipped"
        return RollbackReason(step, reason, step - consecutive_skips)
    return None


def stability_stop_error(
    trouble: RollbackReason, num_rollbacks: int, run_dir, last_reasons: list[str], saved_step: int | None
) -> StabilityStop:
    """The error that ends the run on every rank with exit 4: what happened, when, and what to try.

    Args:
        saved_step: of the run's newest checkpoint; None before the first.
    """
    tried = f"after {num_rollbacks} rollback(s)" if num_rollbacks else "with no rollback left or no checkpoint to go to"
    seen = "; ".join(dict.fromkeys(last_reasons)) or "none"
    replay = (
        f" `mmldlm replay {run_dir} last` names the module and the samples of the last skip." if last_reasons else ""
    )
    last = "No checkpoint was saved yet" if saved_step is None else f"The last checkpoint is of step {saved_step}"
    go_on = "start again" if saved_step is None else "add training.resume=auto"
    return StabilityStop(
        f"stopped at step {trouble.step}: {trouble.reason}, {tried}. The last skips: {seen}. No skipped step moved the "
        f"weights. {last}; what happened, with samples and tensors: "
        f"{run_dir / 'events.jsonl'}.{replay} Lower optimizer.lr or optimizer.grad_clip_norm, check the data with "
        f"`mmldlm verify-data`, then {go_on}."
    )
