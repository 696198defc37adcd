"""The checkpoints of a run: what goes into one, writing it while training goes on, and continuing from one."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mmldlm.checkpoints import commit
from mmldlm.checkpoints.training_state import open_training_state
from mmldlm.config.load import to_yaml
from mmldlm.data.resolve import RunData
from mmldlm.engines.ema import WeightAverage
from mmldlm.errors import MmldlmError, UserError
from mmldlm.run import RunFolder
from mmldlm.stability.guard import Guard
from mmldlm.stability.recovery import Trouble, stop

ENGINE_FOLDER = "engine"
STATE_FILE = "training_state.json"
SAVE_NOW = "save_now"
LAST_TRIES, LAST_PAUSE = 3, 20.0  # a run that must end tries to save this often, so many seconds apart


class RunCheckpoints:
    """Saves and loads over all ranks; everything public here is collective unless it says otherwise."""

    def __init__(self, folder: RunFolder, average: WeightAverage | None, guard: Guard):
        self.folder, self.average, self.guard = folder, average, guard
        self.config, self.data, self.engine, self.state = folder.config, folder.data, folder.engine, folder.state
        self.run_dir, self.is_main = folder.run_dir, folder.is_main
        self._saving: _Saving | None = None

    def _peers(self) -> commit.Peers:
        return commit.Peers(self.engine.rank, self.engine.world_size, self.engine.barrier, self.engine.all_ok)

    # -- continuing --------------------------------------------------------------------------------------------------

    def find_resume(self) -> Path | None:
        """The step folder that training.resume means, every byte of it checked by rank 0; None for a fresh start.

        Raises:
            UserError: on every rank, when rank 0 finds none or a damaged one.
        """
        return self._agree_on(self.config.training.resume)

    def find_newest(self) -> Path | None:
        """The newest whole checkpoint of this run, every byte of it checked; None when there is none."""
        return self._agree_on("auto")

    def _agree_on(self, resume: str | None) -> Path | None:
        if resume is None:
            return None
        found: list[str | None] = [None, None]  # path, failure: rank 0 must not leave alone while the others wait
        if self.is_main:
            try:
                found[0] = self._find(resume)
            except (MmldlmError, OSError) as error:
                found[1] = str(error)
        if self.engine.world_size > 1:
            torch.distributed.broadcast_object_list(found, src=0)
        if found[1] is not None:
            raise MmldlmError(found[1])
        return None if found[0] is None else Path(found[0])

    def _find(self, resume: str) -> str | None:
        if resume == "auto":
            path = commit.find_latest_whole(
                self.run_dir, on_damaged=lambda message: print(f"warning: {message}", flush=True)
            )
            return None if path is None else str(path.resolve())
        path = commit.resolve(resume)
        problems = commit.verify(path, checksums=True)
        if problems:
            raise UserError(
                f"a whole checkpoint in {path}",
                "; ".join(problems[:3]),
                "training.resume=auto takes the newest whole checkpoint of the run",
            )
        return str(path)

    def load(self, checkpoint: Path) -> None:
        """Continue from a committed step folder of any engine, ZeRO stage and world size.

        Raises:
            UserError: on every rank: another global batch, seed, data or model than the checkpoint's; unreadable files.
        """
        saved = json.loads((checkpoint / STATE_FILE).read_text())
        # Checkpoints from before there was a choice do not name their plan: it was the one that is still the default.
        saved.setdefault("plan", f"samples-1:{self.config.data.bucket_batches}")
        for what in ("global_batch", "num_samples", "seed", "plan"):
            if saved[what] != getattr(self.state, what):
                raise UserError(
                    f"{what}={saved[what]} as in {checkpoint} (the order of samples depends on it)",
                    f"{what}={getattr(self.state, what)}",
                    "keep micro-batch * accumulation * world size, training.seed, data.batching, "
                    "data.bucket_batches and the data as they were "
                    "(on fewer ranks: more training.grad_accum_steps)",
                )
        failure: Exception | None = None
        try:
            self._read(checkpoint, saved["applied_steps"])
        except (MmldlmError, OSError, ValueError) as error:
            failure = error
        if not self.engine.all_ok(failure is None):
            said = str(failure or "another rank could not read it (its message says why)")
            raise (
                failure
                if isinstance(failure, UserError)
                else UserError(
                    f"a readable checkpoint in {checkpoint}", said, "training.resume=auto skips damaged ones"
                )
            )
        self.engine.masters_written()
        self._set_rng(checkpoint / f"rng_state_rank{self.engine.rank}.pt")
        for name, value in saved.items():
            if hasattr(self.state, name) and name != "versions":
                setattr(self.state, name, value)
        self.guard.restore(self.state.guard)

    def _read(self, checkpoint: Path, applied_steps: int) -> None:
        with open_training_state(checkpoint / ENGINE_FOLDER) as reader:
            model = self.engine.model
            ours = {name: p.requires_grad for name, p in model.named_parameters()}
            theirs = {name: reader.kind(name) == "trainable" for name in reader.names if reader.kind(name) != "buffer"}
            differing = [name for name, trainable in ours.items() if theirs.get(name) != trainable]
            if differing:
                raise UserError(
                    f"the model and frozen groups of {checkpoint}",
                    f"{len(differing)} parameters that are absent, or frozen in one and trained in the other, "
                    f"first {differing[0]}",
                    "keep model.*, training.loss_type and training.freeze as they were; to change them start a new run "
                    f"with training.init_from={checkpoint}",
                )
            self.engine.load(reader, applied_steps if reader.has_moments else 0)
            if self.average is not None:
                if reader.has_ema:
                    self.average.load(reader)
                else:
                    self.average.restart()

    def _set_rng(self, path: Path) -> None:
        """Per-rank generators; a rank that the checkpoint did not have keeps its own (the noise never uses them)."""
        if not path.is_file():
            return
        rng = torch.load(path, weights_only=True)
        torch.set_rng_state(rng["torch"])
        if torch.cuda.is_available() and rng["cuda"] is not None:
            torch.cuda.set_rng_state(rng["cuda"])

    def roll_back(self, trouble: Trouble) -> None:
        """Return to the newest whole checkpoint with a lower learning rate, passing over the batches to blame.

        Raises:
            StabilityStop: on every rank, when no rollback is left or there is no checkpoint.
        """
        self.finish_save()
        state, config = self.state, self.config.stability
        num_rollbacks, found_at = state.num_rollbacks, state.step
        bad = {} if trouble.tensors is None else {"tensors": dict(list(trouble.tensors.items())[:50])}
        path = self.find_newest() if num_rollbacks < config.max_rollbacks else None
        if path is None:
            self.folder.event("stability_stop", step=found_at, reason=trouble.reason, **bad)
            raise stop(trouble, num_rollbacks, self.run_dir, self.folder.last_reasons)
        passed_over = [*state.passed_over, *([] if trouble.first_bad is None else [[trouble.first_bad, found_at]])]
        lr_scale = state.lr_scale * config.rollback_lr_factor
        self.load(path)
        state.num_rollbacks, state.lr_scale, state.passed_over = num_rollbacks + 1, lr_scale, passed_over
        state.consecutive_skips = 0
        self.folder.rewind()
        told = {"from_step": found_at, "to_step": state.step, "lr_scale": lr_scale, "passed_over": passed_over}
        self.folder.event("rollback", step=state.step, reason=trouble.reason, path=str(path), **told, **bad)
        if self.is_main:
            self.folder.progress.warning(
                f"rollback from step {found_at} to {state.step}: {trouble.reason}; learning rate x {lr_scale:g}"
            )

    # -- saving ------------------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether this rank's files are still being written. Not collective."""
        return self._saving is not None and self._saving.is_running()

    @property
    def is_asked(self) -> bool:
        """Whether somebody put a file `save_now` into the run's folder (rank 0 looks). Not collective."""
        return self.is_main and (self.run_dir / SAVE_NOW).exists()

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint waits for finish_save(); the same on every rank. Not collective."""
        return self._saving is not None

    def save(self) -> None:
        """Start a checkpoint of the present step; with checkpoints.async it is written while training goes on.

        One that cannot be saved is an event and a warning; the run goes on with the previous one.
        """
        self.finish_save()
        started, step = time.perf_counter(), self.state.step
        try:
            pending = commit.begin(self.run_dir, step, self._peers())
        except commit.CommitFailed as error:
            self._say_failed(step, error)
            return
        failure: Exception | None = None
        work: list[Callable[[], None]] = []
        try:
            work = self._rank_files(pending.path, self.config.checkpoints.in_background)
        except Exception as error:  # the ranks vote on it in commit(): raising alone would leave the others waiting
            failure = error
        self._saving = _Saving(pending, step, [*work, pending.seal], failure, self.engine.device)
        if self.config.checkpoints.in_background:
            self._saving.start()
            self._saving.stalled = time.perf_counter() - started
        else:
            self._saving.run()
            self.finish_save()
        if self.is_asked:
            (self.run_dir / SAVE_NOW).unlink(missing_ok=True)

    def finish_save(self) -> bool:
        """Wait for the checkpoint being written and commit it on all ranks alike; False when it failed."""
        saving, self._saving = self._saving, None
        if saving is None:
            return True
        saving.wait()
        try:
            step_dir = saving.pending.commit(saving.failure, sealed=True, engine=self.engine.describe())
        except commit.CommitFailed as error:
            self._say_failed(saving.step, error)
            return False
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
        for attempt in range(LAST_TRIES):
            self.save()
            # save() itself says why it failed where it could not even begin.
            if self.is_pending and self.finish_save() or self._is_saved():
                return
            if attempt < LAST_TRIES - 1:
                if self.is_main:
                    self.folder.progress.warning(f"trying again in {LAST_PAUSE:.0f} s: free the disk of {self.run_dir}")
                time.sleep(LAST_PAUSE)
        raise MmldlmError(
            f"the last checkpoint (step {self.state.step}) could not be saved; the newest whole one is "
            f"{commit.read_latest(self.run_dir)}. Free the disk and continue it with training.resume=auto."
        )

    def _is_saved(self) -> bool:
        saved = (self.run_dir / commit.CHECKPOINTS / commit.step_name(self.state.step)).is_dir()
        return self.engine.all_ok(saved)

    def _say_failed(self, step: int, error: Exception) -> None:
        if self.is_main:
            self.folder.event("save_failed", step=step, reason=str(error))
            self.folder.progress.warning(str(error))

    def _prune(self) -> None:
        keep = self.config.checkpoints
        try:
            commit.prune(self.run_dir, keep.keep_last, keep.keep_every or 0)
        except OSError as error:  # on rank 0 alone: the others are already on their way to the next step
            self.folder.event("prune_failed", step=self.state.step, reason=str(error))
            self.folder.progress.warning(f"old checkpoints could not be deleted: {error}")

    def _rank_files(self, path: Path, in_background: bool) -> list[Callable[[], None]]:
        """Take hold of everything that this rank writes; what is returned writes it and touches no live tensor."""
        engine, folder = self.engine, path / ENGINE_FOLDER
        folder.mkdir(exist_ok=True)
        state: dict[str, Any] = {"engine": engine.state_to_save(folder, self.state.step)}
        if self.average is not None:
            state["average"] = self.average.state_to_save()
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
                name: _version(name) for name in ("mmldlm", "torch", "deepspeed", "transformers", "numpy")
            }
            text = json.dumps(asdict(self.state) | {"host": socket.gethostname()}, indent=2) + "\n"
            work.append(lambda: self._write_descriptions(path, text))
        return work

    def _write_descriptions(self, path: Path, training_state: str) -> None:
        (path / STATE_FILE).write_text(training_state)
        (path / "config.yaml").write_text(to_yaml(self.config))
        (path / "model_config.json").write_text(json.dumps(model_config(self.config, self.data), indent=2) + "\n")
        target = path / "tokenizer"
        target.mkdir(exist_ok=True)
        for source in (self.data.train.root / "tokenizer").iterdir():
            (target / source.name).write_bytes(source.read_bytes())


class _Saving:
    """One checkpoint on its way to the disk."""

    def __init__(
        self,
        pending: commit.PendingCheckpoint,
        step: int,
        work: list[Callable[[], None]],
        failure: Exception | None,
        device: torch.device,
    ):
        self.pending, self.step, self.failure, self._work, self._device = pending, step, failure, work, device
        self.started, self.stalled = time.perf_counter(), None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        # A daemon: a rank that dies of something else must not wait for its disk.
        self._thread = threading.Thread(target=self.run, name="mmldlm-save", daemon=True)
        self._thread.start()

    def run(self) -> None:
        if self.failure is not None:
            return
        try:
            if self._device.type == "cuda":  # a new thread's is GPU 0, whichever rank this is
                torch.cuda.set_device(self._device)
            for part in self._work:
                part()
        except Exception as error:  # carried to the vote in commit()
            self.failure = error

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


def model_config(config, data: RunData) -> dict:
    """What config.json of the exported model holds: the model, its diffusion, and which encoder its latents
    belong to."""
    return {
        "architecture": "MultimodalMMDiT",
        **config.model.model_dump(),
        "text_diffusion": config.text_diffusion.model_dump(),
        "latent_diffusion": config.latent_diffusion.model_dump(),
        "training": {
            "mode_weights": config.training.mode_weights(),
            "condition_dropout": config.training.condition_dropout,
        },
        "encoder": data.train.manifest["encoder"],
        "tokenizer": data.train.manifest["tokenizer"],
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
