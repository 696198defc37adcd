"""The checkpoints of a run: writing one while training goes on, and continuing from one."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mmldlm.checkpoints import commit, locate, retention
from mmldlm.checkpoints.layout import ENGINE_FOLDER
from mmldlm.checkpoints.manifest import is_as_saved
from mmldlm.config.resume_compat import CONFIG_FILE, check_resume_config
from mmldlm.engines.ema import WeightAverage
from mmldlm.errors import MmldlmError, UserError
from mmldlm.stability.guard import Guard
from mmldlm.stability.rollback_policy import RollbackReason, stability_stop_error
from mmldlm.training.async_save import BackgroundTask, PendingSave, wait_on_all_ranks
from mmldlm.training.checkpoint_contents import (
    load_engine_state,
    load_training_state,
    package_version,
    read_files_to_keep,
    read_rng,
    restore_rng,
    write_metadata,
)
from mmldlm.training.run_logger import RunLogger, engine_folders

SAVE_REQUEST_FILE = "save_now"
FINAL_SAVE_RETRIES, FINAL_SAVE_BACKOFF = 3, 20.0  # a run that must end tries to save this often, so many seconds apart
_OTHER_WAYS = "training.resume=auto skips those whose files are damaged; training.init_from takes the weights alone"


class Checkpointer:
    """Saves and loads over all ranks; everything public here is collective unless it says otherwise."""

    def __init__(
        self,
        folder: RunLogger,
        average: WeightAverage | None,
        guard: Guard,
        still: Callable[[], None] = lambda: None,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ):
        """still: Liveness.still, called where this rank waits for a disk. asked_to_stop: whether it got a signal."""
        self._asked_to_stop = asked_to_stop
        self.folder, self.average, self.guard, self._still = folder, average, guard, still
        self.config, self.data, self.engine, self.state = folder.config, folder.data, folder.engine, folder.state
        self.run_dir, self.is_main = folder.run_dir, folder.is_main
        self._saving: PendingSave | None = None
        self._source: Path | None = None  # where a resumed run came from
        self.saved_step: int | None = None  # of the newest committed (or loaded) checkpoint
        self._failure = ""  # of the last save
        self._kept_files: dict[str, bytes] = {}

    def read_descriptions(self) -> None:
        """Read what every checkpoint holds of the store: saving it must not need the store again. Collective.

        Raises:
            UserError: on every rank, when rank 0 cannot read it.
        """
        if self.config.data.roots:
            self._kept_files = self._raise_together(
                lambda: read_files_to_keep(self.data) if self.is_main else {},
                f"a readable tokenizer in {self.data.train.root}",
                "copy it from where the store was made, or prepare the store again",
            )

    def _peers(self) -> commit.RankGroup:
        engine = self.engine
        return commit.RankGroup(
            engine.rank, engine.world_size, engine.barrier, engine.all_agree, engine.gather_messages
        )

    def _wait_with_heartbeat(self, is_running: Callable[[], bool], what: str, *may_stop: Callable[[], bool]) -> None:
        def live() -> None:
            self._still()
            self.folder.renew_lock()

        wait_on_all_ranks(self.engine, is_running, what, self.config.checkpoints.save_timeout, live, *may_stop)

    # -- continuing --------------------------------------------------------------------------------------------------

    def find_resume(self) -> Path | None:
        """The step folder that training.resume means, every byte of it checked by rank 0; None for a fresh start.

        Raises:
            UserError: on every rank, when rank 0 finds a damaged one or none; for `auto`, when it finds checkpoints and
                none that is whole, or one that cannot be read.
        """
        resume = self.config.training.resume
        return None if resume is None else self._agree_on_checkpoint(lambda: self._find(resume))

    def find_rollback(self) -> Path | None:
        """The newest whole checkpoint that a rollback may go to, every byte of it checked; None when there is none.

        Where nothing could be trained since the last rollback, one from before its target. A run that came from another
        one's checkpoint may go back to that.
        """
        state, below = self.state, None
        if state.applied_steps <= state.applied_at_rollback:
            below = state.rolled_back_to
        own = self._agree_on_checkpoint(lambda: self._latest(for_rollback=True, below=below))
        return own or (self._source if below is None else None)

    def _agree_on_checkpoint(self, find: Callable[[], str | None]) -> Path | None:
        """What rank 0 finds. It may take long: every byte is read."""
        search = BackgroundTask(find, self.engine.device) if self.is_main else None
        is_running = lambda: search is not None and search.is_running()  # noqa: E731
        self._wait_with_heartbeat(is_running, "checking a checkpoint", self._asked_to_stop)
        found: list[Any] = [None, None]  # path, failure: rank 0 must not leave alone while the others wait
        if search is not None:
            failure = search.failure
            if isinstance(failure, UserError):
                found[1] = (failure.expected, failure.found, failure.fix)
            elif failure is not None:
                found[1] = str(failure) if isinstance(failure, MmldlmError) else f"{type(failure).__name__}: {failure}"
            found[0] = search.result
        if self.engine.world_size > 1:
            torch.distributed.broadcast_object_list(found, src=0)
        if isinstance(found[1], tuple):
            raise UserError(*found[1])
        if found[1] is not None:
            raise MmldlmError(found[1])
        return None if found[0] is None else Path(found[0])

    def _latest(self, **which) -> str | None:
        path = locate.find_latest_valid(self.run_dir, **{"on_damaged": self._warn, **which})
        return None if path is None else str(path.resolve())

    @staticmethod
    def _warn(message: str) -> None:
        print(f"warning: {message}", flush=True)

    def _find(self, resume: str) -> str | None:
        if resume == "auto":
            damaged: list[str] = []
            path = self._latest(on_damaged=damaged.append)
            if path is None and damaged:
                raise UserError(
                    f"a whole checkpoint in {self.run_dir}, or none at all",
                    f"only damaged ones: {'; '.join(damaged[:3])}",
                    "restore one of them, or begin from scratch under another logging.run_name; nothing was changed",
                )
            for message in damaged:
                self._warn(message)
            return path
        path = locate.locate_checkpoint(resume)
        for problem in locate.check_complete(path)[:1]:
            self._warn(f"checkpoint {path.name} is used, its training state is complete: {problem}")
        return str(path)

    def resume(self, checkpoint: Path) -> list[str]:
        """`load`, for a run that begins with it; its own later checkpoints, a future that it leaves, are moved aside.

        Returns:
            What the user should read.

        Raises:
            UserError: on every rank, see `load`; the config changes what the weights mean.
        """
        notes = self._raise_together(
            lambda: self._changes(checkpoint), f"a readable checkpoint in {checkpoint}", _OTHER_WAYS
        )
        self.load(checkpoint)
        if not checkpoint.is_relative_to(self.run_dir.resolve()):  # of its own, a rollback chooses itself
            self._source = checkpoint
        notes += self._set_aside_newer()  # with auto: damaged ones
        if self.state.step >= (last := self.config.training.num_train_steps):
            notes.append(f"nothing to do: {self.state.step} of {last} steps are done; raise training.num_train_steps")
        return notes

    def _changes(self, checkpoint: Path) -> list[str]:
        if not is_as_saved(checkpoint, CONFIG_FILE):
            return [f"{checkpoint / CONFIG_FILE} is damaged: whether the config has changed since is not known"]
        return [f"changed since the checkpoint: {change}" for change in check_resume_config(checkpoint, self.config)]

    def _set_aside_newer(self) -> list[str]:
        """Move own checkpoints of steps after the present one aside. Collective."""
        failure, dropped = None, []
        if self.is_main:
            try:
                dropped = retention.set_aside_after(self.run_dir, self.state.step)
            except (MmldlmError, OSError) as error:
                failure = error
        if not self.engine.all_agree(failure is None):
            said = self.engine.gather_messages(None if failure is None else str(failure))
            raise UserError(
                f"to move the checkpoints after step {self.state.step} of {self.run_dir} aside",
                "; ".join(said),
                "make the folder writable, or move them away by hand",
            )
        return [f"left behind: {path} (delete it when you no longer want it)" for path in dropped]

    def load(self, checkpoint: Path) -> None:
        """Continue from a committed step folder of any engine, ZeRO stage and world size.

        Raises:
            UserError: on every rank: another global batch, seed, data or model than the checkpoint's; unreadable files.
        """
        saved, rng = self._raise_together(
            lambda: self._read(checkpoint), f"a readable checkpoint in {checkpoint}", _OTHER_WAYS
        )
        self.engine.sync_weights_from_masters()
        restore_rng(rng)
        for name, value in saved.items():
            if hasattr(self.state, name) and name not in ("versions", "data"):
                setattr(self.state, name, value)
        self.guard.restore(self.state.guard)
        self.saved_step = self.state.step

    def _raise_together(self, read: Callable[[], Any], expected: str, fix: str) -> Any:
        """What read() returns; an error on any rank is one on all."""
        failure: Exception | None = None
        found = None
        try:
            found = read()
        except Exception as error:  # whatever a damaged file makes of its reader: no rank may leave alone
            failure = error
        if not self.engine.all_agree(failure is None):
            said = self.engine.gather_messages(None if failure is None else f"{type(failure).__name__}: {failure}")
            if isinstance(failure, UserError):
                raise failure
            raise UserError(expected, "; ".join(said[:3]), fix) from failure
        return found

    def _read(self, checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Weights, moments and average into the engine; returns the training state and this rank's generators."""
        saved = load_training_state(checkpoint, self.state, self.config, self.engine.world_size)
        load_engine_state(checkpoint, self.engine, self.average, saved["applied_steps"])
        return saved, read_rng(checkpoint / f"rng_state_rank{self.engine.rank}.pt")

    def roll_back(self, trouble: RollbackReason) -> None:
        """Return to the newest good checkpoint with a lower learning rate, passing over the batches to blame.

        The way back is saved at once: a run that ended before the next checkpoint would go the same way again.

        Raises:
            StabilityStop: on every rank, when no rollback is left or there is no checkpoint.
        """
        self.finish_save()
        state, config = self.state, self.config.stability
        num_rollbacks, found_at = state.num_rollbacks, state.step
        bad = {} if trouble.tensors is None else {"tensors": dict(list(trouble.tensors.items())[:50])}
        path = self.find_rollback() if num_rollbacks < config.max_rollbacks else None
        if path is None:
            self.folder.event("stability_stop", step=found_at, reason=trouble.reason, **bad)
            raise stability_stop_error(trouble, num_rollbacks, self.run_dir, self.folder.last_reasons, self.saved_step)
        passed_over = [*state.passed_over, *([] if trouble.first_bad is None else [[trouble.first_bad, found_at]])]
        lr_scale = state.lr_scale * config.rollback_lr_factor
        self.load(path)
        state.num_rollbacks, state.lr_scale, state.passed_over = num_rollbacks + 1, lr_scale, passed_over
        state.consecutive_skips, state.rolled_back_to, state.applied_at_rollback = 0, state.step, state.applied_steps
        self.folder.truncate_logs()
        for note in self._set_aside_newer():
            self.folder.note(note)
        told = {"from_step": found_at, "to_step": state.step, "lr_scale": lr_scale, "passed_over": passed_over}
        self.folder.event("rollback", step=state.step, reason=trouble.reason, path=str(path), **told, **bad)
        if self.is_main:
            self.folder.progress.warning(
                f"rollback from step {found_at} to {state.step}: {trouble.reason}; learning rate x {lr_scale:g}"
            )
        if self.save() and self.has_uncommitted:
            self.finish_save()

    # -- saving ------------------------------------------------------------------------------------------------------

    @property
    def write_in_progress(self) -> bool:
        """Whether this rank's files are still being written. Not collective."""
        return self._saving is not None and self._saving.is_running()

    @property
    def save_requested(self) -> bool:
        """Whether somebody put a file `save_now` into the run's folder (rank 0 looks). Not collective."""
        return self.is_main and os.path.lexists(
            self.run_dir / SAVE_REQUEST_FILE
        )  # which raises nothing, unlike Path.exists

    @property
    def has_uncommitted(self) -> bool:
        """Whether a checkpoint waits for finish_save(); the same on every rank. Not collective."""
        return self._saving is not None

    def save(self) -> bool:
        """Start a checkpoint of the present step; with checkpoints.async_save it is written while training goes on.

        One that cannot be saved is an event and a warning; the run goes on with the previous one.

        Returns:
            False where it failed already, on every rank alike.
        """
        self.finish_save()
        started, step = time.perf_counter(), self.state.step
        try:
            pending = commit.begin(self.run_dir, step, self._peers(), engine_folders(self.engine))
            failure: Exception | None = None
            work: list[Callable[[], None]] = []
            try:
                work = self._snapshot_writers(pending.path, self.config.checkpoints.async_save)
            except Exception as error:
                failure = error
            # Before any rank's thread enters a collective of its own: one that failed would never come.
            pending.raise_together("taking hold of its state", failure)
        except commit.CommitFailed as error:
            self._log_save_failure(step, error)
            return False
        self._saving = PendingSave(pending, self.state, [*work, pending.write_manifest_entry], self.engine.device)
        if self.save_requested:
            self._clear_save_request()
        if not self.config.checkpoints.async_save:
            return self.finish_save()
        self._saving.stalled = time.perf_counter() - started
        return True

    def _clear_save_request(self) -> None:
        """On rank 0 alone: that the file stays costs checkpoints, not the run."""
        try:
            (self.run_dir / SAVE_REQUEST_FILE).unlink(missing_ok=True)
        except OSError as error:
            self.folder.progress.warning(
                f"{self.run_dir / SAVE_REQUEST_FILE} cannot be deleted, and asks again: {error}"
            )

    def finish_save(self) -> bool:
        """Wait for the checkpoint being written and commit it on all ranks alike; False when it failed."""
        saving = self._saving
        if saving is None:
            return True
        self._wait_with_heartbeat(saving.is_running, f"writing the checkpoint of step {saving.step}")
        self._saving = None
        skips = {"consecutive_skips": saving.consecutive_skips} if saving.consecutive_skips else {}
        try:
            step_dir = saving.pending.commit(saving.failure, has_entry=True, engine=self.engine.describe(), **skips)
        except commit.CommitFailed as error:
            self._log_save_failure(saving.step, error)
            return False
        self.saved_step = saving.step
        if self.is_main:
            self._prune()
            seconds = time.perf_counter() - saving.started
            stalled = {} if saving.stalled is None else {"stalled_seconds": round(saving.stalled, 4)}
            self.folder.event("save", step=saving.step, path=str(step_dir), seconds=round(seconds, 3), **stalled)
            self.folder.progress.message(f"saved    {step_dir} ({seconds:.1f} s)")
        return True

    def save_before_end(self) -> None:
        """Save the present step and wait for it; a run that is about to end tries more than once.

        Raises:
            MmldlmError: on every rank, when it could not be saved.
        """
        for attempt in range(FINAL_SAVE_RETRIES):
            if self.save() and self.finish_save():
                return
            if attempt < FINAL_SAVE_RETRIES - 1:
                if self.is_main:
                    self.folder.progress.warning(f"trying again in {FINAL_SAVE_BACKOFF:.0f} s")
                pause = BackgroundTask(lambda: time.sleep(FINAL_SAVE_BACKOFF), self.engine.device)
                self._wait_with_heartbeat(pause.is_running, "the pause before the next try")
        newest = "there is none yet"
        if self.saved_step is not None:
            newest = f"the newest whole one is {commit.step_name(self.saved_step)}"
        raise MmldlmError(
            f"the last checkpoint (step {self.state.step}) could not be saved in {self.run_dir}; {newest}. Why: "
            f"{self._failure}\nWhen that is fixed, continue with training.resume=auto."
        )

    def _log_save_failure(self, step: int, error: Exception) -> None:
        self._failure = str(error)
        if self.is_main:
            self.folder.event("save_failed", step=step, reason=str(error))
            self.folder.progress.warning(str(error))
        self.engine.reset_after_failed_save()

    def _prune(self) -> None:
        keep = self.config.checkpoints
        try:
            retention.prune(self.run_dir, keep.keep_last, keep.keep_every or 0)
        except (OSError, ValueError) as error:  # on rank 0 alone: the others are already on their way to the next step
            self.folder.event("prune_failed", step=self.state.step, reason=str(error))
            self.folder.progress.warning(f"old checkpoints could not be deleted: {error}")

    def _snapshot_writers(self, path: Path, in_background: bool) -> list[Callable[[], None]]:
        """Take hold of everything that this rank writes; what is returned writes it and touches no live tensor."""
        engine, folder = self.engine, path / ENGINE_FOLDER  # which begin() has made and every rank has tried
        state: dict[str, Any] = {"engine": engine.snapshot_state(folder, self.state.step)}
        if self.average is not None:
            state["average"] = self.average.snapshot_state()
        if in_background:
            state = engine.copy_to_host(state)
        rng = {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }
        work = [
            lambda: engine.write(state["engine"], folder),
            lambda: torch.save(rng, path / f"rng_state_rank{engine.rank}.pt"),
        ]
        if self.average is not None:
            work.append(lambda: self.average.write(state["average"], folder))
        self.state.guard = self.guard.state()
        if self.is_main:
            self.state.versions = {
                name: package_version(name) for name in ("mmldlm", "torch", "deepspeed", "transformers", "numpy")
            }
            text = json.dumps(asdict(self.state) | {"host": socket.gethostname()}, indent=2) + "\n"
            work.append(lambda: write_metadata(path, text, self.folder.task, self.data, self._kept_files))
        return work
