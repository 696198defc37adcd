"""The folder of a run: its lock, logs, events and what the screen shows (its checkpoints:
checkpointer.py).
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mmldlm.checkpoints.commit import try_longest
from mmldlm.checkpoints.init_from import InitReport
from mmldlm.checkpoints.manifest import ENGINE_FOLDER
from mmldlm.config.load import to_yaml, with_absolute_paths
from mmldlm.config.schema import Config
from mmldlm.data.run_data import RunData
from mmldlm.distributed import error_reporting
from mmldlm.engines.base import Engine
from mmldlm.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    Interrupted,
    MmldlmError,
    StabilityStop,
    UserError,
)
from mmldlm.observe.console import Console, link_latest, train_log_path
from mmldlm.observe.layer_stats import LayerStats
from mmldlm.observe.plots import LossCurve, plot_run
from mmldlm.stability.skipped_steps import bad_micro_batches, save_skipped_step
from mmldlm.tasks.base import Task, ValidationRun
from mmldlm.training.run_folder import (
    EVALUATIONS,
    LAYERS,
    STEPS,
    LogFiles,
    RunLock,
    check_no_checkpoints,
)
from mmldlm.training.start_summary import setting_warnings, summary
from mmldlm.training.state import TrainingState
from mmldlm.utils.atomic_files import write_text
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.formatting import first_line, join_some

if TYPE_CHECKING:
    from mmldlm.training.state import StepReport


def engine_folders(engine: Engine) -> list[str]:
    """Return the folders below a checkpoint that the engine writes to."""
    return [ENGINE_FOLDER, *(f"{ENGINE_FOLDER}/{name}" for name in engine.folders)]


class RunLogger:
    """The logs of a run. Rank 0 owns them; on other ranks most methods do nothing.

    Attributes:
        progress: the screen and its log file.
        lock: of the run's folder.
        last_reasons: why the last steps were skipped.
    """

    def __init__(
        self, task: Task, config: Config, data: RunData, engine: Engine, state: TrainingState
    ):
        self.task = task
        self.config, self.data, self.engine, self.state = config, data, engine, state
        self.run_dir = config.run_dir()
        self.is_main = engine.rank == 0
        self.last_reasons: list[str] = []
        self.lock, self._lock_lost = RunLock(self.run_dir), False
        self._reported_validation: set[int] = set()  # ids of bad samples
        self._files: LogFiles | None = None  # on rank 0, while they are open

    # -- opening
    # ---------------------------------------------------------------------------------------------

    def acquire_lock(self, heartbeat: Callable[[], None]) -> None:
        """Lock the folder for this job, before anything of it is read. Collective.

        Args:
            heartbeat: called by rank 0 while it waits for a job that may have exited.

        Raises:
            UserError: on every rank, when another job trains there, or did so and saved what would
                be overwritten.
        """
        self._on_main_rank_then_agree(lambda: self._acquire_lock(heartbeat))

    def _acquire_lock(self, heartbeat: Callable[[], None]) -> None:
        if not self.is_main:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # The other ranks wait in a collective, which has its own time limit.
        timeout = self.config.engine.collective_timeout / 2
        self.lock.acquire(
            lambda note: error_reporting.log_line(f"warning: {note}"), heartbeat, timeout
        )
        check_no_checkpoints(self.config)
        try_longest(
            self.run_dir, self.config.training.num_train_steps, engine_folders(self.engine)
        )

    def _on_main_rank_then_agree(self, work: Callable[[], None]) -> None:
        failure: Exception | None = None
        try:
            work()
        except (
            MmldlmError,
            OSError,
        ) as error:  # a rank that raised alone would leave the others waiting
            failure = error
        if self.engine.all_agree(failure is None):
            return
        if not self.engine.all_agree(not isinstance(failure, Interrupted)):
            raise Interrupted(
                "stopped by a signal before the run's folder was opened; nothing had to be saved"
            )
        if isinstance(failure, MmldlmError):
            raise failure
        raise UserError(
            f"a folder for the run at {self.run_dir}",
            str(failure or "rank 0 could not open it (its message says why)"),
            "set logging.save_dir to a writable folder",
        )

    def open_logs(
        self,
        trainable: dict[str, tuple[int, int]],
        optimizer_groups: list[tuple[float, int]],
        resumed_from: Path | None,
        init_report: InitReport | None = None,
    ) -> None:
        """Open the logs and print the summary of the run. Collective.

        Args:
            trainable: group -> (trainable, all) parameters.
            optimizer_groups: (weight decay, elements) of each group of the optimizer.
            resumed_from: checkpoint that the run continues from.
            init_report: of training.init_from.

        Raises:
            MmldlmError: on every rank, when rank 0 could not open the logs or wandb.
        """

        def work() -> None:
            self._open_screen()
            if self.is_main:
                self._open_files(resumed_from is not None)
                self._print_start(trainable, optimizer_groups, resumed_from, init_report)

        self._on_main_rank_then_agree(work)

    def _open_screen(self) -> None:
        config = self.config
        path = (
            train_log_path(self.run_dir, int_from_env("GROUP_RANK", 0)) if self.is_main else None
        )
        self.progress = Console(
            config.training.num_train_steps,
            enabled=self.is_main,
            log_freq=config.logging.log_freq,
            log_file=path,
            start_step=self.state.step,
            metrics=self.task.metrics_of(config),
        )
        if path is not None:
            with contextlib.suppress(OSError):  # a file system without links
                link_latest(path)

    def _open_files(self, is_resumed: bool) -> None:
        write_text(self.run_dir / "config.yaml", to_yaml(with_absolute_paths(self.config)))
        self._files = LogFiles(
            self.run_dir, self.config, self.state, is_resumed, self.progress.warning
        )

    def _print_start(
        self,
        trainable: dict[str, tuple[int, int]],
        optimizer_groups: list[tuple[float, int]],
        resumed_from: Path | None,
        init_report: InitReport | None,
    ) -> None:
        for line in summary(
            self.task, self.data, self.engine, self.state.global_batch, trainable, optimizer_groups
        ):
            self.progress.message(line)
        for message in [] if init_report is None else init_report.messages():
            self.progress.message(f"weights  {message}")
        if resumed_from is not None:
            self.progress.message(f"resumed  at step {self.state.step} from {resumed_from}")
        for warning in setting_warnings(self.task, self.config, is_fresh=resumed_from is None):
            self.progress.warning(warning)
        losses = [
            LossCurve(metric.name, metric.label or metric.name, metric.evaluation or metric.name)
            for metric in self.task.metrics_of(self.config)
            if metric.is_loss
        ]
        kind, source = "start" if resumed_from is None else "resume", str(resumed_from or "")
        self.event(kind, step=self.state.step, source=source, task=self.config.task, losses=losses)

    # -- while it runs
    # ---------------------------------------------------------------------------------------------

    def log_step(self, report: StepReport) -> None:
        """Write the record of the step that the state counted last."""
        decision, shared, batch = report.decision, report.shared, report.batch
        if not decision.apply:
            self.last_reasons = [*self.last_reasons[-4:], decision.reason]
        if self._files is None:
            return
        record = {
            "epoch": batch.epoch,
            "step": self.state.step,
            "batch_in_epoch": batch.index,
            "loss": report.loss,
            "lr": report.lr,
            **{
                metric.name: metric.value(shared.sums, batch.counts)
                for metric in self.task.metrics_of(self.config)
            },
            "grad_norm": shared.grad_norm,
            **{key: value for key, value in report.cost.items() if value is not None},
            "samples": self.state.consumed_samples,
            "bad_samples": int(shared.counts.bad),
            "skipped": not decision.apply,
            **(
                {"loss_scale": self.engine.loss_scale}
                if self.config.training.dtype == "fp16"
                else {}
            ),
        }
        self.renew_lock()
        self._files.write(STEPS, record)
        self.progress.update(record)
        self._files.to_wandb(record)
        if decision.apply and decision.reason:
            figures = {"grad_norm": str(shared.grad_norm), "loss": str(report.loss)}
            self.event("spike", step=self.state.step, reason=decision.reason, **figures)
            self.progress.warning(f"step {self.state.step} seen: {decision.reason}")

    def log_skip(self, report: StepReport, micro_batches: list[dict]) -> None:
        """Write the event of a skipped step, and the record that `mmldlm replay` reruns (rank 0).

        Args:
            micro_batches: what collect_step_record returned.
        """
        if not self.is_main:
            return
        step, decision, loss, grad_norm = (
            self.state.step,
            report.decision,
            report.loss,
            report.shared.grad_norm,
        )
        bad = [
            {key: entry[key] for key in ("rank", "host", "micro", "ids")}
            for entry in bad_micro_batches(micro_batches)
        ]
        path = None
        try:
            if not decision.is_overflow:
                path = save_skipped_step(self.run_dir, self._skip_record(report, micro_batches))
        except OSError as error:
            self.progress.warning(
                f"step {step}: its record for replay could not be saved: {error}"
            )
        figures = {"grad_norm": str(grad_norm), "loss": str(loss), "bad_micro_batches": bad}
        figures |= {} if path is None else {"case": str(path.relative_to(self.run_dir))}
        self.event(
            "overflow" if decision.is_overflow else "skip",
            step=step,
            reason=decision.reason,
            **figures,
        )
        ranks = sorted({entry["rank"] for entry in bad})
        rank_suffix = f" (rank {', '.join(map(str, ranks))})" if ranks else ""
        hint = (
            f"; `mmldlm replay {self.run_dir} {step}` traces its cause" if path is not None else ""
        )
        message = f"step {step} skipped on all ranks: {decision.reason}{rank_suffix}{hint}"
        if decision.is_overflow or (math.isfinite(loss) and 0 <= grad_norm < math.inf):
            self.progress.warning(message)  # fp16 adjusts its loss scale, or a spike
        else:
            self.progress.error(message)

    def _skip_record(self, report: StepReport, micro_batches: list[dict]) -> dict:
        state, training, batch = self.state, self.config.training, report.batch
        return {
            "step": state.step,
            "reason": report.decision.reason,
            "loss": report.loss,
            "grad_norm": report.shared.grad_norm,
            "epoch": batch.epoch,
            "batch_in_epoch": batch.index,
            "global_batch": state.global_batch,
            "world_size": self.engine.world_size,
            "accum": training.grad_accum_steps,
            "dtype": training.dtype,
            "loss_scale": self.engine.loss_scale,
            "lr_scale": state.lr_scale,
            "passed_over": state.passed_over,
            "micro_batches": micro_batches,
            "config": with_absolute_paths(self.config).model_dump(mode="json"),
        }

    def log_layer_stats(self, stats: LayerStats) -> None:
        """Write layer statistics; name parameters that never had a gradient, once."""
        if self._files is None:
            return
        self._files.write(LAYERS, stats.record())
        self._files.to_wandb(stats.flat_record(), prefix="layers/")
        if stats.dead:
            self.event("dead_parameters", step=stats.step, names=stats.dead)
            names = join_some(stats.dead)
            self.progress.warning(
                f"step {stats.step}: these parameters never had a gradient: {names}"
            )

    def log_bad_samples(self, bad: list[dict], validation: bool = False) -> None:
        """Write an event and a warning for every sample that any rank left out or repaired.
        Collective.

        Args:
            bad: Batch.bad of this rank.
            validation: evaluation samples; each is reported once per run.
        """
        found = [
            {**sample, "rank": self.engine.rank, "host": socket.gethostname()} for sample in bad
        ]
        gathered = [found]
        if self.engine.world_size > 1:
            gathered = [None] * self.engine.world_size
            torch.distributed.all_gather_object(gathered, found)
        for sample in (sample for part in gathered for sample in part) if self.is_main else ():
            if validation and sample["id"] in self._reported_validation:
                continue
            split = self.data.validation if validation else self.data.train
            file, row = self.data.locate(split, sample["id"])
            self.event("bad_sample", step=self.state.step, file=file, row=row, **sample)
            what = "repaired in" if sample.get("repaired") else "left out of"
            where = f"{'the evaluation at ' if validation else ''}step {self.state.step}"
            self.progress.warning(f"sample {sample['id']} {what} {where}: {sample['reason']}")
            if validation:
                self._reported_validation.add(sample["id"])

    def too_many_bad_samples_error(self, reason: str) -> StabilityStop:
        """Return the error that ends the run on every rank because too many samples are bad."""
        self.event("stability_stop", step=self.state.step, reason=reason)
        return StabilityStop(
            f"stopped at step {self.state.step}: {reason}. Samples, files and reasons:"
            f" {self.run_dir / 'events.jsonl'} (bad_sample). Last checkpoint:"
            f" {self.run_dir / 'latest'}. Check the storage of {self.data.source} and the data"
            " itself (`mmldlm verify-data` for a store), then add training.resume=auto."
        )

    def log_validation(self, validation: ValidationRun) -> None:
        """Print what an evaluation covers (rank 0)."""
        if self.is_main:
            self.progress.message(
                f"eval     {validation.num_samples:,} of {validation.num_available:,} validation"
                f" samples each {self.config.logging.eval_freq:,} steps"
                " (data.max_validation_samples)"
            )

    def log_evaluation(self, values: dict[str, float]) -> None:
        """Write and print the validation metrics of the present step."""
        if self._files is None:
            return
        self._files.write(EVALUATIONS, {"step": self.state.step, **values})
        self._files.to_wandb({"step": self.state.step, **values}, prefix="eval/")
        figures = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        self.progress.message(f"eval     step {self.state.step}: {figures}")

    def log_note(self, text: str) -> None:
        """Print a line and write it as an event (rank 0)."""
        if self.is_main:
            self.progress.message(f"note     {text}")
            self.event("note", text=text)

    def event(self, kind: str, **values) -> None:
        """Append an event to events.jsonl (rank 0)."""
        if self._files is not None:
            self.renew_lock()
            self._files.event(kind, **values)

    def truncate_logs(self) -> None:
        """Drop records after the state's step, after a rollback."""
        self.last_reasons = []
        if self._files is not None:
            self._files.truncate()

    def renew_lock(self) -> None:
        """Show other jobs that this one is alive (rank 0); every record does so, too."""
        if self.is_main and not self.lock.renew() and not self._lock_lost:
            self._lock_lost = True
            self.progress.warning(
                f"{self.lock.path} does not belong to this job any more: if another job trains"
                " here, end one of them"
            )

    # -- the end
    # ---------------------------------------------------------------------------------------------

    def log_end(self, kind, error: BaseException | None, trace) -> None:
        """Log the error that ends the run, and the end; called by an ExitStack."""
        if self._files is None or error is None:
            return
        is_agreed = isinstance(error, MmldlmError)
        message = str(error) if is_agreed else f"{type(error).__name__}: {error}"
        if not isinstance(error, Interrupted):
            self.progress.error(message, on_screen=False)  # main() prints it
        self._end(error.exit_code if is_agreed else EXIT_FAILED, message)

    def close(
        self,
        exit_code: int = EXIT_DONE,
        reason: str = "",
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Draw the plots, log how the run ended, and close the logs. Nothing of it changes how the
        run ends.

        Args:
            exit_code: of the process.
            stop: whether the process was asked to end.
        """
        if self._files is None:
            return
        if self.config.logging.plot:
            try:
                self.progress.message(f"plot     {plot_run(self.run_dir)}")
            except (
                Exception
            ) as error:  # the run is finished and saved; `mmldlm plot` can draw later
                reason_of_plot = (
                    str(error) if isinstance(error, (MmldlmError, OSError)) else first_line(error)
                )
                self.progress.warning(f"no plot: {reason_of_plot}")
        self._files.finish_wandb(exit_code, stop)
        self._end(exit_code, reason)
        self.lock.release()

    def _end(self, exit_code: int, reason: str) -> None:
        self.event("end", step=self.state.step, exit_code=exit_code, reason=reason)
        self._files.close()
        self.progress.close()
        self._files = None
