"""The folder of a run: its logs and events, written while the loop runs (its checkpoints: run_checkpoints.py)."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mmldlm.checkpoints.commit import try_longest
from mmldlm.checkpoints.init_from import InitReport
from mmldlm.checkpoints.layout import ENGINE_FOLDER
from mmldlm.config.load import to_yaml, with_absolute_paths
from mmldlm.config.schema import Config
from mmldlm.data.batching.run_data import RunData
from mmldlm.distributed import error_reporting
from mmldlm.engines.base import Engine
from mmldlm.errors import EXIT_DONE, Interrupted, MmldlmError, StabilityStop, UserError
from mmldlm.observe.console import Console, link_latest, train_log_path
from mmldlm.observe.jsonl_log import JsonlLog
from mmldlm.observe.layer_stats import LayerStats
from mmldlm.observe.loss_plots import plot_run
from mmldlm.observe.wandb_logger import open_wandb
from mmldlm.stability.skipped_steps import bad_micro_batches, save_skipped_step
from mmldlm.tasks.base import Task, ValidationRun
from mmldlm.training.run_lock import RunLock, check_no_checkpoints
from mmldlm.training.state import TrainingState

if TYPE_CHECKING:
    from mmldlm.training.step import StepReport


def engine_folders(engine: Engine) -> list[str]:
    """Where below a checkpoint's folder the engine writes."""
    return [ENGINE_FOLDER, *(f"{ENGINE_FOLDER}/{name}" for name in engine.folders)]


class RunLogger:
    """The logs of a run. Rank 0 owns them."""

    def __init__(self, task: Task, config: Config, data: RunData, engine: Engine, state: TrainingState):
        self.task = task
        self.config, self.data, self.engine, self.state = config, data, engine, state
        self.run_dir = config.run_dir()
        self.is_main = engine.rank == 0
        self.last_reasons: list[str] = []
        self._bad_validation: set[int] = set()  # ids already told
        self._failing: set[str] = set()  # names of the logs whose last line could not be written
        self.lock, self._lock_lost = RunLock(self.run_dir), False
        self._is_open = False  # rank 0 has its logs open

    # -- opening -----------------------------------------------------------------------------------------------------

    def open(
        self,
        trainable: dict[str, tuple[int, int]],
        optimizer_groups: list[tuple[float, int]],
        resumed_from: Path | None,
        init_report: InitReport | None = None,
    ) -> None:
        """Start the logs and say what is about to happen. Collective.

        Args:
            trainable: group -> (trainable, all) parameters.
            optimizer_groups: (weight decay, elements) of each group of the optimizer.
            resumed_from: checkpoint that the run continues from.
            init_report: of training.init_from.

        Raises:
            MmldlmError: on every rank, when rank 0 could not open the logs or wandb.
        """
        self._on_main_rank_then_agree(lambda: self._open(trainable, optimizer_groups, resumed_from, init_report))

    def claim(self, beat: Callable[[], None]) -> None:
        """Take the folder for this job alone, before anything is read of it. Collective.

        Args:
            beat: called by rank 0 while it waits for a job that may be gone.

        Raises:
            UserError: on every rank, when another job trains there, or did so and has saved what would be overwritten.
        """
        self._on_main_rank_then_agree(lambda: self._claim(beat))

    def _claim(self, beat: Callable[[], None]) -> None:
        if not self.is_main:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # The others wait for rank 0 in a collective, which has its own time limit.
        self.lock.acquire(
            lambda note: error_reporting.log_line(f"warning: {note}"), beat, patience=self.config.engine.timeout / 2
        )
        check_no_checkpoints(self.config)
        try_longest(self.run_dir, self.config.training.num_train_steps, engine_folders(self.engine))

    def _on_main_rank_then_agree(self, work: Callable[[], None]) -> None:
        failure: Exception | None = None
        try:
            work()
        except (MmldlmError, OSError) as error:  # the ranks vote: one that left alone would leave the others waiting
            failure = error
        if self.engine.all_agree(failure is None):
            return
        if not self.engine.all_agree(not isinstance(failure, Interrupted)):
            raise Interrupted("stopped by a signal before the run's folder was opened; nothing had to be saved")
        if isinstance(failure, MmldlmError):
            raise failure
        raise UserError(
            f"a folder for the run at {self.run_dir}",
            str(failure or "rank 0 could not open it (its message says why)"),
            "set logging.save_dir to a folder that can be written to",
        )

    def _open(
        self,
        trainable: dict[str, tuple[int, int]],
        optimizer_groups: list[tuple[float, int]],
        resumed_from: Path | None,
        init_report: InitReport | None,
    ) -> None:
        config, state = self.config, self.state
        path = train_log_path(self.run_dir, int(os.environ.get("GROUP_RANK", 0))) if self.is_main else None
        self.progress = Console(
            config.training.num_train_steps,
            enabled=self.is_main,
            log_freq=config.logging.log_freq,
            log_file=path,
            start_step=state.step,
            metrics=self.task.metrics,
        )
        if not self.is_main:
            return
        with contextlib.suppress(OSError):  # a file system without links: the log itself is there
            link_latest(path)
        (self.run_dir / "config.yaml").write_text(to_yaml(with_absolute_paths(config)))
        self.log = JsonlLog(self.run_dir / "training_log.jsonl", state.step)
        # An evaluation that a signal cut short is repeated.
        self.evaluations = JsonlLog(self.run_dir / "eval_log.jsonl", state.step - state.evaluation_left)
        self.gradients = JsonlLog(self.run_dir / "gradient_log.jsonl", state.step)
        self.events = JsonlLog(self.run_dir / "events.jsonl")
        self._is_open = True
        wandb = config.logging.wandb
        self.wandb = open_wandb(
            wandb.mode,
            wandb.project,
            config.logging.run_name,
            self.run_dir,
            config.model_dump(),
            resumed_from is not None,
        )
        self._print_start(trainable, optimizer_groups)
        for message in [] if init_report is None else init_report.messages():
            self.progress.message(f"weights  {message}")
        if resumed_from is not None:
            self.progress.message(f"resumed  at step {state.step} from {resumed_from}")
        self._warn_of_settings(is_fresh=resumed_from is None)
        self.event("start" if resumed_from is None else "resume", step=state.step, source=str(resumed_from or ""))

    def _print_start(self, trainable: dict[str, tuple[int, int]], optimizer_groups: list[tuple[float, int]]) -> None:
        """Print what is about to be trained, on what and how."""
        config, engine, training = self.config, self.engine, self.config.training
        message = self.progress.message
        message(f"run      {self.run_dir} on {engine.describe()}, {engine.world_size} rank(s), {engine.device.type}")
        total = sum(count for _, count in trainable.values())
        groups = ", ".join(
            f"{group} {part / 1e6:.1f}M of {all_ / 1e6:.1f}M" for group, (part, all_) in trainable.items()
        )
        message(f"model    {total / 1e6:.1f}M parameters; trainable {groups} ({self.task.describe(config)})")
        message(f"data     {self.data.describe()}")
        for note in self.data.notes:
            message(f"data     {note}")
        global_batch = self.state.global_batch
        message(
            f"batch    {global_batch} = {training.train_batch_size} per rank x {training.grad_accum_steps} "
            f"accumulated x {engine.world_size} rank(s); {training.num_train_steps:,} steps = "
            f"{training.num_train_steps * global_batch / len(self.data.train_lengths):.2f} epochs; {training.dtype}"
        )
        optimizer = config.optimizer
        decays = ", ".join(f"weight decay {decay:g} on {size / 1e6:.1f}M" for decay, size in optimizer_groups)
        message(
            f"optim    AdamW, lr {optimizer.lr:g} after {optimizer.warmup_steps:,} steps of warm-up, "
            f"{optimizer.schedule} to {optimizer.min_lr:g}; {decays}"
        )

    def _warn_of_settings(self, is_fresh: bool) -> None:
        training, optimizer = self.config.training, self.config.optimizer
        for warning in self.task.warnings(self.config) if is_fresh else []:
            self.progress.warning(warning)
        if optimizer.warmup_steps >= training.num_train_steps:
            self.progress.warning(
                f"optimizer.warmup_steps={optimizer.warmup_steps} in a run of training.num_train_steps="
                f"{training.num_train_steps}: the learning rate never reaches optimizer.lr={optimizer.lr:g}"
            )

    # -- while it runs -----------------------------------------------------------------------------------------------

    def log_step(self, report: StepReport) -> None:
        """Write the record of the step that the state counted last."""
        decision, shared, batch = report.decision, report.shared, report.batch
        if not decision.apply:
            self.last_reasons = [*self.last_reasons[-4:], decision.reason]
        if not self.is_main:
            return
        record = {
            "epoch": batch.epoch,
            "step": self.state.step,
            "batch_in_epoch": batch.index,
            "loss": report.loss,
            "lr": report.lr,
            **{metric.name: metric.value(shared.sums, batch.counts) for metric in self.task.metrics},
            "grad_norm": shared.grad_norm,
            **{key: value for key, value in report.cost.items() if value is not None},
            "samples": self.state.consumed_samples,
            "bad_samples": int(shared.counts.bad),
            "skipped": not decision.apply,
            **({"loss_scale": self.engine.loss_scale} if self.config.training.dtype == "fp16" else {}),
        }
        self._write(self.log, record)
        self.progress.update(record)
        self._to_wandb(record)
        if decision.apply and decision.reason:
            figures = {"grad_norm": str(shared.grad_norm), "loss": str(report.loss)}
            self.event("spike", step=self.state.step, reason=decision.reason, **figures)
            self.progress.warning(f"step {self.state.step} seen: {decision.reason}")

    def log_skip(self, report: StepReport, micro_batches: list[dict]) -> None:
        """Write the event of a skipped step, and the record that `mmldlm replay` runs again (rank 0).

        Args:
            micro_batches: what collect_step_record returned.
        """
        if not self.is_main:
            return
        decision, batch = report.decision, report.batch
        loss, grad_norm = report.loss, report.shared.grad_norm
        state, training, reason = self.state, self.config.training, decision.reason
        bad = [
            {key: entry[key] for key in ("rank", "host", "micro", "ids")} for entry in bad_micro_batches(micro_batches)
        ]
        case = {
            "step": state.step, "reason": reason, "loss": loss, "grad_norm": grad_norm, "epoch": batch.epoch,
            "batch_in_epoch": batch.index, "global_batch": state.global_batch, "world_size": self.engine.world_size,
            "accum": training.grad_accum_steps, "dtype": training.dtype, "loss_scale": self.engine.loss_scale,
            "lr_scale": state.lr_scale, "passed_over": state.passed_over, "micro_batches": micro_batches,
            "config": with_absolute_paths(self.config).model_dump(mode="json"),
        }  # fmt: skip
        path = None
        try:
            path = None if decision.is_overflow else save_skipped_step(self.run_dir, case)
        except OSError as error:
            self.progress.warning(f"step {state.step}: its case could not be kept for replay: {error}")
        kept = {} if path is None else {"case": str(path.relative_to(self.run_dir))}
        told = {"grad_norm": str(grad_norm), "loss": str(loss), "bad_micro_batches": bad, **kept}
        self.event("overflow" if decision.is_overflow else "skip", step=state.step, reason=reason, **told)
        ranks = sorted({entry["rank"] for entry in bad})
        whose = f" (rank {', '.join(map(str, ranks))})" if ranks else ""
        how = f"; `mmldlm replay {self.run_dir} {state.step}` says where it was made" if path is not None else ""
        said = f"step {state.step} skipped on all ranks: {reason}{whose}{how}"
        if decision.is_overflow or (math.isfinite(loss) and 0 <= grad_norm < math.inf):
            self.progress.warning(said)  # fp16's loss scale finds its height, or a spike
        else:
            self.progress.error(said)

    def log_layer_stats(self, look: LayerStats) -> None:
        """Write what the layers showed at the present step; name parameters that never had a gradient, once."""
        if not self.is_main:
            return
        self._write(self.gradients, look.record())
        self._to_wandb(look.flat_record(), prefix="layers/")
        if look.dead:
            self.event("dead_parameters", step=look.step, names=look.dead)
            shown = ", ".join(look.dead[:4]) + (f" and {len(look.dead) - 4} more" if len(look.dead) > 4 else "")
            self.progress.warning(f"step {look.step}: these parameters never had a gradient: {shown}")

    def log_bad_samples(self, bad: list[dict], validation: bool = False) -> None:
        """An event and a warning for every sample that any rank masked out of this step. Collective.

        Args:
            bad: NoisedBatch.bad of this rank. validation: of the evaluation, whose samples are told once a run only,
                because they are the same every time.
        """
        found = [{**sample, "rank": self.engine.rank, "host": socket.gethostname()} for sample in bad]
        gathered = [found]
        if self.engine.world_size > 1:
            gathered = [None] * self.engine.world_size
            torch.distributed.all_gather_object(gathered, found)
        for sample in (sample for part in gathered for sample in part) if self.is_main else ():
            if validation and sample["id"] in self._bad_validation:
                continue
            split = self.data.validation if validation else self.data.train
            file, row = split.locate(sample["id"])
            self.event("bad_sample", step=self.state.step, file=str(file), row=row, **sample)
            what = "mended in" if sample.get("mended") else "left out of"
            where = f"{'the evaluation at ' if validation else ''}step {self.state.step}"
            self.progress.warning(f"sample {sample['id']} {what} {where}: {sample['reason']}")
            if validation:
                self._bad_validation.add(sample["id"])

    def too_many_bad_samples_error(self, reason: str) -> StabilityStop:
        """The error that ends the run on every rank because too many samples are bad."""
        self.event("stability_stop", step=self.state.step, reason=reason)
        return StabilityStop(
            f"stopped at step {self.state.step}: {reason}. Which samples, in which files and why: "
            f"{self.run_dir / 'events.jsonl'} (bad_sample). Last checkpoint: {self.run_dir / 'latest'}. Check the "
            f"storage of {', '.join(self.config.data.roots)} and `mmldlm verify-data`, then add training.resume=auto."
        )

    def truncate_logs(self) -> None:
        """After a rollback: the logs go on from the state's step."""
        self.last_reasons = []
        if self.is_main:
            self.log, self.evaluations, self.gradients = map(
                self._reopen_truncated, (self.log, self.evaluations, self.gradients)
            )

    def _reopen_truncated(self, log: JsonlLog) -> JsonlLog:
        """The log without what came after the state's step; as it is, where the disk has no room to cut it."""
        try:
            cut = JsonlLog(log.path, self.state.step)
        except OSError as error:
            self.progress.warning(f"{log.path.name} keeps its lines of before the rollback: {error}")
            return log
        self._close(log)
        return cut

    def _close(self, log: JsonlLog) -> None:
        try:
            log.close()
        except OSError as error:  # what a full disk kept waiting in memory
            self.progress.warning(f"the last lines of {log.path.name} could not be written: {error}")

    def log_validation(self, validation: ValidationRun) -> None:
        """Print what an evaluation covers (rank 0)."""
        if self.is_main:
            self.progress.message(
                f"eval     {validation.num_samples:,} of {validation.num_available:,} validation samples each "
                f"{self.config.logging.eval_freq:,} steps (data.max_validation_samples)"
            )

    def log_evaluation(self, values: dict[str, float]) -> None:
        """Write and show the validation metrics of the present step."""
        if not self.is_main:
            return
        self._write(self.evaluations, {"step": self.state.step, **values})
        self._to_wandb({"step": self.state.step, **values}, prefix="eval/")
        self.progress.message(
            f"eval     step {self.state.step}: " + ", ".join(f"{k} {v:.3f}" for k, v in values.items())
        )

    def note(self, text: str) -> None:
        """A line on the screen and in its log (rank 0)."""
        if self.is_main:
            self.progress.message(f"note     {text}")
            self.event("note", text=text)

    def event(self, kind: str, **values) -> None:
        """One line in events.jsonl (rank 0)."""
        if self.is_main:
            self._write(self.events, {"event": kind, **values})

    def _to_wandb(self, record: dict, prefix: str = "") -> None:
        """Errors of any kind are rank 0's alone; wandb's own process once gone, they would come at every step."""
        if self.wandb is None:
            return
        try:
            self.wandb.log(record, prefix)
        except Exception as error:
            self.wandb = None
            self._say_wandb_failed(error)

    def _say_wandb_failed(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.event("wandb_failed", step=self.state.step, reason=reason)
        self.progress.warning(f"step {self.state.step}: no more is logged to wandb ({reason}); the run goes on")

    def renew_lock(self) -> None:
        """Show other jobs that this one lives (rank 0); every line of a log does so, too."""
        if self.is_main and not self.lock.renew() and not self._lock_lost:
            self._lock_lost = True
            self.progress.warning(
                f"{self.lock.path} is no longer this job's: if another one trains in this folder, end one of them"
            )

    def _write(self, log: JsonlLog, record: dict) -> None:
        self.renew_lock()
        try:
            log.write(record)
        except OSError as error:  # a full disk, seen by rank 0 alone: training goes on, the lost lines are said once
            if log.path.name not in self._failing:
                self._failing.add(log.path.name)
                said = f"lines of {log.path.name} cannot be written (each line tries again): {error}"
                self.progress.warning(f"step {self.state.step}: {said}")
        else:
            self._failing.discard(log.path.name)

    def log_end(self, kind, error: BaseException | None, trace) -> None:
        """Log the error that ends the run, and the end where all ranks have agreed on it; an ExitStack calls this."""
        if not self._is_open or error is None:
            return
        agreed = isinstance(error, MmldlmError)
        if not isinstance(error, Interrupted):
            said = str(error) if agreed else f"{type(error).__name__}: {error}"
            self.progress.error(said, on_screen=False)  # main() prints it
        if agreed:
            self._end(error.exit_code, str(error))

    def _end(self, exit_code: int, reason: str) -> None:
        self.event("end", step=self.state.step, exit_code=exit_code, reason=reason)
        for log in (self.log, self.evaluations, self.gradients, self.events):
            self._close(log)
        self.progress.close()
        self._is_open = False

    def close(self, exit_code: int = EXIT_DONE, reason: str = "") -> None:
        """Draw the plots, log how the run ends (the process's exit code), and close the logs."""
        if not self._is_open:
            return
        try:
            if self.config.logging.plot:
                self.progress.message(f"plot     {plot_run(self.run_dir)}")
        except (MmldlmError, OSError) as error:  # the run is done and saved; its picture can be drawn again
            self.progress.warning(f"no plot: {error}")
        if self.wandb is not None:
            try:
                self.wandb.finish()  # may upload for long
            except Exception as error:
                self._say_wandb_failed(error)
        self._end(exit_code, reason)
        self.lock.release()
