"""The folder of a run: its logs, events and checkpoints, written while the loop runs."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from mmldlm.checkpoints import commit
from mmldlm.config.load import to_yaml
from mmldlm.data.resolve import RunData
from mmldlm.engines.base import Engine, StepResult
from mmldlm.errors import MmldlmError, UserError
from mmldlm.observe.plots import plot_run
from mmldlm.observe.progress import Progress, train_log_path
from mmldlm.observe.records import JsonlLog
from mmldlm.observe.wandb import open_wandb

ENGINE_FOLDER = "engine"
STATE_FILE = "training_state.json"


@dataclass
class TrainingState:
    """Where a run stands; everything else follows from it, the config and the weights.

    Attributes:
        global_batch, num_samples, seed: what the order of samples and the noise depend on.
        step: optimizer steps taken, skipped ones included. applied_steps: those that moved the weights (the schedule's
            clock). consumed_samples: training samples seen. skipped_steps: refused steps. consecutive_skips: since
            the last applied one.
    """

    global_batch: int
    num_samples: int
    seed: int = 0
    step: int = 0
    applied_steps: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    def advance(self, applied: bool, num_samples: int) -> None:
        """Count one step of `num_samples` samples."""
        self.step += 1
        self.consumed_samples += num_samples
        self.applied_steps += applied
        self.skipped_steps += not applied
        self.consecutive_skips = 0 if applied else self.consecutive_skips + 1


class RunFolder:
    """Everything a run writes. Rank 0 owns the logs; checkpoints are collective."""

    def __init__(self, config, data: RunData, engine: Engine, state: TrainingState):
        self.config, self.data, self.engine, self.state = config, data, engine, state
        self.run_dir = config.run_dir()
        self.is_main = engine.rank == 0

    # -- opening -----------------------------------------------------------------------------------------------------

    def _peers(self) -> commit.Peers:
        return commit.Peers(self.engine.rank, self.engine.world_size, self.engine.barrier, self.engine.all_ok)

    def find_resume(self) -> Path | None:
        """training.resume as a checkpoint folder: PATH, or for `auto` what rank 0 finds, told to all. Collective."""
        resume = self.config.training.resume
        if resume is None:
            return None
        if resume != "auto":
            return commit.resolve(resume)
        found: list[str | None] = [
            None,
            None,
        ]  # path, failure: rank 0 must not leave alone while the others wait for it
        if self.is_main:
            try:
                path = commit.find_latest_whole(
                    self.run_dir, on_damaged=lambda message: print(f"warning: {message}", flush=True)
                )
                found[0] = None if path is None else str(path.resolve())
            except (MmldlmError, OSError) as error:
                found[1] = str(error)
        if self.engine.world_size > 1:
            torch.distributed.broadcast_object_list(found, src=0)
        if found[1] is not None:
            raise UserError(f"readable checkpoints in {self.run_dir}", found[1], "mend that, or name a step folder")
        return None if found[0] is None else Path(found[0])

    def load(self, checkpoint: Path) -> None:
        """Continue from a committed step folder. Collective.

        Raises:
            UserError: another engine, stage, world size, or global batch than the checkpoint's.
        """
        manifest = commit.read_manifest(checkpoint)
        saved = json.loads((checkpoint / STATE_FILE).read_text())
        for what, now in (("world_size", self.engine.world_size), ("engine", self.engine.describe())):
            if manifest[what] != now:
                raise UserError(
                    f"{what} {manifest[what]}, with which {checkpoint} was saved",
                    f"{what} {now}",
                    "start with the same number of ranks, engine.kind and ZeRO stage",
                )
        for what in ("global_batch", "num_samples", "seed"):
            if saved[what] != getattr(self.state, what):
                raise UserError(
                    f"{what}={saved[what]} as in {checkpoint} (the order of samples depends on it)",
                    f"{what}={getattr(self.state, what)}",
                    "keep micro-batch * accumulation * world size, training.seed and the data as they were",
                )
        self.engine.load(checkpoint / ENGINE_FOLDER)
        rng = torch.load(checkpoint / f"rng_state_rank{self.engine.rank}.pt", weights_only=True)
        torch.set_rng_state(rng["torch"])
        if torch.cuda.is_available() and rng["cuda"] is not None:
            torch.cuda.set_rng_state(rng["cuda"])
        for name, value in saved.items():
            if name != "versions":
                setattr(self.state, name, value)

    def open(self, trainable: dict[str, tuple[int, int]], resumed_from: Path | None) -> None:
        """Start the logs and say what is about to happen. Collective.

        Raises:
            MmldlmError: on every rank, when rank 0 could not open the logs or wandb.
        """
        failure: Exception | None = None
        try:
            self._open(trainable, resumed_from)
        except (MmldlmError, OSError) as error:  # the ranks vote: one that left alone would leave the others waiting
            failure = error
        if self.engine.all_ok(failure is None):
            return
        if isinstance(failure, MmldlmError):
            raise failure
        raise UserError(
            f"a folder for the run at {self.run_dir}",
            str(failure or "rank 0 could not open it (its message says why)"),
            "set logging.save_dir to a folder that can be written to",
        )

    def _open(self, trainable: dict[str, tuple[int, int]], resumed_from: Path | None) -> None:
        config, state = self.config, self.state
        node = int(os.environ.get("GROUP_RANK", 0))
        self.progress = Progress(
            config.training.num_train_steps,
            enabled=self.is_main,
            log_freq=config.logging.log_freq,
            log_file=train_log_path(self.run_dir, node) if self.is_main else None,
            start_step=state.step,
        )
        if not self.is_main:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "config.yaml").write_text(to_yaml(config))
        self.log = JsonlLog(self.run_dir / "training_log.jsonl", state.step)
        self.evaluations = JsonlLog(self.run_dir / "eval_log.jsonl", state.step)
        self.events = JsonlLog(self.run_dir / "events.jsonl")
        wandb = config.logging.wandb
        self.wandb = open_wandb(
            wandb.mode,
            wandb.project,
            config.logging.run_name,
            self.run_dir,
            config.model_dump(),
            resumed_from is not None,
        )
        say = self.progress.message
        total = sum(count for _, count in trainable.values())
        say(
            f"run      {self.run_dir} on {self.engine.describe()}, {self.engine.world_size} rank(s), "
            f"{self.engine.device.type}"
        )
        say(
            f"model    {total / 1e6:.1f}M parameters; trainable "
            + ", ".join(
                f"{group} {part / 1e6:.1f}M of {whole / 1e6:.1f}M" for group, (part, whole) in trainable.items()
            )
            + f" (mode {config.training.loss_type}, freeze={config.training.freeze})"
        )
        lengths = self.data.train_lengths
        say(
            f"data     {len(lengths):,} training and {len(self.data.validation_lengths):,} validation texts from "
            f"{config.data.latent_data_root}, {int(lengths.sum()):,} tokens, latents of {config.model.latent_dim}"
        )
        training = config.training
        say(
            f"batch    {state.global_batch} = {training.train_batch_size} a rank x {training.grad_accum_steps} "
            f"accumulated x {self.engine.world_size} rank(s); {training.num_train_steps:,} steps = "
            f"{training.num_train_steps * state.global_batch / len(lengths):.2f} epochs; {training.dtype}"
        )
        if resumed_from is not None:
            say(f"resumed  at step {state.step} from {resumed_from}")
        self.event("start" if resumed_from is None else "resume", step=state.step, source=str(resumed_from or ""))

    # -- while it runs -----------------------------------------------------------------------------------------------

    def log_step(self, sums: dict[str, float], batch, result: StepResult, lr: float, tokens_per_second: float) -> None:
        """Write the record of the step that state counted last; sums are over all ranks and micro-batches."""
        if not self.is_main:
            return
        record = {
            "epoch": batch.epoch,
            "step": self.state.step,
            "batch_in_epoch": batch.index,
            "loss": sums["loss"],
            "lr": lr,
            "text_loss": sums["text_nelbo_sum"] / batch.num_text_tokens if batch.num_text_tokens else None,
            "latent_loss": sums["latent_error_sum"] / batch.num_latents if batch.num_latents else None,
            "length_loss": sums["length_nll_sum"] / batch.num_lengths if batch.num_lengths else None,
            "text_accuracy": sums["text_correct"] / sums["text_masked"] if sums["text_masked"] else None,
            "latent_cosine": sums["latent_cosine_sum"] / batch.num_latents if batch.num_latents else None,
            "grad_norm": result.grad_norm,
            "tokens_per_second": tokens_per_second,
            "samples": self.state.consumed_samples,
            "skipped": not result.applied,
        }
        try:
            self.log.write(record)
        except OSError as error:  # a full disk, seen by rank 0 alone: training goes on, the lost line is said
            self.progress.warning(f"step {self.state.step} could not be written to training_log.jsonl: {error}")
        self.progress.update(record)
        if self.wandb is not None:
            self.wandb.log(record)
        if not result.applied:
            self.event("skip", step=self.state.step, reason="non-finite gradient norm", grad_norm=str(result.grad_norm))
            self.progress.warning(f"step {self.state.step} skipped on all ranks: gradient norm {result.grad_norm}")

    def log_evaluation(self, values: dict[str, float]) -> None:
        """Write and show the validation metrics of the present step."""
        if not self.is_main:
            return
        self.evaluations.write({"step": self.state.step, **values})
        if self.wandb is not None:
            self.wandb.log({"step": self.state.step, **values}, prefix="eval/")
        self.progress.message(
            f"eval     step {self.state.step}: " + ", ".join(f"{k} {v:.3f}" for k, v in values.items())
        )

    def event(self, kind: str, **values) -> None:
        """One line in events.jsonl (rank 0)."""
        if self.is_main:
            self.events.write({"event": kind, **values})

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Commit a checkpoint of the present step, or say why it could not be; the run goes on either way.
        Collective."""
        started, state, engine = time.perf_counter(), self.state, self.engine
        try:
            pending = commit.begin(self.run_dir, state.step, self._peers())
            failure = None
            try:
                self._write_rank_files(pending.path)
            except Exception as error:  # the ranks vote on it in commit(): raising alone would leave the others waiting
                failure = error
            step_dir = pending.commit(failure, engine=engine.describe())
        except commit.CommitFailed as error:
            self.event("save_failed", step=state.step, reason=str(error))
            if self.is_main:
                self.progress.warning(str(error))
            return
        seconds = time.perf_counter() - started
        if self.is_main:
            self._prune()
            self.event("save", step=state.step, path=str(step_dir), seconds=round(seconds, 3))
            self.progress.message(f"saved    {step_dir} ({seconds:.1f} s)")

    def _prune(self) -> None:
        keep = self.config.checkpoints
        try:
            commit.prune(self.run_dir, keep.keep_last, keep.keep_every or 0)
        except OSError as error:  # on rank 0 alone: the others are already on their way to the next step
            self.event("prune_failed", step=self.state.step, reason=str(error))
            self.progress.warning(f"old checkpoints could not be deleted: {error}")

    def _write_rank_files(self, folder: Path) -> None:
        self.engine.save(folder / ENGINE_FOLDER)
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        torch.save({"torch": torch.get_rng_state(), "cuda": cuda}, folder / f"rng_state_rank{self.engine.rank}.pt")
        if not self.is_main:
            return
        self.state.versions = {
            name: _version(name) for name in ("mmldlm", "torch", "deepspeed", "transformers", "numpy")
        }
        (folder / STATE_FILE).write_text(
            json.dumps(asdict(self.state) | {"host": socket.gethostname()}, indent=2) + "\n"
        )
        (folder / "config.yaml").write_text(to_yaml(self.config))
        (folder / "model_config.json").write_text(json.dumps(model_config(self.config, self.data), indent=2) + "\n")
        source = self.data.train.root / "tokenizer"
        target = folder / "tokenizer"
        target.mkdir(exist_ok=True)
        for path in source.iterdir():
            (target / path.name).write_bytes(path.read_bytes())

    def close(self) -> None:
        """Draw the plots and close the logs."""
        if not self.is_main:
            return
        try:
            self.progress.message(f"plot     {plot_run(self.run_dir)}")
        except (MmldlmError, OSError) as error:  # the run is done and saved; its picture can be drawn again
            self.progress.warning(f"no plot: {error}")
        self.event("end", step=self.state.step)
        self.progress.close()
        for log in (self.log, self.evaluations, self.events):
            log.close()
        if self.wandb is not None:
            self.wandb.finish()


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
