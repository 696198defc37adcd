"""What a run logs: how it starts, its steps, bad samples and evaluations, and how it ends."""

from __future__ import annotations

import itertools
import math
import socket
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mmldlm.checkpoints.commit import try_longest
from mmldlm.checkpoints.init_from import InitReport
from mmldlm.checkpoints.retention import is_higher_better
from mmldlm.config.load import with_absolute_paths
from mmldlm.engines.base import Engine
from mmldlm.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Interrupted,
    MmldlmError,
    StabilityStop,
    UserError,
)
from mmldlm.inference.validation_samples import ValidationSample
from mmldlm.observe.layer_stats import LayerStats
from mmldlm.observe.plots import LossCurve, plot_run
from mmldlm.stability.skipped_steps import nonfinite_micro_batches, save_skipped_step
from mmldlm.tasks.validation import Validation
from mmldlm.training.checkpoint_contents import engine_folders
from mmldlm.training.run_check import check_no_checkpoints
from mmldlm.training.run_folder import Run
from mmldlm.training.start_summary import setting_warnings, summary
from mmldlm.training.state import StepReport
from mmldlm.utils.atomic_files import atomic_file
from mmldlm.utils.formatting import closing_lines, count_noun, first_line, join_some
from mmldlm.utils.run_files import (
    EVALUATIONS,
    EVENTS,
    LAST_BEST,
    LATEST,
    LAYERS,
    SAMPLED_IMAGES,
    SAMPLES,
    STEPS,
)

_SHOWN_LETTERS = 160  # of a sample on the screen
_MAX_NAMED = 64  # micro-batches and ids in an event, bad samples of a step on the screen


class RunLogger:
    """What a run logs. Rank 0 writes; on other ranks most methods do nothing.

    Attributes:
        last_reasons: Reasons why the last steps were skipped.
    """

    def __init__(self, run: Run, engine: Engine):
        self.run, self.engine = run, engine
        self.config, self.folder, self.state = run.config, run.folder, run.state
        self.last_reasons: list[str] = []
        self._reported_bad: set[tuple[bool, int]] = set()  # (is of validation, id)

    # -- opening ----------------------------------------------------------------------------------

    def acquire_lock(self, heartbeat: Callable[[], None]) -> None:
        """Lock the folder for this job, before anything of it is read. Collective.

        Args:
            heartbeat: Function called while a rank waits: rank 0 for a job that may have exited,
                others to see the folder.

        Raises:
            UserError: on every rank, when another job trains there, or did so and saved what would
                be overwritten; or when a rank does not see the folder of rank 0.
        """

        def acquire() -> None:
            if not self.run.is_main:
                return
            self.folder.path.mkdir(parents=True, exist_ok=True)
            # The other ranks wait in a collective, which has its own time limit.
            timeout = self.config.engine.collective_timeout / 2
            self.folder.lock.acquire(self.folder.warning, heartbeat, timeout)
            check_no_checkpoints(self.config)
            num_steps = self.config.training.num_train_steps
            try_longest(self.folder.path, num_steps, engine_folders(self.engine))

        self._open_together(acquire)
        self._check_shared(heartbeat)

    def _check_shared(self, heartbeat: Callable[[], None]) -> None:
        """Check that all ranks see the folder of rank 0, without which no save can succeed."""
        lock = self.folder.lock
        started = self.engine.gather_objects(lock.started)[0]
        # The other ranks wait in a collective, which has its own time limit.
        timeout = self.config.engine.collective_timeout / 2

        def look() -> None:
            if started is not None and not lock.is_seen(started, heartbeat, timeout):
                folder = lock.path.parent.absolute()
                raise FileNotFoundError(f"{folder} here is another one, or none")

        def explain(failure: BaseException | None) -> BaseException:
            if (interrupted := self._interrupted(failure)) is not None:
                return interrupted
            messages = self.engine.gather_messages(None if failure is None else str(failure))
            return UserError(
                "one folder of the run for all ranks",
                join_some(messages, limit=4),
                "set logging.save_dir to a folder that all nodes share, by its absolute path",
            )

        self.engine.run_together(look, explain, catch=(Interrupted, FileNotFoundError))

    def open_logs(
        self,
        trainable: dict[str, tuple[int, int]],
        optimizer_groups: list[tuple[float, int]],
        resumed_from: Path | None,
        init_report: InitReport | None = None,
    ) -> None:
        """Open the logs and print the summary of the run. Collective.

        Args:
            trainable: Numbers of (trainable, all) parameters by group.
            optimizer_groups: (weight decay, elements) of each group of the optimizer.
            resumed_from: Checkpoint that the run continues from.
            init_report: Report of training.init_from.

        Raises:
            MmldlmError: on every rank, when rank 0 could not open the logs or a tracker.
        """

        def open_and_print() -> None:
            self.folder.open_screen(self.config, self.run.task.metrics_of(self.config))
            if self.run.is_main:
                self.folder.open_logs(self.config, resumed_from is not None)
                self._print_start(trainable, optimizer_groups, resumed_from, init_report)

        self._open_together(open_and_print)

    def _open_together(self, work: Callable[[], None]) -> None:
        """Do something in the run's folder on rank 0; an error there ends all ranks."""

        def explain(failure: BaseException | None) -> BaseException:
            if (interrupted := self._interrupted(failure)) is not None:
                return interrupted
            if isinstance(failure, MmldlmError):
                return failure
            return UserError(
                f"a folder for the run at {self.folder.path}",
                str(failure or "rank 0 could not open it (its message says why)"),
                "set logging.save_dir to a writable folder",
            )

        self.engine.run_together(work, explain, catch=(MmldlmError, OSError))

    def _interrupted(self, failure: BaseException | None) -> Interrupted | None:
        """Return what ends all ranks if a signal ended one of them. Collective."""
        if self.engine.all_agree(not isinstance(failure, Interrupted)):
            return None
        return Interrupted(
            "stopped by a signal before the run's folder was opened; nothing had to be saved"
        )

    def _print_start(
        self,
        trainable: dict[str, tuple[int, int]],
        optimizer_groups: list[tuple[float, int]],
        resumed_from: Path | None,
        init_report: InitReport | None,
    ) -> None:
        run, folder = self.run, self.folder
        global_batch = self.state.global_batch
        for line in summary(
            run.task, run.data, self.engine, global_batch, trainable, optimizer_groups
        ):
            folder.message(line)
        for message in [] if init_report is None else init_report.messages():
            folder.message(f"weights  {message}")
        if resumed_from is not None:
            folder.message(f"resumed  at step {self.state.step} from {resumed_from}")
        for warning in setting_warnings(run.task, self.config, is_fresh=resumed_from is None):
            folder.warning(warning)
        losses = [
            LossCurve(metric.name, metric.label or metric.name, metric.evaluation or metric.name)
            for metric in run.task.metrics_of(self.config)
            if metric.is_loss
        ]
        event, source = "start" if resumed_from is None else "resume", str(resumed_from or "")
        folder.event(
            event, step=self.state.step, source=source, task=self.config.task, losses=losses
        )

    # -- while it runs ----------------------------------------------------------------------------

    def log_step(self, report: StepReport, cost: Mapping[str, Any]) -> None:
        """Write the record of the step that the state counted last.

        Args:
            cost: StepTimer's fields of the record.
        """
        decision, shared, batch = report.decision, report.shared, report.batch
        if not decision.apply:
            self.last_reasons = [*self.last_reasons[-4:], decision.reason]
        if not self.folder.is_open:
            return
        record = {
            "epoch": batch.epoch,
            "step": self.state.step,
            "batch_in_epoch": batch.index,
            "loss": report.loss,
            "lr": report.lr,
            **{
                metric.name: metric.value(shared.sums, batch.counts)
                for metric in self.run.task.metrics_of(self.config)
            },
            "grad_norm": shared.grad_norm,
            **{key: value for key, value in cost.items() if value is not None},
            "samples": self.state.consumed_samples,
            "bad_samples": int(shared.counts.bad),
            "skipped": not decision.apply,
            **(
                {"loss_scale": self.engine.loss_scale}
                if self.config.training.dtype == "fp16"
                else {}
            ),
        }
        self.folder.check_lock()
        self.folder.write(STEPS, record)
        self.folder.screen.update(record)
        self.folder.trackers.log(record)
        if decision.apply and decision.reason:
            figures = {"grad_norm": str(shared.grad_norm), "loss": str(report.loss)}
            self.folder.event("spike", step=self.state.step, reason=decision.reason, **figures)
            self.folder.warning(f"step {self.state.step} seen: {decision.reason}")

    def log_skip(self, report: StepReport, micro_batches: list[dict]) -> None:
        """Write the event of a skipped step, and the record that `mmldlm replay` reruns (rank 0).

        Args:
            micro_batches: Result of gather_micro_batches; none of an overflow.
        """
        if not self.run.is_main:
            return
        folder, step, decision = self.folder, self.state.step, report.decision
        loss, grad_norm = report.loss, report.shared.grad_norm
        bad = nonfinite_micro_batches(micro_batches)
        path = None
        try:
            if not decision.is_overflow:
                path = save_skipped_step(folder.path, self._skip_record(report, micro_batches))
        except OSError as error:
            folder.warning(f"step {step}: its record for replay could not be saved: {error}")
        # The record for replay has all of them; a line of the log should stay one that is read.
        named = [
            {
                **{key: entry[key] for key in ("rank", "host", "micro")},
                "ids": entry["ids"][:_MAX_NAMED],
            }
            for entry in bad[:_MAX_NAMED]
        ]
        figures = {
            "grad_norm": str(grad_norm),
            "loss": str(loss),
            "num_bad_micro_batches": len(bad),
            "bad_micro_batches": named,
        }
        figures |= {} if path is None else {"case": str(path.relative_to(folder.path))}
        folder.event(
            "overflow" if decision.is_overflow else "skip",
            step=step,
            reason=decision.reason,
            **figures,
        )
        ranks = sorted({entry["rank"] for entry in bad})
        rank_suffix = f" (rank {', '.join(map(str, ranks))})" if ranks else ""
        hint = (
            f"; `mmldlm replay {folder.path} {step}` traces its cause" if path is not None else ""
        )
        message = f"step {step} skipped on all ranks: {decision.reason}{rank_suffix}{hint}"
        # An overflow only lowers the loss scale; finite numbers are a spike, or no usable sample.
        if decision.is_overflow or (math.isfinite(loss) and math.isfinite(grad_norm)):
            folder.warning(message)
        else:
            folder.error(message)

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
        if not self.folder.is_open:
            return
        self.folder.write(LAYERS, stats.record())
        self.folder.trackers.log(stats.flat_record(), prefix="layers/")
        if stats.dead:
            self.folder.event("dead_parameters", step=stats.step, names=stats.dead)
            names = join_some(stats.dead)
            self.folder.warning(
                f"step {stats.step}: these parameters never had a gradient: {names}"
            )

    def log_bad_samples(self, bad: list[dict], validation: bool = False) -> None:
        """Write an event and a warning for every sample that any rank left out or repaired, once
        per start of the run. Collective.

        Args:
            bad: Batch.bad of this rank.
            validation: Whether they are samples of an evaluation.
        """
        sender = {"rank": self.engine.rank, "host": socket.gethostname()}
        gathered = self.engine.gather_objects([{**sample, **sender} for sample in bad])
        if not self.run.is_main:
            return
        data, step = self.run.data, self.state.step
        at = f"{'the evaluation at ' if validation else ''}step {step}"
        num_new = 0
        for sample in itertools.chain.from_iterable(gathered):
            if (validation, sample["id"]) in self._reported_bad:
                continue
            self._reported_bad.add((validation, sample["id"]))
            num_new += 1
            split = data.validation if validation else data.train
            file, row = data.locate(split, sample["id"])
            self.folder.event("bad_sample", step=step, file=file, row=row, **sample)
            if num_new <= _MAX_NAMED:
                what = "repaired in" if sample.get("repaired") else "left out of"
                self.folder.warning(f"sample {sample['id']} {what} {at}: {sample['reason']}")
        if num_new > _MAX_NAMED:
            self.folder.warning(f"{num_new - _MAX_NAMED} more samples at {at}: see {EVENTS}")

    def too_many_bad_samples_error(self, reason: str) -> StabilityStop:
        """Return the error that ends the run on every rank because too many samples are bad."""
        folder = self.folder.path
        self.folder.event("stability_stop", step=self.state.step, reason=reason)
        return StabilityStop(
            f"stopped at step {self.state.step}: {reason}. Samples, files and reasons:"
            f" {folder / EVENTS} (bad_sample). Last checkpoint:"
            f" {folder / LATEST}. Check the storage of {self.run.data.source} and the data"
            " itself (`mmldlm verify-data` for a store), then add training.resume=auto."
        )

    def log_validation(self, validation: Validation) -> None:
        """Print what an evaluation covers (rank 0)."""
        self.folder.message(
            f"eval     {validation.num_samples:,} of {validation.num_available:,} validation"
            f" samples each {self.config.logging.eval_freq:,} steps"
            " (data.max_validation_samples)"
        )
        if (figure := self.config.checkpoints.keep_best) is not None:
            which = "highest" if is_higher_better(figure) else "lowest"
            logging = self.config.logging
            both = math.lcm(logging.save_freq, logging.eval_freq)
            self.folder.message(
                f"best     {LAST_BEST} is the checkpoint with the {which} {figure}, of those saved"
                f" at an evaluation: each {both:,} steps, and the last"
            )

    def log_evaluation(self, values: dict[str, float]) -> None:
        """Write and print the validation metrics of the present step."""
        if not self.folder.is_open:
            return
        self.folder.write(EVALUATIONS, {"step": self.state.step, **values})
        self.folder.trackers.log({"step": self.state.step, **values}, prefix="eval/")
        figures = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        self.folder.message(f"eval     step {self.state.step}: {figures}")

    def log_samples(self, samples: Sequence[ValidationSample]) -> None:
        """Write and track the samples of the present step, and print the first (rank 0)."""
        if not self.folder.is_open or not samples:
            return
        step = self.state.step
        records: list[dict[str, str]] = []
        for number, sample in enumerate(samples):
            record = {"kind": sample.kind, "reference": sample.reference}
            if sample.image is not None:
                name = f"{SAMPLED_IMAGES}/step_{step:08d}_{number}.png"
                self._write_picture(name, sample.image)
                record["image"] = name
                pixels = sample.image.repeat(3, 2) if sample.image.shape[2] == 1 else sample.image
                self.folder.trackers.image(step, f"samples/{sample.kind}/{number}", pixels)
            else:
                record["text"] = sample.text or ""
            records.append(record)
        self.folder.write(SAMPLES, {"step": step, "sampled": records})
        texts = [record for record in records if "text" in record]
        for kind in dict.fromkeys(record["kind"] for record in texts):
            lines = [
                f"{record['reference']}\n -> {record['text']}\n"
                for record in texts
                if record["kind"] == kind
            ]
            self.folder.trackers.text(step, f"samples/{kind}", "\n".join(lines))
        first = records[0]
        made = first.get("text", first.get("image", ""))
        for label, text in (("reference", first["reference"]), (f"step {step}", made)):
            line = textwrap.shorten(text, _SHOWN_LETTERS, placeholder=" ...")
            self.folder.message(f"sample   {label}: {line}")

    def _write_picture(self, name: str, image: np.ndarray) -> None:
        from PIL import Image

        path = self.folder.path / name
        try:
            path.parent.mkdir(exist_ok=True)
            with atomic_file(path) as file:
                Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(file, "PNG")
        except OSError as error:
            self.folder.warning(f"{path} could not be written: {error}")

    def forget_skips(self) -> None:
        """Drop what belongs to the steps after the state's, after a rollback."""
        self.last_reasons = []
        self.folder.truncate()

    # -- the end ----------------------------------------------------------------------------------

    def log_end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Log the error that ends the run, and the end; called by an ExitStack."""
        if not self.folder.is_open or error is None:
            return
        exit_code, message = EXIT_FAILED, f"{type(error).__name__}: {error}"
        if isinstance(error, MmldlmError):
            exit_code, message = error.exit_code, str(error)
        if not isinstance(error, Interrupted):
            self.folder.error(message, on_screen=False)  # main() prints it
        # Other ranks may wait for this one.
        self.folder.finish_trackers(exit_code, stop=lambda: True)
        self._end(exit_code, message)

    def close(
        self,
        exit_code: int = EXIT_DONE,
        reason: str = "",
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Draw the plots, log how the run ended, and close the logs. Nothing of it changes how the
        run ends. A run that was asked to end draws nothing, which takes long after many steps.

        Args:
            exit_code: Exit code of the process.
            stop: Whether the process was asked to end.
        """
        if not self.folder.is_open:
            return
        is_stopped = exit_code == EXIT_INTERRUPTED or stop()  # by a signal to any rank, or here
        if self.config.logging.plot and is_stopped:
            self.folder.message(f"plot     none of a stopped run: mmldlm plot {self.folder.path}")
        elif self.config.logging.plot:
            # The run is finished and saved, and `mmldlm plot` can draw later.
            try:
                self.folder.message(f"plot     {plot_run(self.folder.path)}")
            except (MmldlmError, OSError) as error:
                self.folder.warning(f"no plot: {error}")
            except Exception as error:
                self.folder.warning(f"no plot: {first_line(error)}")
        self.folder.finish_trackers(exit_code, stop)
        if exit_code == EXIT_DONE:
            self.folder.screen.end_live()
            path, num_steps = self.folder.path, count_noun(self.state.step, "step")
            result = f"{num_steps}, checkpoints and logs in {path}"
            for line in closing_lines(result, "mmldlm", "convert", str(path / LATEST), "OUT"):
                self.folder.message(line)
        self._end(exit_code, reason)
        self.folder.lock.release()

    def _end(self, exit_code: int, reason: str) -> None:
        self.folder.event("end", step=self.state.step, exit_code=exit_code, reason=reason)
        self.folder.close()
