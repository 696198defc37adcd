"""The config sections that every task has, one pydantic class per section. Unknown keys are
rejected.

Sections of one task are defined next to it (mmldlm/tasks/translation/config.py).
"""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmldlm.config.section import MAX_COUNT, MAX_INT, FilePath, IsPath, OnResume, Section
from mmldlm.config.task_names import DEFAULT_TASK
from mmldlm.utils.option_types import LARGEST, ONE_YEAR

# Bounds of what memory, fp32 and C can hold, far above any use.
MAX_MICRO_BATCH, MAX_ACCUMULATION, MAX_SAMPLES_PER_STEP = 1 << 20, 1 << 20, 1 << 24
LOSS_SCALE, LOSS_SCALE_WINDOW = 65536.0, 1000  # defaults of stability.loss_scale*
MIN_CLIP_NORM = 1e-12  # a smaller norm clips every gradient to 0 in fp32
Decay = Annotated[float, Field(ge=0, lt=1)]
Step = Annotated[int, Field(ge=1)]


class DataConfig(Section):
    """How prepared data is fed; a task adds its location."""

    batching: Literal["samples", "tokens"] = "samples"
    """samples: every optimizer step has the same number of samples. tokens: the same number of
    tokens, so that a step of long texts has fewer samples and none needs more memory than another;
    on average as many samples as the former."""
    num_workers: Annotated[int, OnResume.IGNORE] = Field(0, ge=0, le=4096)
    """Worker processes that build batches; 0 builds them in the training process."""
    prefetch_factor: Annotated[int, OnResume.IGNORE] = Field(4, ge=1, le=65_536)
    """Batches each worker keeps ready."""
    bucket_batches: int = Field(64, ge=1, le=MAX_COUNT)
    """Global batches in one shuffled window that is sorted by length (1: no length buckets)."""
    max_train_samples: int | None = Field(None, ge=1)
    """Use only the first samples of the training split. None: all."""
    max_validation_samples: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Samples of the validation split in an evaluation during training. A number: the first ones.
    auto: spread evenly over the split, as many as cost about 5 % of the training between two
    evaluations, at least 64. None: all."""

    @property
    def roots(self) -> list[str]:
        """Folders of the prepared stores that every node must hold; [] where a task reads other
        data.
        """
        return []

    def limit_samples(self, train: Any, validation: Any) -> tuple[Any, Any]:
        """Return both splits (or arrays of them) cut to max_train_samples and
        max_validation_samples.
        """
        # auto: the evaluation chooses, which knows the global batch.
        num_validation = (
            None if self.max_validation_samples == "auto" else self.max_validation_samples
        )
        return train[: self.max_train_samples], validation[:num_validation]


class TrainingConfig(Section):
    """How long training runs, in which batches and in which precision."""

    train_batch_size: Annotated[int, OnResume.IGNORE] = Field(32, ge=1, le=MAX_MICRO_BATCH)
    """Micro-batch per rank."""
    eval_batch_size: Annotated[int | None, OnResume.IGNORE] = Field(None, ge=1, le=MAX_MICRO_BATCH)
    """Micro-batch per rank in evaluation. None: train_batch_size."""
    grad_accum_steps: Annotated[int, OnResume.IGNORE] = Field(1, ge=1, le=MAX_ACCUMULATION)
    """Micro-batches accumulated per rank before an optimizer step."""
    num_train_steps: int = Field(1000, ge=1)
    """Optimizer steps, skipped ones included."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Compute precision; master weights, moments and reduction are fp32 in every case. fp16 (for
    GPUs without bf16) has a dynamic loss scale, stability.loss_scale; bf16 needs none."""
    compile_model: bool = False
    """torch.compile every block."""
    profile: Annotated[tuple[Step, Step] | None, OnResume.IGNORE] = None
    """First and last step of torch profiler traces, written to the run's profile/ (slows these
    steps).
    """
    profile_ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], OnResume.IGNORE] = (0,)
    """Ranks that training.profile traces; rank 0 also reports its shares of communication."""
    memory_snapshot: Annotated[bool, OnResume.IGNORE] = False
    """Record the last 100,000 allocations of every GPU, and write those of a GPU that runs out of
    memory to the run's profile/, for pytorch.org/memory_viz. Costs some microseconds per
    allocation.
    """
    resume: Annotated[str | None, IsPath(words=("auto",)), OnResume.IGNORE] = None
    """A run's `latest`, a step folder, or `auto` (newest valid checkpoint of this run; a fresh
    start if the run has none)."""
    init_from: Annotated[FilePath, OnResume.IGNORE] = None
    """Start from the weights (and nothing else) of a run, checkpoint or exported model: another
    mode, fine-tuning.
    """
    seed: int = Field(0, ge=0, le=MAX_INT)
    """Seed of weights, order, timesteps, masks and noise."""

    @model_validator(mode="after")
    def _profile_is_a_range(self) -> TrainingConfig:
        if self.profile is not None and self.profile[0] > self.profile[1]:
            raise ValueError(
                f"training.profile={list(self.profile)}: [first, last] steps, counted from 1"
            )
        if self.profile is not None and self.profile[1] > self.num_train_steps:
            raise ValueError(
                f"training.profile={list(self.profile)} ends after"
                f" training.num_train_steps={self.num_train_steps}, so nothing would be written"
            )
        return self


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    kind: Annotated[Literal["adamw", "muon"], OnResume.FIXED] = "adamw"
    """adamw; or muon: Muon for the matrices of the blocks (a task names them), AdamW for all other
    parameters.
    """
    lr: float = Field(1e-4, gt=0, le=LARGEST)
    """Peak learning rate of AdamW."""
    muon_lr: float | None = Field(None, gt=0, le=LARGEST)
    """Peak learning rate of Muon's matrices; it follows the schedule of lr. None: 0.02."""
    muon_momentum: float | None = Field(None, ge=0, lt=1)
    """Muon's momentum (Nesterov). None: 0.95."""
    muon_block_rows: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Orthogonalize blocks of so many rows of a matrix instead of the whole: cheaper, and a little
    less per step, which pays where the orthogonalization is a large share of a step (small
    batches). None: the whole matrix."""
    min_lr: float = Field(1e-6, ge=0, le=LARGEST)
    """Learning rate at and after the end of the schedule."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: int = Field(1000, ge=0)
    """Applied steps over which the rate rises linearly from 0."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's moment decays, each at least 0 and below 1."""
    eps: float = Field(1e-8, gt=0, le=1)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.01, ge=0, le=LARGEST)
    """Decoupled weight decay of matrices; norms, biases, embeddings and learned tokens have none.

    """
    grad_clip_norm: float | None = Field(1.0, ge=MIN_CLIP_NORM, le=LARGEST)
    """Clip gradients to this global norm. None: no clipping."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the weights with this decay (`mmldlm convert --ema`).

    None: none.
    """

    def muon_rate(self) -> float:
        """Peak learning rate of Muon's matrices."""
        return 0.02 if self.muon_lr is None else self.muon_lr

    @model_validator(mode="after")
    def _muon_settings_are_read(self) -> OptimizerConfig:
        unread = [
            key
            for key in ("muon_lr", "muon_momentum", "muon_block_rows")
            if getattr(self, key) is not None
        ]
        if self.kind != "muon" and unread:
            raise ValueError(
                f"optimizer.{unread[0]} is read only with optimizer.kind=muon (it is {self.kind}):"
                " drop it, or set optimizer.kind=muon"
            )
        return self


class EngineConfig(Section):
    """The engine that runs the step."""

    on_resume = OnResume.IGNORE

    kind: Literal["deepspeed", "fsdp", "ddp", "single"] = "deepspeed"
    """deepspeed (ZeRO 0-3), fsdp (PyTorch FSDP2), ddp (every rank holds the whole model), or
    single (one process).
    """
    zero_stage: int | None = Field(None, ge=0, le=3)
    """ZeRO stage. None: that of the DeepSpeed JSON, or 2 without one."""
    deepspeed_config: FilePath = None
    """DeepSpeed JSON file (also --deepspeed_config)."""
    hsdp_replicas: int = Field(1, ge=1, le=MAX_COUNT)
    """FSDP2: groups of ranks that each hold one sharded copy of the model (HSDP; e.g. the number
    of nodes).
    """
    shard_gradients: bool = False
    """FSDP2: reduce and shard gradients with every micro-batch, not once per step. Under
    training.grad_accum_steps it saves 4 bytes per parameter and rank, and moves the gradients
    that many times.
    """
    collective_timeout: float = Field(600.0, gt=0, le=ONE_YEAR)
    """Seconds a collective may take before the job ends; at most a year."""


class StabilityConfig(Section):
    """What counts as a bad step, and its consequences.

    A non-finite step is always skipped on all ranks.
    """

    spike_action: Literal["skip", "log", "off"] = "log"
    """Action on a finite loss or gradient norm far above the recent ones: skip the step, only log
    it, or nothing.
    """
    spike_sigma: float = Field(6.0, gt=0, le=LARGEST)
    """A spike is this many standard deviations above the mean of the window."""
    spike_window: int = Field(128, ge=4, le=MAX_COUNT)
    """Applied steps in the window of losses and norms; spikes are detected once it is half full.

    """
    audit_freq: int = Field(500, ge=1)
    """Steps between two audits of all weights and moments for non-finite values (each checkpoint
    is audited, too).
    """
    max_consecutive_skips: int = Field(20, ge=1)
    """Steps skipped in a row before the run returns to its last valid checkpoint (a failed audit
    does so at once).
    """
    max_rollbacks: int = Field(2, ge=0)
    """Rollbacks before all ranks stop with exit 4."""
    rollback_lr_factor: float = Field(0.5, gt=0, le=1)
    """Every rollback multiplies the learning rate of the rest of the run by this."""
    max_bad_sample_fraction: float = Field(0.5, gt=0, le=1)
    """All ranks stop with exit 4 when more than this fraction of the samples of the last 100
    global batches was bad (left out, or repaired by nan_to_num); checked from the 20th batch on.
    1: never."""
    nan_to_num: bool = False
    """Replace non-finite values of a latent by the mean instead of leaving the sample out (it is
    named either way). The model then learns from a damaged sample."""
    loss_scale: Annotated[float | None, OnResume.IGNORE] = Field(None, ge=1, le=2.0**64)
    """First loss scale of a new run in fp16; it halves on an overflow. None: 65536."""
    loss_scale_window: int | None = Field(None, ge=1)
    """Steps without an overflow after which the loss scale of fp16 doubles. None: 1000."""


class CheckpointsConfig(Section):
    """How checkpoints are written and how many are kept."""

    on_resume = OnResume.IGNORE

    keep_last: int = Field(2, ge=1)
    """Newest checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1)
    """Also keep every checkpoint whose step is a multiple of this. None: only keep_last."""
    keep_best: str | None = None
    """Also keep the checkpoint with the best value of this validation figure, such as l2t_nelbo,
    and point RUN/last_best to it: the highest of an accuracy, cosine or gain, else the lowest. Of
    checkpoints saved at the step of an evaluation. None: no last_best."""
    save_timeout: float = Field(1800.0, gt=0, le=ONE_YEAR)
    """Seconds that writing a checkpoint, or checking one before a resume, may take before the job
    ends.
    """
    async_save: bool = True
    """Training waits only for the copy off the device; a thread writes it, and it is committed
    some steps later.
    """


class WandbConfig(Section):
    """Weights & Biases."""

    on_resume = OnResume.IGNORE

    mode: Literal["online", "offline"] = "online"
    """offline writes to the run's folder and needs no network."""
    project: str = "mmldlm"
    """Project name."""
    entity: str | None = None
    """User or team that the project belongs to. None: the one that wandb has as default."""
    group: str | None = None
    """Group in which wandb shows the run."""
    tags: list[str] = []
    """Tags of the run."""
    notes: str | None = None
    """Description of the run."""


class LoggingConfig(Section):
    """The run's folder, and how often logs, evaluations and checkpoints are written."""

    on_resume = OnResume.IGNORE

    run_name: str = "mmldlm"
    """Name of the run: its folder is {save_dir}/{run_name}. With a preset, that of the preset.

    It may have slashes, but not leave save_dir.
    """
    save_dir: Annotated[str, IsPath()] = "runs"
    """Folder of all runs."""
    log_freq: int = Field(10, ge=1)
    """Steps between two lines on the screen (training_log.jsonl has every step)."""
    save_freq: int = Field(1000, ge=1)
    """Steps between two checkpoints; one is always saved at the end."""
    eval_freq: int = Field(1000, ge=1)
    """Steps between two evaluations on validation data; one is always made at the end."""
    eval_samples: int = Field(4, ge=0, le=64)
    """Validation samples for which each evaluation also shows what the model makes of them: texts
    from their latents, and images from their captions (samples.jsonl, trackers, the first one on
    the screen). 0: none."""
    layer_stats_freq: int = Field(0, ge=0)
    """Log per-layer gradient, update and activation statistics every N steps (gradient_log.jsonl,
    trackers); costs one host sync on those steps. 0: never."""
    peak_tflops: float | None = Field(None, gt=0, le=LARGEST)
    """Peak TFLOP/s of one device in training.dtype, for the fraction of it that training reaches
    (mfu). None: from a table of GPUs; without an entry there (and on CPUs) no mfu is shown."""
    plot: bool = True
    """Draw the loss curves into plots/ when the run ends (`mmldlm plot` does so at any time)."""
    trackers: list[str] = []
    """Services that also record the run: wandb, tensorboard, or one that an installed package has
    as entry point of mmldlm.trackers."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases, with logging.trackers=[wandb]."""

    @model_validator(mode="after")
    def _names_trackers_once(self) -> LoggingConfig:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers: each once, found {self.trackers}")
        return self

    @model_validator(mode="after")
    def _stays_in_save_dir(self) -> LoggingConfig:
        parts = self.run_name.split("/")
        if "" in parts or "." in parts or ".." in parts:  # "" is first in an absolute one
            raise ValueError(
                f"run_name {self.run_name!r} must be the path of a folder in save_dir: not empty,"
                " not absolute, without '.' or '..'"
            )
        # Controls of a terminal (Cc) and separators of lines (Zl) and paragraphs (Zp).
        if any(unicodedata.category(sign) in ("Cc", "Zl", "Zp") for sign in self.run_name):
            raise ValueError(
                f"run_name {self.run_name!r} must be one line without control characters"
            )
        return self


class Config(Section):
    """One run: the sections that every task has.

    A task's config class adds its own and replaces `data`, `training`.
    """

    task: Annotated[str, OnResume.FIXED] = DEFAULT_TASK
    """What is trained: translation, a baseline (docs/baselines.md), or package.module:Class of
    your own (docs/tasks.md)."""
    data: DataConfig = Field(default_factory=DataConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    stability: StabilityConfig = Field(default_factory=StabilityConfig)
    checkpoints: CheckpointsConfig = Field(default_factory=CheckpointsConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        scaled = (
            self.stability.loss_scale is not None or self.stability.loss_scale_window is not None
        )
        if scaled and self.training.dtype != "fp16":
            raise ValueError(
                "stability.loss_scale and loss_scale_window are read only with"
                f" training.dtype=fp16 (it is {self.training.dtype}, which needs no loss scaling)"
            )
        per_rank = self.training.train_batch_size * self.training.grad_accum_steps
        if per_rank > MAX_SAMPLES_PER_STEP:
            raise ValueError(
                f"training.train_batch_size * training.grad_accum_steps = {per_rank:,}: at most "
                f"{MAX_SAMPLES_PER_STEP:,} samples per rank and step"
            )
        if self.optimizer.min_lr > self.optimizer.lr:
            raise ValueError(
                f"optimizer.min_lr={self.optimizer.min_lr} is above"
                f" optimizer.lr={self.optimizer.lr}"
            )
        return self

    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.logging.save_dir) / self.logging.run_name
