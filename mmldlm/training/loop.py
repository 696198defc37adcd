"""The training loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from mmldlm.config.schema import Config
from mmldlm.errors import EXIT_INTERRUPTED, Interrupted
from mmldlm.stability.audit import audit_on_all_ranks
from mmldlm.stability.rollback import (
    RollbackReason,
    needs_rollback,
    no_step_applied_error,
    stability_stop_error,
)
from mmldlm.stability.skipped_steps import gather_micro_batches
from mmldlm.training.samples import draw_samples
from mmldlm.training.session import Session
from mmldlm.training.state import StepReport, TrainingState
from mmldlm.training.step import train_step
from mmldlm.utils.resources import release_freed_memory

FIRST_STEP_TIMEOUT_FACTOR = 3.0  # the first step compiles, builds groups and imports


def train(session: Session) -> None:
    """Train until the last step, a stop signal, or a stability stop. Collective over all ranks.

    Raises:
        Interrupted: on every rank, when a signal ended the run.
        StabilityStop: on every rank, when no rollback or no checkpoint is left, too many samples
            are unusable, or the last step is done and none was applied.
    """
    state, checkpointer = session.state, session.checkpointer
    num_steps = num_applied = 0
    schedule = SaveSchedule(session.config)
    batches = session.batches()
    session.engine.module.train()
    timeout_factor = FIRST_STEP_TIMEOUT_FACTOR
    interrupted = False
    # The run that this one continues may have left its last evaluation to it.
    if state.evaluation_left:
        interrupted = not evaluate(session)
        session.enter_phase("save")
        # With the evaluation, for checkpoints.keep_best; and the next one need not evaluate again.
        # At once, for a run that is done has no step that waits for the writing.
        if not interrupted and checkpointer.save():
            checkpointer.finish_save()

    while state.step < session.num_steps and not interrupted:
        with session.phase("data"):
            session.profiler.before(state.step + 1)
            micro_batches = next(batches)
        session.enter_phase("step", timeout_factor)
        # A rollback may have decided not to train on this batch again.
        if state.is_excluded():
            state.exclude_batch(num_samples=len(session.plan.batch(state.step).ids))
            session.run.folder.event("passed_over", step=state.step)
            schedule.mark_due(state.step)
            if state.step % session.config.logging.eval_freq == 0:
                state.evaluation_left = True
            continue

        report = train_step(session, micro_batches, session.requests)
        num_steps, num_applied = num_steps + 1, num_applied + report.decision.apply
        log_report(session, report)
        if (data_failure := session.guard.bad_samples.check()) is not None:
            checkpointer.finish_save()
            raise session.logger.too_many_bad_samples_error(data_failure)

        due = schedule.due(state, report)
        reason = rollback_reason(session, audit=due.audit)
        if reason is not None:
            with session.phase("load", section="checkpoint"):
                roll_back(session, reason)
            batches = session.batches()
            schedule.reset()
            interrupted = report.stop_requested or session.stop.agreed(session.engine)
            continue
        timeout_factor = 1.0
        interrupted = evaluate_and_save(session, due, report)
        schedule.clear_if_saved(due)

    # The workers end here: a worker that is killed at exit looks like an accident.
    batches.close()
    # One bad batch at the end of a run that was resumed for it is not a failure.
    trained_nothing = num_applied == 0 and (num_steps > 1 or state.applied_steps == 0)
    finish(session, interrupted, trained_nothing and state.step > 0)


def evaluate_and_save(session: Session, due: Due, report: StepReport) -> bool:
    """Commit what was written meanwhile, evaluate and save what is due. Collective.

    Returns:
        True, on every rank, where a signal asks the run to end.
    """
    state, checkpointer, interrupted = session.state, session.checkpointer, report.stop_requested
    if checkpointer.has_uncommitted and not report.write_in_progress:
        with session.timer.section("checkpoint"):
            checkpointer.finish_save()
    # A preempted job has little time, so save before evaluating.
    state.evaluation_left = due.evaluate and interrupted
    if due.evaluate and not interrupted:
        with session.timer.section("evaluation"):
            interrupted = not evaluate(session)
    session.enter_phase("save")
    if due.is_last or interrupted:
        checkpointer.save_before_end()
    elif due.save:
        with session.timer.section("checkpoint"):
            checkpointer.save()
        # Saving may have taken long.
        interrupted = session.stop.agreed(session.engine)
    if due.save or due.evaluate:
        release_freed_memory()  # 20 to 50 ms
    return interrupted


def finish(session: Session, interrupted: bool, trained_nothing: bool) -> None:
    """Save what is not saved yet, and close the logs. Collective.

    Args:
        trained_nothing: Whether every step was skipped, here or in the whole run; the same on
            every rank.

    Raises:
        Interrupted: on every rank, when a signal ended the run.
        StabilityStop: on every rank, when the run is done and trained nothing, or the weights to
            save are not finite.
    """
    state, checkpointer = session.state, session.checkpointer
    # The last batches were excluded, which are not audited as they pass, or a signal came during
    # a save.
    if checkpointer.saved_step != state.step:
        if (cause := rollback_reason(session, audit=True)) is not None:
            checkpointer.finish_save()  # an earlier, audited step may still be on its way
            stop_for(session, cause)
        interrupted = interrupted or not evaluate(session)
        session.enter_phase("save")
        checkpointer.finish_save()
        if checkpointer.saved_step != state.step:
            checkpointer.save_before_end()
    # Rank 0 draws plots and uploads; no rank waits for it.
    session.enter_phase("close", math.inf)
    is_done = state.step >= session.num_steps
    if not interrupted or (is_done and not state.evaluation_left):
        if is_done and trained_nothing:
            folder = session.run.folder
            error = no_step_applied_error(state.step, folder.path, session.logger.last_reasons)
            folder.event("stability_stop", step=state.step, reason="no step was applied")
            session.logger.close(error.exit_code, str(error), lambda: session.stop.received)
            raise error
        session.logger.close(stop=lambda: session.stop.received)
        return
    missing = ", without the last evaluation" if is_done else ""
    reason = f"stopped by a signal at step {state.step}{missing}; checkpoint saved"
    session.logger.close(EXIT_INTERRUPTED, reason, lambda: session.stop.received)
    raise Interrupted(f"{reason}: resume with training.resume=auto")


def evaluate(session: Session) -> bool:
    """Evaluate on the validation samples, and log samples of the model. Collective.

    Returns:
        False, on every rank, where a signal ended the evaluation.
    """
    session.enter_phase("evaluate")
    figures = session.validation.run(session.continue_evaluation)
    session.state.evaluation_left = figures is None
    if figures is None:
        return False
    session.logger.log_evaluation(figures)
    session.checkpointer.note_evaluation(figures)
    # The key is there on every rank or on none.
    if "bad_samples" in figures:
        session.logger.log_bad_samples(session.validation.bad, validation=True)
    session.enter_phase("sample")
    samples = draw_samples(session.run, session.engine, session.heartbeat.touch)
    session.logger.log_samples(samples)
    return True


def log_report(session: Session, report: StepReport) -> None:
    """Write everything that is logged of a step.

    Collective where samples were bad, or the step was skipped for another reason than an overflow.
    """
    logger, folder = session.logger, session.run.folder
    cost = session.timer.step(
        report.num_samples,
        report.shared.counts.tokens,
        {**report.shared.sums, **report.batch.counts},
        epoch=report.batch.epoch,
    )
    logger.log_step(report, cost)
    if (profile := session.profiler.after(session.state.step)) is not None:
        folder.message(f"profile  {profile}")
        folder.event("profile", **profile.record())
    if not report.decision.apply:
        micro_batches = []
        if not report.decision.is_overflow:  # of finite losses, and nothing that replay could find
            micro_batches = gather_micro_batches(
                session.engine, report.micro_batches, report.losses
            )
        logger.log_skip(report, micro_batches)
    if report.layer_stats is not None:
        logger.log_layer_stats(report.layer_stats)
    if report.shared.counts.bad:
        logger.log_bad_samples([sample for batch in report.micro_batches for sample in batch.bad])


def rollback_reason(session: Session, audit: bool) -> RollbackReason | None:
    """Return why the run cannot continue from its present state; None: it can.

    Collective where `audit`.
    """
    nonfinite = audit_on_all_ranks(session.engine, session.average) if audit else {}
    state = session.state
    return needs_rollback(
        session.config.stability,
        state.step,
        state.consecutive_skips,
        state.first_skip,
        nonfinite,
    )


def roll_back(session: Session, cause: RollbackReason) -> None:
    """Return to the newest valid checkpoint with a lower learning rate, and exclude the failing
    batches. Collective.

    The state is saved at once; otherwise a restart would repeat the rollback.

    Raises:
        StabilityStop: on every rank, when no rollback or no checkpoint is left.
    """
    state, config = session.state, session.config.stability
    checkpointer, folder = session.checkpointer, session.run.folder
    checkpointer.finish_save()
    num_rollbacks, failed_step = state.num_rollbacks, state.step
    path = checkpointer.find_rollback() if num_rollbacks < config.max_rollbacks else None
    if path is None:
        stop_for(session, cause)
    passed_over = list(state.passed_over)
    if cause.first_skip is not None:
        passed_over.append([cause.first_skip, failed_step])
    lr_scale = state.lr_scale * config.rollback_lr_factor
    checkpointer.load(path)
    state.num_rollbacks, state.lr_scale = num_rollbacks + 1, lr_scale
    state.passed_over = passed_over
    state.forget_skips()
    state.rolled_back_to, state.applied_at_rollback = state.step, state.applied_steps

    session.logger.forget_skips()
    for note in checkpointer.set_aside_newer():
        folder.note(note)
    fields = {
        "from_step": failed_step,
        "to_step": state.step,
        "lr_scale": lr_scale,
        "passed_over": passed_over,
    }
    fields |= cause.event_fields()
    folder.event("rollback", step=state.step, reason=cause.reason, path=str(path), **fields)
    folder.warning(
        f"rollback from step {failed_step} to {state.step}: {cause.reason}; learning rate x"
        f" {lr_scale:g}"
    )
    if checkpointer.save():
        checkpointer.finish_save()


def stop_for(session: Session, cause: RollbackReason) -> NoReturn:
    """End the run, whose state cannot be trained on, without saving it.

    Raises:
        StabilityStop: on every rank.
    """
    folder, num_rollbacks = session.run.folder, session.state.num_rollbacks
    folder.event("stability_stop", step=cause.step, reason=cause.reason, **cause.event_fields())
    raise stability_stop_error(
        cause,
        num_rollbacks,
        folder.path,
        session.logger.last_reasons,
        session.checkpointer.saved_step,
    )


@dataclass(frozen=True)
class Due:
    """What follows a step."""

    is_last: bool
    save: bool
    evaluate: bool
    audit: bool


class SaveSchedule:
    """When to save, evaluate and audit: a function of numbers that all ranks share.

    Attributes:
        is_due: Whether a checkpoint is due: now, or since steps that were skipped or excluded.
    """

    def __init__(self, config: Config):
        self.config = config
        self.is_due = False

    def mark_due(self, step: int) -> None:
        """Remember a checkpoint that is due at this step, which may not allow it."""
        self.is_due = self.is_due or step % self.config.logging.save_freq == 0

    def due(self, state: TrainingState, report: StepReport) -> Due:
        """Decide what follows the step that was counted last."""
        logging, step = self.config.logging, state.step
        self.mark_due(step)
        is_last = step == self.config.training.num_train_steps
        # Left by a step without training.
        evaluate = is_last or step % logging.eval_freq == 0 or state.evaluation_left
        # Not amid skips: the weights may be their cause, and the checkpoint would push out a good
        # one.
        can_save = self.is_due and state.consecutive_skips == 0
        save = is_last or report.stop_requested or report.save_requested or can_save
        # Audit before an evaluation too: a signal may cut it short, and then the weights are
        # saved.
        audit = save or evaluate or step % self.config.stability.audit_freq == 0
        return Due(is_last, save, evaluate, audit)

    def clear_if_saved(self, due: Due) -> None:
        """Forget what was due after it was saved."""
        self.is_due = self.is_due and not due.save

    def reset(self) -> None:
        """Forget what was due: a rollback has saved a checkpoint."""
        self.is_due = False
