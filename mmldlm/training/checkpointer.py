"""The checkpoints of a run: write one while training continues, and resume from one."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from mmldlm.checkpoints import commit, locate, retention
from mmldlm.checkpoints.manifest import (
    ENGINE_FOLDER,
    EVALUATION,
    SKIPS,
    is_as_saved,
    tensor_table,
)
from mmldlm.checkpoints.resume import ResumeReader, open_training_state
from mmldlm.config.resume_compat import check_resume_config
from mmldlm.engines.base import Engine
from mmldlm.engines.ema import WeightAverage
from mmldlm.errors import MmldlmError, UserError
from mmldlm.stability.guard import Guard
from mmldlm.training.async_save import BackgroundTask, PendingSave, wait_on_all_ranks
from mmldlm.training.checkpoint_contents import (
    describe_rate_jump,
    engine_folders,
    load_engine_state,
    load_training_state,
    named_checkpoint,
    newest_checkpoint,
    package_version,
    read_files_to_keep,
    read_rng,
    restore_rng,
    rollback_checkpoint,
    saved_shapes,
    write_metadata,
    write_rng,
)
from mmldlm.training.run_folder import Run
from mmldlm.utils.formatting import did_you_mean
from mmldlm.utils.run_files import CONFIG, LAST_BEST, SAVE_REQUEST

T = TypeVar("T")
# Attempts of a run that is about to end, and seconds between them.
FINAL_SAVE_RETRIES, FINAL_SAVE_BACKOFF = 3, 20.0
_OTHER_WAYS = (
    "training.resume=auto skips those whose files are damaged; training.init_from takes the"
    " weights alone"
)


class Checkpointer:
    """Saves and loads over all ranks; everything public is collective unless its docstring says
    otherwise.

    Args:
        run: Run whose checkpoints these are.
        engine: Engine whose weights and moments they hold.
        average: Moving average of the weights, if the run has one.
        guard: Guard whose windows a checkpoint holds.
        heartbeat: Function called while this rank waits for a disk.
        stop_requested: Function that returns whether this rank was asked to stop.

    Attributes:
        saved_step: Step of the newest checkpoint of this run that was committed or loaded; None
            where it has none yet.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        average: WeightAverage | None,
        guard: Guard,
        heartbeat: Callable[[], None],
        stop_requested: Callable[[], bool],
    ):
        self.run, self.engine, self.average, self.guard = run, engine, average, guard
        self.config, self.state, self.folder = run.config, run.state, run.folder
        self.run_dir, self.is_main = run.folder.path, run.is_main
        self.saved_step: int | None = None
        # Step and figures of the last evaluation, which those of the loaded checkpoint may be.
        self._evaluation: tuple[int, dict[str, float]] | None = None
        self._has_evaluated = False
        self._heartbeat, self._stop_requested = heartbeat, stop_requested
        self._saving: PendingSave | None = None
        # Checkpoint of another run, from which this one was resumed.
        self._source: Path | None = None
        self._failure = ""  # reason why the last save failed
        self._kept_files: dict[str, bytes] = {}

    def read_files_to_keep(self) -> None:
        """Read what every checkpoint holds of config and data: saving must not need the data
        again. Collective.

        Raises:
            UserError: on every rank, when rank 0 cannot read it.
        """
        self._kept_files = self._read_together(
            lambda: read_files_to_keep(self.run) if self.is_main else {},
            f"readable files of {self.run.data.source}",
            "copy them from where the data was made, or prepare it again",
        )

    def _wait_with_heartbeat(
        self, is_running: Callable[[], bool], what: str, *may_stop: Callable[[], bool]
    ) -> None:
        timeout = self.config.checkpoints.save_timeout
        wait_on_all_ranks(self.engine, is_running, what, timeout, self._heartbeat, *may_stop)

    # -- continuing -------------------------------------------------------------------------------

    def find_resume(self) -> Path | None:
        """Return the step folder that training.resume names, every byte of it checked by rank 0;
        None: start afresh.

        Raises:
            UserError: on every rank, when rank 0 finds a damaged checkpoint or none; for `auto`,
                when it finds checkpoints and none of them is valid, or one that cannot be read.
        """
        resume = self.config.training.resume
        if resume is None:
            return None
        if resume == "auto":
            return self._search(lambda: newest_checkpoint(self.run_dir))
        return self._search(lambda: named_checkpoint(resume))

    def find_rollback(self) -> Path | None:
        """Return the newest checkpoint that a rollback may go to, every byte of it checked; None:
        there is none.

        If no step succeeded since the last rollback, the checkpoint is older than its target. A
        run that was resumed from another run's checkpoint may return to that.
        """
        is_stuck = self.state.applied_steps <= self.state.applied_at_rollback
        below = self.state.rolled_back_to if is_stuck else None
        source = None if is_stuck else self._source
        return self._search(lambda: rollback_checkpoint(self.run_dir, below, source))

    def _search(self, find: Callable[[], Path | None]) -> Path | None:
        """Return what rank 0 finds, in a thread, because every byte of a checkpoint is read."""
        search = None
        if self.is_main:
            # One that cannot be restored now is found where it is.
            with contextlib.suppress(OSError):
                locate.recover_interrupted_commit(self.run_dir)
            search = BackgroundTask(find, self.engine.device)
        self._wait_with_heartbeat(
            lambda: search is not None and search.is_running(),
            "checking a checkpoint",
            self._stop_requested,
        )
        result, failure = (None, None) if search is None else (search.result, search.failure)
        path = self.engine.share_outcome(None if result is None else str(result), failure)
        return None if path is None else Path(path)

    def resume(self, checkpoint: Path) -> list[str]:
        """Load a checkpoint at the start of a run. `set_aside_newer` is to follow.

        Returns:
            Notes for the user.

        Raises:
            UserError: on every rank: see `load`; or the config changes the meaning of the weights.
        """
        notes = self._read_together(
            lambda: self._changes(checkpoint),
            f"a readable checkpoint in {checkpoint}",
            _OTHER_WAYS,
        )
        self.load(checkpoint)
        # Among checkpoints of this run, a rollback chooses itself.
        if not locate.is_of_run(checkpoint, self.run_dir):
            self._source = checkpoint
        notes += describe_rate_jump(checkpoint, self.config, self.state)
        if self.state.step >= (last := self.config.training.num_train_steps):
            left = "only the last evaluation is left" if self.state.evaluation_left else ""
            notes.append(
                f"{left or 'nothing to do'}: {self.state.step} of {last} steps are done; raise"
                " training.num_train_steps"
            )
        return notes

    def _changes(self, checkpoint: Path) -> list[str]:
        if not is_as_saved(checkpoint, CONFIG):
            return [
                f"{checkpoint / CONFIG} is damaged: changes of the config since then are unknown"
            ]
        return [
            f"changed since the checkpoint: {change}"
            for change in check_resume_config(checkpoint, self.config)
        ]

    def set_aside_newer(self) -> list[str]:
        """Move the run's checkpoints of later steps aside; with training.resume=auto those are
        damaged ones.

        Returns:
            Notes for the user, on rank 0.

        Raises:
            UserError: on every rank, when rank 0 cannot move them.
        """

        def explain(failure: BaseException | None) -> UserError:
            messages = self.engine.gather_messages(None if failure is None else str(failure))
            return UserError(
                f"to move the checkpoints after step {self.state.step} of {self.run_dir} aside",
                "; ".join(messages),
                "make the folder writable, or move them away by hand",
            )

        dropped = self.engine.run_together(
            lambda: (
                retention.set_aside_after(self.run_dir, self.state.step) if self.is_main else []
            ),
            explain,
            catch=(MmldlmError, OSError),
        )
        if self.is_main and dropped:
            self._update_best()
        return [f"left behind: {path} (delete it when you no longer want it)" for path in dropped]

    def load(self, checkpoint: Path) -> None:
        """Continue from a committed step folder of any engine, ZeRO stage and world size.

        Raises:
            UserError: on every rank: the checkpoint has another global batch, seed, data or model,
                or cannot be read.
        """
        expected = f"a readable checkpoint in {checkpoint}"
        saved, opened, evaluation = self._read_together(
            lambda: self._open(checkpoint), expected, _OTHER_WAYS
        )
        # Of 1,024 ranks, each would open the files of all: rank 0 does, and tells the others what
        # is where.
        shared = self.engine.share_outcome(opened, None)
        rng = self._read_together(
            lambda: self._read(checkpoint, pickle.loads(shared), saved["applied_steps"]),
            expected,
            _OTHER_WAYS,
        )
        self.engine.sync_weights_from_masters()
        restore_rng(rng)
        for name, value in saved.items():
            if hasattr(self.state, name) and name not in ("versions", "data"):
                setattr(self.state, name, value)
        self.guard.restore(self.state.guard)
        self._evaluation = None
        # What a checkpoint of another run holds is not saved in this one.
        if locate.is_of_run(checkpoint, self.run_dir):
            self.saved_step = self.state.step
            if evaluation is not None:
                self._evaluation = self.state.step, evaluation

    def _read_together(self, read: Callable[[], T], expected: str, fix: str) -> T:
        """Return read(); an error on any rank is raised on all."""

        def explain(failure: BaseException | None) -> UserError:
            messages = self.engine.gather_messages(
                None if failure is None else f"{type(failure).__name__}: {failure}"
            )
            if isinstance(failure, UserError):
                return failure
            return UserError(expected, "; ".join(messages[:3]), fix)

        # Damaged files raise anything.
        return self.engine.run_together(read, explain)

    def _open(self, checkpoint: Path) -> tuple[dict[str, Any], bytes, dict[str, float] | None]:
        """Return the training state; on rank 0, which writes manifests, also the pickled reader of
        the engine's state, and the figures of the evaluation at that step, if there was one.
        """
        saved = load_training_state(checkpoint, self.state, self.config, self.engine.world_size)
        if not self.is_main:
            return saved, b"", None
        with open_training_state(checkpoint / ENGINE_FOLDER) as reader:
            return saved, pickle.dumps(reader), retention.figures_of(checkpoint)

    def _read(
        self, checkpoint: Path, reader: ResumeReader, applied_steps: int
    ) -> dict[str, Any] | None:
        """Load weights, moments and average; return this rank's random generators."""
        with reader:
            load_engine_state(checkpoint, reader, self.engine, self.average, applied_steps)
            reader.finish()
        return read_rng(checkpoint / f"rng_state_rank{self.engine.rank}.pt")

    # -- saving -----------------------------------------------------------------------------------

    @property
    def write_in_progress(self) -> bool:
        """Whether this rank's files are still being written. Not collective."""
        return self._saving is not None and self._saving.is_running()

    @property
    def save_requested(self) -> bool:
        """Whether the run's folder has a file `save_now` (checked by rank 0). Not collective."""
        # Unlike Path.exists, lexists raises nothing.
        return self.is_main and os.path.lexists(self.run_dir / SAVE_REQUEST)

    @property
    def has_uncommitted(self) -> bool:
        """Whether a checkpoint waits for finish_save(); the same on every rank. Not collective."""
        return self._saving is not None

    def save(self) -> bool:
        """Start a checkpoint of the present step; with checkpoints.async_save it is written while
        training continues.

        A failure is an event and a warning; the run continues with the previous checkpoint.

        Returns:
            False, on every rank, if it failed already.
        """
        self.finish_save()
        # Before anything can fail: a full disk would be tried again at every step.
        if self.save_requested:
            self._clear_save_request()
        started, step = time.perf_counter(), self.state.step
        try:
            pending = commit.begin(self.run_dir, step, self.engine, engine_folders(self.engine))
            failure: Exception | None = None
            work: list[Callable[[], list[Path]]] = []
            try:
                work = self._snapshot_writers(pending.path, self.config.checkpoints.async_save)
            except Exception as error:
                failure = error
            # Agree before any rank's thread enters its own collective, where it would wait for a
            # failed rank.
            pending.raise_together("taking a snapshot of its state", failure)
        except commit.CommitFailed as error:
            self._log_save_failure(step, error)
            return False
        self._saving = PendingSave(
            pending, self.state, work, self.engine.device, self._evaluation_entry()
        )
        if not self.config.checkpoints.async_save:
            return self.finish_save()
        self._saving.stalled = time.perf_counter() - started
        return True

    def _clear_save_request(self) -> None:
        """Delete the request on rank 0; a failure costs further checkpoints, not the run."""
        try:
            (self.run_dir / SAVE_REQUEST).unlink(missing_ok=True)
        except OSError as error:
            self.folder.warning(
                f"{self.run_dir / SAVE_REQUEST} could not be deleted; it will trigger another"
                f" save: {error}"
            )

    def finish_save(self) -> bool:
        """Wait for the checkpoint being written and commit it on all ranks; return False if it
        failed.
        """
        saving = self._saving
        if saving is None:
            return True
        self._wait_with_heartbeat(
            saving.is_running, f"writing the checkpoint of step {saving.step}"
        )
        self._saving = None
        skips = {SKIPS: saving.consecutive_skips} if saving.consecutive_skips else {}
        try:
            step_dir = saving.pending.commit(
                saving.failure,
                has_entry=True,
                engine=self.engine.describe(),
                tensors=tensor_table(saved_shapes(self.engine.model)),
                **skips,
                **saving.metadata,
            )
        except commit.CommitFailed as error:
            self._log_save_failure(saving.step, error)
            return False
        self.saved_step = saving.step
        if self.is_main:
            self._update_best([step_dir])
            self._prune()
            seconds = time.perf_counter() - saving.started
            stalled: dict[str, float] = {}
            if saving.stalled is not None:
                stalled["stalled_seconds"] = round(saving.stalled, 4)
            self.folder.event(
                "save", step=saving.step, path=str(step_dir), seconds=round(seconds, 3), **stalled
            )
            self.folder.message(f"saved    {step_dir} ({seconds:.1f} s)")
        return True

    def save_before_end(self) -> None:
        """Save the present step and wait for it; try more than once, because the run is about to
        end.

        Raises:
            MmldlmError: on every rank, when it could not be saved.
        """
        for attempt in range(FINAL_SAVE_RETRIES):
            if self.save() and self.finish_save():
                return
            if attempt < FINAL_SAVE_RETRIES - 1:
                self.folder.warning(f"trying again in {FINAL_SAVE_BACKOFF:.0f} s")
                pause = BackgroundTask(lambda: time.sleep(FINAL_SAVE_BACKOFF), self.engine.device)
                self._wait_with_heartbeat(pause.is_running, "waiting before the next attempt")
        newest = "there is none yet"
        if self.saved_step is not None:
            newest = f"the newest valid one is {commit.step_name(self.saved_step)}"
        raise MmldlmError(
            f"the last checkpoint (step {self.state.step}) could not be saved in {self.run_dir};"
            f" {newest}. Why: {self._failure}\nWhen that is fixed, continue with"
            " training.resume=auto."
        )

    def _log_save_failure(self, step: int, error: Exception) -> None:
        self._failure = str(error)
        self.folder.event("save_failed", step=step, reason=str(error))
        self.folder.warning(str(error))
        self.engine.reset_after_failed_save()

    def note_evaluation(self, figures: dict[str, float]) -> None:
        """Take the figures of the present step, for checkpoints.keep_best. Not collective."""
        figure, is_first = self.config.checkpoints.keep_best, not self._has_evaluated
        self._evaluation, self._has_evaluated = (self.state.step, figures), True
        if is_first and figure is not None and figure not in figures:
            self.folder.warning(
                f"no {LAST_BEST}: checkpoints.keep_best={figure} is none of the figures of an"
                f" evaluation ({', '.join(figures)}){did_you_mean(figure, figures)}"
            )

    def _evaluation_entry(self) -> dict[str, Any]:
        """Return the manifest's entry of the evaluation at the present step, if it is to have
        one.
        """
        if self.config.checkpoints.keep_best is None or self._evaluation is None:
            return {}
        step, figures = self._evaluation
        return {EVALUATION: figures} if step == self.state.step else {}

    def _update_best(self, candidates: Sequence[Path] | None = None) -> None:
        """Point `last_best` to the best of its own checkpoint and candidates (None: all)."""
        figure = self.config.checkpoints.keep_best
        if figure is None:
            return
        try:
            if candidates is None:
                candidates = [path for _, path in locate.list_checkpoints(self.run_dir)]
            path = retention.update_best(self.run_dir, figure, candidates)
        except (OSError, ValueError) as error:  # on rank 0 only: the other ranks have continued
            self.folder.warning(f"{LAST_BEST} could not be moved: {error}")
            return
        if path is not None:
            step, value = int(path.name.split("_")[1]), retention.figure_of(path, figure)
            self.folder.event("best", step=step, path=str(path), **{figure: value})
            self.folder.message(f"best     {path.name}: {figure} {value:.3f} ({LAST_BEST})")

    def _prune(self) -> None:
        keep = self.config.checkpoints
        try:
            retention.prune(self.run_dir, keep.keep_last, keep.keep_every or 0)
        except (OSError, ValueError) as error:  # on rank 0 only: the other ranks have continued
            self.folder.event("prune_failed", step=self.state.step, reason=str(error))
            self.folder.warning(f"old checkpoints could not be deleted: {error}")

    def _snapshot_writers(self, path: Path, in_background: bool) -> list[Callable[[], list[Path]]]:
        """Take hold of everything that this rank writes; what is returned writes it, touches no
        live tensor, and returns the files.
        """
        # begin() has made the folder, and every rank has tried to write there.
        engine, average, folder = self.engine, self.average, path / ENGINE_FOLDER
        engine.complete_optimizer_state(self.state.applied_steps)
        state: dict[str, Any] = {"engine": engine.snapshot_state(folder, self.state.step)}
        if average is not None:
            state["average"] = average.snapshot_state()
        if in_background:
            state = engine.copy_to_host(state)
        rng = {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }
        work = [
            lambda: engine.write(state["engine"], folder),
            lambda: write_rng(rng, path, engine.rank),
        ]
        if average is not None:
            work.append(lambda: average.write(state["average"], folder))
        self.state.guard = self.guard.state()
        if self.is_main:
            self.state.versions = {
                name: package_version(name)
                for name in ("mmldlm", "torch", "deepspeed", "transformers", "numpy")
            }
            text = json.dumps(asdict(self.state) | {"host": socket.gethostname()}, indent=2) + "\n"
            work.append(lambda: write_metadata(path, text, self._kept_files))
        return work
