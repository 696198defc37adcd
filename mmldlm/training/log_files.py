"""The JSONL logs of a run and wandb, as rank 0 writes them: no error of theirs ends the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmldlm.config.schema import Config
from mmldlm.observe.jsonl_log import JsonlLog
from mmldlm.observe.wandb_logger import WandbError, open_wandb
from mmldlm.training.state import TrainingState
from mmldlm.utils.formatting import first_line

STEPS, EVALUATIONS, LAYERS, EVENTS = (
    "training_log.jsonl",
    "eval_log.jsonl",
    "gradient_log.jsonl",
    "events.jsonl",
)


class LogFiles:
    """The open logs.

    Args:
        run_dir: folder of the run.
        state: records after its step are cut off.
        warn: prints a warning.

    Raises:
        OSError: a log cannot be opened.
        MmldlmError: wandb cannot be opened.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        state: TrainingState,
        is_resumed: bool,
        warn: Callable[[str], None],
    ):
        self.state, self._warn = state, warn
        self._failing: set[str] = set()  # logs whose last record could not be written
        self._logs = {
            STEPS: JsonlLog(run_dir / STEPS, state.step),
            # An evaluation that a signal cut short is repeated.
            EVALUATIONS: JsonlLog(run_dir / EVALUATIONS, state.step - state.evaluation_left),
            LAYERS: JsonlLog(run_dir / LAYERS, state.step),
            EVENTS: JsonlLog(run_dir / EVENTS),
        }
        settings = config.logging.wandb
        self._wandb = open_wandb(
            settings.mode,
            settings.project,
            config.logging.run_name,
            run_dir,
            config.model_dump(),
            is_resumed,
        )

    def write(self, name: str, record: dict) -> None:
        """Append a record; an error is reported once per log until a write succeeds again."""
        try:
            self._logs[name].write(record)
        # A full disk, a closed log or a value that cannot be written does not end a training.
        except Exception as error:
            if name not in self._failing:
                self._failing.add(name)
                reason = error if isinstance(error, OSError) else first_line(error)
                self._warn(
                    f"step {self.state.step}: cannot write to {name}; will retry with the next"
                    f" record: {reason}"
                )
        else:
            self._failing.discard(name)

    def event(self, kind: str, **values) -> None:
        """Append an event."""
        self.write(EVENTS, {"event": kind, **values})

    def to_wandb(self, record: dict, prefix: str = "") -> None:
        """Log to wandb; its first error of any kind ends logging there, not the run."""
        if self._wandb is None:
            return
        try:
            self._wandb.log(record, prefix)
        except Exception as error:
            self._wandb = None
            self._report_wandb_error(error)

    def finish_wandb(self, exit_code: int, stop: Callable[[], bool]) -> None:
        """Upload what is left, which may take long.

        Args:
            stop: whether the process was asked to end; then it takes a few seconds only.
        """
        tracker, self._wandb = self._wandb, None
        if tracker is None:
            return
        try:
            tracker.finish(exit_code, stop)
        except Exception as error:
            self._report_wandb_error(error)

    def _report_wandb_error(self, error: Exception) -> None:
        reason = (
            str(error) if isinstance(error, WandbError) else f"{type(error).__name__}: {error}"
        )
        self.event("wandb_failed", step=self.state.step, reason=reason)
        self._warn(f"step {self.state.step}: logging to wandb ended ({reason}); the run continues")

    def truncate(self) -> None:
        """Drop records after the state's step; a log stays as it is where the disk has no room to
        rewrite it.
        """
        for name in (STEPS, EVALUATIONS, LAYERS):
            log = self._logs[name]
            try:
                truncated = JsonlLog(log.path, self.state.step)
            except OSError as error:
                self._warn(f"{name} keeps its records from before the rollback: {error}")
                continue
            self._close(log)
            self._logs[name] = truncated

    def close(self) -> None:
        """Close all logs."""
        for log in self._logs.values():
            self._close(log)

    def _close(self, log: JsonlLog) -> None:
        try:
            log.close()
        except (OSError, ValueError) as error:  # records that a full disk kept in memory
            self._warn(f"the last records of {log.path.name} could not be written: {error}")
