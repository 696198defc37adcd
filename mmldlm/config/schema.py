"""Every key a run may set, one pydantic class a section. A key that stands nowhere here is an error."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

Mode = Literal["unconditional", "l2t", "t2l", "mixed"]
# Far above any model; a config.json that someone else wrote must not ask for what no machine has.
MAX_WIDTH, MAX_COUNT = 1 << 20, 1 << 28
PURE_MODES = ("unconditional", "l2t", "t2l")


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are checked on assignment."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """The MMDiT: shape, vocabulary and switches. Also what `config.json` of an exported model holds."""

    hidden_size: int = Field(384, ge=8, le=MAX_WIDTH)
    """Width H of both streams."""
    n_blocks: int = Field(6, ge=1, le=10_000)
    """Number of joint blocks."""
    n_heads: int = Field(6, ge=1, le=MAX_WIDTH)
    """Attention heads; must divide hidden_size, and hidden_size / n_heads must be even (RoPE)."""
    cond_dim: int = Field(256, ge=8, le=MAX_WIDTH)
    """Width of the conditioning vector (timesteps and pooled latent) that drives adaLN-Zero."""
    mlp_ratio: float = Field(4.0, gt=0, le=1000)
    """Hidden width of each MLP as a multiple of hidden_size."""
    max_seq_len: int = Field(128, ge=2, le=MAX_COUNT)
    """Longest text in tokens, EOS included."""
    latent_dim: int | None = Field(None, ge=1, le=MAX_WIDTH)
    """Dimension D of a latent. None: taken from the data."""
    latent_tokens: int = Field(4, ge=1, le=MAX_WIDTH)
    """Chunk tokens K that present one latent; K * hidden_size >= D passes it without loss."""
    max_latents: int = Field(1, ge=1, le=MAX_COUNT)
    """Latents N of one sample. 1: as many as the data has (`mmldlm prepare --latents-per-text N`, for long texts)."""
    qk_rmsnorm: bool = True
    """RMS-normalise queries and keys in every head (keeps attention logits bounded in bf16)."""
    tie_embeddings: bool = False
    """Share the token embedding with the text head."""
    token_embedding_init: Literal["random", "encoder"] = "random"
    """encoder: start from the input embeddings of the encoder that made the latents, cut to hidden_size by their
    principal components (the store must use that encoder's tokenizer)."""
    gradient_checkpointing: bool = False
    """Keep only the rows between blocks and run each block again in the backward pass: a third more work for about a
    tenth of the memory. Off, blocks still recompute what is cheap (norms, modulation, GELU, rotation)."""
    vocab_size: int | None = Field(None, ge=3, le=MAX_COUNT)
    """Vocabulary V. None: taken from the tokenizer."""
    mask_token_id: int | None = None
    """Id of [MASK]; the text head never predicts it (SUBS). None: taken from the tokenizer."""
    pad_token_id: int | None = None
    """Id used to fill up rows. None: taken from the tokenizer."""
    eos_token_id: int | None = None
    """Id that ends every text. None: taken from the tokenizer."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelConfig:
        if self.hidden_size % self.n_heads:
            low = [n for n in range(1, math.isqrt(self.hidden_size) + 1) if self.hidden_size % n == 0]
            divisors = {*low, *(self.hidden_size // n for n in low)}
            near = sorted(divisors, key=lambda n: abs(n - self.n_heads))[:3]
            raise ValueError(
                f"model.n_heads={self.n_heads} does not divide model.hidden_size={self.hidden_size}; "
                f"nearest that do: {', '.join(map(str, sorted(near)))}"
            )
        if (self.hidden_size // self.n_heads) % 2:
            raise ValueError(
                f"a head is model.hidden_size / model.n_heads = {self.hidden_size // self.n_heads} wide; "
                "RoPE needs an even width: choose another model.n_heads"
            )
        return self


class TokenizerConfig(Section):
    """Which tokenizer the data must have been prepared with."""

    name: str | None = None
    """Tokenizer the store was prepared with (a Hugging Face name or folder, `minilm`, or `train`). None: the
    store's own."""
    cache_dir: str | None = None
    """Folder in which Hugging Face keeps downloaded files."""


class DataConfig(Section):
    """Where the prepared data lies and how it is fed."""

    latent_data_root: str | None = None
    """Folder of the store that `mmldlm prepare` wrote."""
    mixture: dict[str, float] | None = None
    """Several stores instead of latent_data_root: folder -> weight, as in 'data.mixture={a: 0.8, b: 0.2}'. Of every
    4,096 samples each store has its share, in epochs of its own; they must have one tokenizer and one encoder."""
    batching: Literal["samples", "tokens"] = "samples"
    """samples: every optimizer step has as many samples. tokens: as many tokens, so that a step of long texts has fewer
    samples and none takes more memory than another; on average as many samples as the former."""
    overlong: Literal["error", "truncate"] = "error"
    """What to do with texts longer than model.max_seq_len. truncate cuts them when they are read (the number is
    reported; their latents are of the whole texts). `mmldlm prepare --overlong chunk` drops nothing."""
    num_workers: int = Field(0, ge=0)
    """Worker processes that build batches; 0 builds them in the training process (a packed store needs no more)."""
    prefetch_factor: int = Field(4, ge=1)
    """Batches each worker keeps ready."""
    bucket_batches: int = Field(64, ge=1)
    """Global batches in one shuffled window that is sorted by length (1: no length buckets)."""
    verify: Literal["none", "sizes", "checksums"] = "sizes"
    """How much of the store is checked when a run opens it."""
    max_train_samples: int | None = Field(None, ge=1)
    """Use only the first samples of the training split. None: all."""
    max_validation_samples: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Samples of the validation split in an evaluation during training. A number: the first ones. auto: spread evenly
    over the split, as many as cost about 5 % of the training between two evaluations, at least 64. None: all."""

    @property
    def roots(self) -> list[str]:
        """Folders of all stores that a run reads."""
        own = [] if self.latent_data_root is None else [self.latent_data_root]
        return own if self.mixture is None else list(self.mixture)

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.mixture is not None:
            if self.latent_data_root is not None:
                raise ValueError("data.latent_data_root and data.mixture are both set: one of them names the data")
            if not self.mixture or min(self.mixture.values()) <= 0:
                raise ValueError(f"data.mixture={self.mixture}: at least one folder, each with a weight above 0")
            if self.max_train_samples is not None or self.max_validation_samples not in (None, "auto"):
                raise ValueError(
                    "data.max_train_samples and data.max_validation_samples are for one store, not a mixture"
                )
        return self


class TextDiffusionConfig(Section):
    """Masked diffusion of text (MDLM, arXiv 2406.07524)."""

    schedule: Literal["loglinear", "cosine", "polynomial"] = "loglinear"
    """Masking schedule: loglinear masks (1 - eps) t, cosine 1 - cos(pi t / 2), polynomial t^2."""
    eps: float = Field(1e-4, ge=0, lt=0.5)
    """Log-linear schedule keeps a token with probability eps at t = 1."""
    masking: Literal["count", "independent"] = "count"
    """count masks exactly ceil(t L) of L tokens with weight L / k: the same NELBO with far less variance. independent
    masks every token by itself with weight 1 / t (MDLM)."""
    t_min: float = Field(1e-3, gt=0, lt=0.5)
    """Smallest timestep of independent masking; its NELBO misses at most t_min * log V nats a token."""
    timesteps: Literal["low_discrepancy", "uniform"] = "low_discrepancy"
    """How the timesteps of one global batch are spread over (t_min, 1)."""
    fully_masked_only: bool = False
    """Train at t = 1 alone, as MM-LDLM did in l2t; harms every sampler of more than one step."""


class LatentDiffusionConfig(Section):
    """Continuous diffusion of latents."""

    path: Literal["cosine", "linear", "sigmoid", "rectified_flow"] = "cosine"
    """Noise schedule: three variance preserving ones, or the straight path z = (1 - t) x + t e."""
    prediction: Literal["x0", "v", "epsilon", "flow"] = "x0"
    """What the latent head predicts."""
    timesteps: Literal["low_discrepancy", "uniform", "logit_normal"] = "low_discrepancy"
    """How timesteps are drawn; logit_normal is sigmoid(N(0, 1)) (SD3)."""
    timestep_shift: float = Field(1.0, gt=0)
    """SD3's shift s: t' = s t / (1 + (s - 1) t). Above 1 it trains more at high noise, where the text decides."""
    weighting: Literal["unit", "min_snr", "velocity"] = "unit"
    """Weight of the squared error: 1, min-SNR-gamma (arXiv 2303.09556), or that of the v / flow loss, in
    the prediction's space."""
    min_snr_gamma: float = Field(5.0, gt=0)
    """gamma of weighting=min_snr."""
    t_min: float = Field(1e-3, gt=0, lt=0.5)
    """Smallest timestep."""
    scaling: Literal["standardise", "sqrt_d", "none"] = "standardise"
    """Per-dimension mean and std of the training data, a factor sqrt(D) for unit-norm latents, or raw latents."""
    l2_normalise: bool = False
    """Divide every latent by its norm before scaling (MM-LDLM). The norm is lost: samples are unit vectors."""
    renormalise_x0: bool = True
    """Sampling puts x0 predictions back on the sphere when the encoder's latents are unit vectors."""

    @model_validator(mode="after")
    def _prediction_fits_path(self) -> LatentDiffusionConfig:
        if (self.prediction == "flow") != (self.path == "rectified_flow") and self.prediction in ("flow", "v"):
            raise ValueError(
                f"latent_diffusion.prediction={self.prediction} does not go with latent_diffusion.path={self.path}: "
                "flow belongs to rectified_flow, v to cosine, linear and sigmoid; x0 and epsilon go with all"
            )
        if self.l2_normalise and self.scaling == "standardise":
            raise ValueError(
                "latent_diffusion.l2_normalise does not go with latent_diffusion.scaling=standardise, whose mean and "
                "std are those of the latents as stored: set latent_diffusion.scaling=sqrt_d"
            )
        return self


class LossConfig(Section):
    """Weights of the loss terms, and MM-LDLM's measures as named options."""

    latent_loss_weight: float = Field(1.0, ge=0)
    """Weight of the latent loss."""
    text_loss_weight: float = Field(1.0, ge=0)
    """Weight of the text NELBO per token."""
    length_loss_weight: float = Field(0.1, ge=0)
    """Weight of the length head's negative log-likelihood (per sample)."""
    latent_loss: Literal["mse", "normalised_mse"] = "mse"
    """normalised_mse is MM-LDLM's: both sides L2-normalised, 2 (1 - cos); sound for x0-prediction only."""
    normalise_eps: float = Field(1e-8, gt=0)
    """Added to the norm in normalised_mse."""
    text_loss_clamp: float | None = Field(None, gt=0)
    """Clamp each sample's text NELBO per token (MM-LDLM: 100). Above it the gradient is zero. None: off."""
    latent_loss_clamp: float | None = Field(None, gt=0)
    """Clamp each sample's latent loss (MM-LDLM: 10). Above it the gradient is zero. None: off."""
    text_weight_clip: float | None = Field(None, gt=0)
    """Largest weight of a masked token (1 / t under MDLM). Clipped, the loss bounds no likelihood. None: off."""
    latent_weight_clip: float | None = Field(None, gt=0)
    """Largest weight of a sample's latent error (RadioDiff's weight clipping). None: off."""
    latent_prediction_clamp: float | None = Field(None, gt=0)
    """Clamp every element of the latent prediction to [-c, c] in the loss. Beyond it there is no gradient."""
    latent_target_clamp: float | None = Field(None, gt=0)
    """Clamp every element of the latent target to [-c, c]. Larger values are then never learnt. None: off."""
    allow_unsound: bool = False
    """Permit normalised_mse with a noise or velocity target, which cannot learn the latent's scale."""


class TrainingConfig(Section):
    """What is trained, for how long, in which precision."""

    loss_type: Mode = "mixed"
    """Mode: unconditional, l2t (embedding to text), t2l (text to embedding), or mixed (one mode a sample)."""
    loss_type_weights: dict[Literal["unconditional", "l2t", "t2l"], float] | None = None
    """Shares of the modes under mixed, as in 'training.loss_type_weights={l2t: 0.7, t2l: 0.3}' or
    training.loss_type_weights.l2t=0.7; a mode that is not named has none. None: equal shares."""
    train_batch_size: int = Field(32, ge=1)
    """Micro-batch of one rank."""
    eval_batch_size: int | None = Field(None, ge=1)
    """Micro-batch of one rank in evaluation. None: train_batch_size."""
    grad_accum_steps: int = Field(1, ge=1)
    """Micro-batches a rank adds up before an optimizer step."""
    num_train_steps: int = Field(1000, ge=1)
    """Optimizer steps, skipped ones included."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Compute precision; master weights, moments and reduction are fp32 in every case. fp16 (for GPUs without bf16) has
    a dynamic loss scale, stability.loss_scale; bf16 needs none."""
    compile_model: bool = False
    """torch.compile every block."""
    profile: tuple[int, int] | None = None
    """First and last step of a torch profiler trace of rank 0, written to the run's profile/ (slows these steps)."""
    resume: str | None = None
    """A run's `latest`, a step folder, or `auto` (newest whole checkpoint of this run, a fresh start if
    there is none)."""
    init_from: str | None = None
    """Start from the weights (and nothing else) of a run, checkpoint or exported model: another mode, fine-tuning."""
    freeze: Literal["auto", "mode", "none"] = "auto"
    """mode: l2t freezes the latent encoder and head, t2l the text encoder and head. none: both sides are trained. auto:
    mode where training.init_from gives trained weights, none from scratch; a resumed run keeps what it began with."""
    condition_dropout: float = Field(0.1, ge=0, lt=1)
    """Share of l2t and t2l samples whose condition is replaced by the learned null (classifier-free guidance)."""
    seed: int = Field(0, ge=0)
    """Seed of weights, order, modes, timesteps, masks and noise."""

    @model_validator(mode="after")
    def _profile_is_a_range(self) -> TrainingConfig:
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(f"training.profile={list(self.profile)}: [first, last] steps, counted from 1")
        if self.profile is not None and self.profile[1] > self.num_train_steps:
            raise ValueError(
                f"training.profile={list(self.profile)} ends after training.num_train_steps={self.num_train_steps}, so "
                "nothing would be written"
            )
        return self

    @model_validator(mode="after")
    def _weights_belong_to_mixed(self) -> TrainingConfig:
        weights = self.loss_type_weights
        if weights is not None:
            if self.loss_type != "mixed":
                raise ValueError(
                    f"training.loss_type_weights is read only when training.loss_type=mixed (it is {self.loss_type})"
                )
            if min(weights.values(), default=0) < 0 or sum(weights.values()) <= 0:
                raise ValueError(f"training.loss_type_weights={weights}: weights are >= 0 and one of them > 0")
        return self

    def mode_weights(self) -> dict[str, float]:
        """Shares of the three pure modes, adding up to 1."""
        if self.loss_type != "mixed":
            return {mode: float(mode == self.loss_type) for mode in PURE_MODES}
        weights = self.loss_type_weights or dict.fromkeys(PURE_MODES, 1.0)
        total = sum(weights.values())
        return {mode: weights.get(mode, 0.0) / total for mode in PURE_MODES}


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(1e-6, ge=0)
    """Learning rate at and after the end of the schedule."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: int = Field(1000, ge=0)
    """Applied steps over which the rate rises linearly from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decays."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay of matrices; norms, biases, embeddings and learned tokens have none."""
    grad_clip_norm: float | None = Field(1.0, gt=0)
    """Clip gradients to this global norm. None: no clipping."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the weights with this decay (`mmldlm convert --ema`). None: none."""


class EngineConfig(Section):
    """What runs the step."""

    kind: Literal["deepspeed", "fsdp", "ddp", "single"] = "deepspeed"
    """deepspeed (ZeRO 0-3), fsdp (PyTorch FSDP2), ddp (every rank holds the whole model), or single (one process)."""
    zero_stage: int | None = Field(None, ge=0, le=3)
    """ZeRO stage. None: that of the DeepSpeed JSON, or 2 without one."""
    deepspeed_config: str | None = None
    """DeepSpeed JSON file (also --deepspeed_config)."""
    replicas: int = Field(1, ge=1)
    """FSDP2: groups of ranks that each hold the whole model between them (HSDP; e.g. the number of nodes)."""
    timeout: float = Field(600.0, gt=0)
    """Seconds a collective may take before the job ends."""


class StabilityConfig(Section):
    """What counts as a bad step, and what happens then. A step that is not finite is always skipped on all ranks."""

    spike_action: Literal["skip", "log", "off"] = "log"
    """What to do with a finite loss or gradient norm far above the last ones: skip it, only log it, or nothing."""
    spike_sigma: float = Field(6.0, gt=0)
    """A spike lies this many standard deviations above the mean of the window."""
    spike_window: int = Field(128, ge=4)
    """Applied steps in the window of losses and norms; spikes are judged once it is half full."""
    audit_every: int = Field(500, ge=1)
    """Steps between two audits of all weights and moments for non-finite values (each checkpoint is audited, too)."""
    max_consecutive_skips: int = Field(20, ge=1)
    """Steps skipped in a row before the run goes back to its last good checkpoint (a bad audit does so at once)."""
    max_rollbacks: int = Field(2, ge=0)
    """Rollbacks before all ranks stop with exit 4."""
    rollback_lr_factor: float = Field(0.5, gt=0, le=1)
    """Every rollback multiplies the learning rate of the rest of the run by this."""
    max_bad_share: float = Field(0.5, gt=0, le=1)
    """All ranks stop with exit 4 when more than this share of the samples of the last 100 global batches was bad (left
    out, or mended by nan_to_num); judged from the 20th batch on. 1: never."""
    nan_to_num: bool = False
    """Replace non-finite values of a latent by the mean instead of leaving the sample out (it is named either way).
    The model then learns from a damaged sample."""
    loss_scale: float | None = Field(None, ge=1)
    """First loss scale of fp16; it halves on an overflow. None: 65536."""
    loss_scale_window: int | None = Field(None, ge=1)
    """Steps without an overflow after which the loss scale of fp16 doubles. None: 1000."""


class _Checkpoints(Section):
    """How checkpoints are written and how many stay."""

    keep_last: int = Field(2, ge=1)
    """Newest checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1)
    """Also keep every checkpoint whose step is a multiple of this. None: none besides keep_last."""
    timeout: float = Field(1800.0, gt=0)
    """Seconds that writing a checkpoint, or checking one before a resume, may take before the job ends."""

    @property
    def in_background(self) -> bool:
        """checkpoints.async, whose name Python reserves."""
        return getattr(self, "async")


_ASYNC = "Training waits only for the copy off the device; a thread writes it, and it is committed some steps later."
CheckpointsConfig = create_model(
    "CheckpointsConfig", __base__=_Checkpoints, **{"async": (bool, Field(True, description=_ASYNC))}
)


class WandbConfig(Section):
    """Weights & Biases."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """offline writes to the run's folder and needs no network."""
    project: str = "mmldlm"
    """Project name."""


class LoggingConfig(Section):
    """Where a run's folder lies and how often things are written."""

    run_name: str = "mmldlm"
    """Name of the run: its folder is {save_dir}/{run_name}. It may have slashes, but not lead out of save_dir."""
    save_dir: str = "runs"
    """Folder of all runs."""
    log_freq: int = Field(10, ge=1)
    """Steps between two lines on the screen (training_log.jsonl has every step)."""
    save_freq: int = Field(1000, ge=1)
    """Steps between two checkpoints; one is always saved at the end."""
    eval_freq: int = Field(1000, ge=1)
    """Steps between two evaluations on validation data; one is always made at the end."""
    grad_log_interval: int = Field(0, ge=0)
    """Steps between two looks at every layer's gradients, updates and activations (gradient_log.jsonl, wandb); costs
    one host sync on those steps. 0: never."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak TFLOP/s of one device in training.dtype, for the share of it that training reaches (mfu). None: from a table
    of GPUs; without an entry there (and on CPUs) no mfu is shown."""
    plot: bool = True
    """Draw the loss curves into plots/ when the run ends (`mmldlm plot` does so at any time)."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases."""

    @model_validator(mode="after")
    def _stays_in_save_dir(self) -> LoggingConfig:
        parts = self.run_name.split("/")
        if "" in parts or "." in parts or ".." in parts or "\0" in self.run_name:  # "" is first in an absolute one
            raise ValueError(
                f"run_name {self.run_name!r} must be the path of a folder in save_dir: not empty, not absolute, "
                "without '.' or '..'"
            )
        return self


class Config(Section):
    """One run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    text_diffusion: TextDiffusionConfig = Field(default_factory=TextDiffusionConfig)
    latent_diffusion: LatentDiffusionConfig = Field(default_factory=LatentDiffusionConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    stability: StabilityConfig = Field(default_factory=StabilityConfig)
    checkpoints: CheckpointsConfig = Field(default_factory=CheckpointsConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        noise_target = self.latent_diffusion.prediction != "x0"
        if self.loss.latent_loss == "normalised_mse" and noise_target and not self.loss.allow_unsound:
            raise ValueError(
                f"loss.latent_loss=normalised_mse with latent_diffusion.prediction={self.latent_diffusion.prediction} "
                "cannot learn the scale of the noise, which every sampler needs (docs/objectives.md); use "
                "latent_diffusion.prediction=x0, or loss.latent_loss=mse, or loss.allow_unsound=true to do it anyway"
            )
        scaled = self.stability.loss_scale is not None or self.stability.loss_scale_window is not None
        if scaled and self.training.dtype != "fp16":
            raise ValueError(
                f"stability.loss_scale and loss_scale_window are read only with training.dtype=fp16 (it is "
                f"{self.training.dtype}, which needs no loss scaling)"
            )
        if self.optimizer.min_lr > self.optimizer.lr:
            raise ValueError(f"optimizer.min_lr={self.optimizer.min_lr} is above optimizer.lr={self.optimizer.lr}")
        return self

    def run_dir(self):
        """Folder of the run as a Path."""
        from pathlib import Path

        return Path(self.logging.save_dir) / self.logging.run_name
