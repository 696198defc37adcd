"""Config of the translation task: its modes, its diffusion processes and its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from mmldlm.config.schema import Config, TrainingConfig
from mmldlm.config.section import (
    MAX_WEIGHT,
    FilledFromData,
    OnResume,
    Section,
    Weight,
    check_keys_are_read,
    check_weights,
)
from mmldlm.data.config import StoreDataConfig, TokenizerConfig
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.utils.option_types import LARGEST

# Preflight reads a config without torch.
if TYPE_CHECKING:
    from mmldlm.diffusion import GaussianProcess

Mode = Literal["unconditional", "l2t", "t2l", "mixed"]
PureMode = Literal["unconditional", "l2t", "t2l"]
PURE_MODES: tuple[PureMode, ...] = ("unconditional", "l2t", "t2l")
# Schedules under which a prediction can be turned into x0; those that are not named go with all.
SCHEDULES_OF_PREDICTION = {
    "v": ("cosine", "linear", "sigmoid"),
    "flow": ("rectified_flow",),
    "x0_epsilon": ("decoupled",),
}


class TextDiffusionConfig(Section):
    """Masked diffusion of text (MDLM, arXiv 2406.07524)."""

    schedule: Annotated[Literal["loglinear", "cosine", "polynomial"], OnResume.FIXED] = "loglinear"
    """Masking schedule: loglinear masks (1 - eps) t, cosine 1 - cos(pi t / 2), polynomial t^2."""
    eps: float = Field(1e-4, ge=0, lt=0.5)
    """Log-linear schedule keeps a token with probability eps at t = 1."""
    masking: Literal["fixed_count", "bernoulli"] = "fixed_count"
    """fixed_count masks exactly k = floor(t L) + 1 of L tokens with weight L / k: the same NELBO
    with far less variance. bernoulli masks every token independently, with the schedule's weight:
    of loglinear 1 / t (MDLM)."""
    min_timestep: float = Field(1e-3, gt=0, lt=0.5)
    """Smallest timestep of masking=bernoulli; its NELBO misses at most min_timestep * log V nats
    per token.
    """
    timesteps: Literal["low_discrepancy", "uniform"] = "low_discrepancy"
    """How the noise levels of one global batch are spread: evenly over (0, 1], under
    masking=bernoulli over (min_timestep, 1), or independently.
    """
    fully_masked_only: bool = False
    """Train at t = 1 only, as MM-LDLM did in l2t; harms every sampler with more than one step."""

    @model_validator(mode="after")
    def _every_key_is_read(self) -> TextDiffusionConfig:
        check_keys_are_read(
            self,
            "text_diffusion",
            ("eps", self.schedule == "loglinear", "text_diffusion.schedule=loglinear"),
            ("min_timestep", self.masking == "bernoulli", "text_diffusion.masking=bernoulli"),
            *(
                (key, not self.fully_masked_only, "text_diffusion.fully_masked_only=false")
                for key in ("masking", "timesteps")
            ),
        )
        return self


class LatentDiffusionConfig(Section):
    """Continuous diffusion of latents."""

    schedule: Annotated[
        Literal["cosine", "linear", "sigmoid", "rectified_flow", "decoupled"], OnResume.FIXED
    ] = "cosine"
    """Noise schedule: three variance-preserving ones, the straight path z = (1 - t) x + t e, or
    RadioDiff's decoupled diffusion z = (1 - t) x + sqrt(t) e."""
    prediction: Annotated[Literal["x0", "v", "epsilon", "flow", "x0_epsilon"], OnResume.FIXED] = (
        "x0"
    )
    """What the latent head predicts. x0_epsilon: both, in a head twice as wide
    (schedule=decoupled).
    """
    timesteps: Literal["low_discrepancy", "uniform", "logit_normal"] = "low_discrepancy"
    """How timesteps are drawn; logit_normal is sigmoid(N(logit_normal_mean, logit_normal_std^2))
    (SD3).
    """
    logit_normal_mean: float = Field(0.0, ge=-10, le=10)
    """Mean of timesteps=logit_normal. Above 0 it trains more at high noise (JiT, arXiv 2511.13720,
    has 0.8 in this direction of time)."""
    logit_normal_std: float = Field(1.0, gt=0, le=10)
    """Standard deviation of timesteps=logit_normal (JiT: 0.8)."""
    timestep_shift: float = Field(1.0, gt=0, le=1e6)
    """SD3's shift s: t' = s t / (1 + (s - 1) t). Above 1 it trains more at high noise, where the
    text decides. For images larger than 256 px SD3's rule is s = side / 256: their noise hides
    less."""
    weighting: Literal["unit", "min_snr", "velocity", "ddm", "ddm_inverse"] = "unit"
    """Weight of the squared error: 1, min-SNR-gamma (arXiv 2303.09556), or that of the v / flow
    loss, in the prediction's space. Of schedule=decoupled also ddm (2 e^(1 - t) for x0, e^sqrt(t)
    for the noise; RadioDiff) and ddm_inverse (1 / t and 1 / (1 - t); DDM)."""
    velocity_floor: float = Field(1e-3, gt=0, le=1)
    """On the straight path weighting=velocity weighs the squared error of x0 by 1 / max(t,
    this)^2. JiT has 0.05: weights up to 400 instead of a million."""
    min_snr_gamma: float = Field(5.0, gt=0, le=MAX_WEIGHT)
    """gamma of weighting=min_snr."""
    ddm_weight_cap: float = Field(100.0, ge=1, le=MAX_WEIGHT)
    """Largest weight of weighting=ddm_inverse, whose weights are infinite at t = 0 and t = 1."""
    min_timestep: float = Field(1e-3, gt=0, lt=0.5)
    """Smallest timestep before timestep_shift, which moves it too."""
    scaling: Annotated[Literal["standardize", "sqrt_d", "none"], OnResume.FIXED] = "standardize"
    """Per-dimension mean and std of the training data, a factor sqrt(D) for unit-norm latents, or
    raw latents.
    """
    l2_normalize: Annotated[bool, OnResume.FIXED] = False
    """Divide every latent by its norm before scaling (MM-LDLM).

    The norm is lost: samples are unit vectors.
    """
    clamp_x0: float | None = Field(None, gt=0, le=LARGEST)
    """Sampling clamps x0 predictions to [-c, c] in the space of the stored latents: 1 for pixels.

    None: off.
    """

    @model_validator(mode="after")
    def _prediction_fits_schedule(self) -> LatentDiffusionConfig:
        allowed = SCHEDULES_OF_PREDICTION.get(self.prediction)
        if allowed is not None and self.schedule not in allowed:
            raise ValueError(
                f"latent_diffusion.prediction={self.prediction} does not go with"
                f" latent_diffusion.schedule={self.schedule}: flow belongs to rectified_flow,"
                " x0_epsilon to decoupled, v to cosine, linear and sigmoid; x0 and epsilon go"
                " with all"
            )
        if self.weighting in ("ddm", "ddm_inverse") and self.schedule != "decoupled":
            raise ValueError(
                f"latent_diffusion.weighting={self.weighting} belongs to"
                f" latent_diffusion.schedule=decoupled (it is {self.schedule})"
            )
        if self.weighting == "velocity" and self.schedule == "decoupled":
            raise ValueError(
                "latent_diffusion.weighting=velocity does not go with"
                " latent_diffusion.schedule=decoupled, whose velocity is infinite at t = 0: choose"
                " ddm, ddm_inverse, min_snr or unit"
            )
        if self.l2_normalize and self.scaling == "standardize":
            raise ValueError(
                "latent_diffusion.l2_normalize does not go with"
                " latent_diffusion.scaling=standardize, whose mean and std are those of the"
                " latents as stored: set latent_diffusion.scaling=sqrt_d"
            )
        return self

    @model_validator(mode="after")
    def _every_key_is_read(self) -> LatentDiffusionConfig:
        draws_normals = self.timesteps == "logit_normal"
        weighs_velocity = self.weighting == "velocity" and self.schedule == "rectified_flow"
        on_the_straight_path = (
            "latent_diffusion.schedule=rectified_flow with latent_diffusion.weighting=velocity"
        )
        is_capped = self.weighting == "ddm_inverse"
        check_keys_are_read(
            self,
            "latent_diffusion",
            ("logit_normal_mean", draws_normals, "latent_diffusion.timesteps=logit_normal"),
            ("logit_normal_std", draws_normals, "latent_diffusion.timesteps=logit_normal"),
            ("velocity_floor", weighs_velocity, on_the_straight_path),
            (
                "min_snr_gamma",
                self.weighting == "min_snr",
                "latent_diffusion.weighting=min_snr",
            ),
            ("ddm_weight_cap", is_capped, "latent_diffusion.weighting=ddm_inverse"),
        )
        return self

    def process(self) -> GaussianProcess:
        """Return the noise process."""
        from mmldlm.diffusion import DecoupledProcess, GaussianProcess

        options = (self.prediction, self.weighting, self.min_snr_gamma)
        if self.schedule == "decoupled":
            return DecoupledProcess(*options, self.ddm_weight_cap)
        return GaussianProcess(self.schedule, *options, self.velocity_floor)


class MaskedTextLossConfig(Section):
    """Weights of the loss terms of masked text."""

    length_loss_weight: float = Field(0.1, ge=0, le=MAX_WEIGHT)
    """Weight of the length head's negative log-likelihood (per sample)."""
    text_weighting: Literal["elbo", "uniform"] = "elbo"
    """Weight of a masked token in training. elbo: the NELBO's. uniform: 2 for all, of the
    same mean with masking=fixed_count or schedule=loglinear (twice that of
    fully_masked_only); the loss then bounds no likelihood, but its gradients vary less. Logs and
    evaluations report the NELBO in both cases."""
    text_weight_clip: float | None = Field(None, gt=0, le=LARGEST)
    """Largest weight of a masked token (L / k; with masking=bernoulli the schedule's, as 1 / t).
    Clipped, the loss bounds no likelihood.

    None: off.
    """

    @model_validator(mode="after")
    def _only_the_elbo_is_clipped(self) -> Self:
        reader = "loss.text_weighting=elbo (the weights of uniform are 2)"
        check_keys_are_read(
            self, "loss", ("text_weight_clip", self.text_weighting == "elbo", reader)
        )
        return self


class LossConfig(MaskedTextLossConfig):
    """Weights of the loss terms, and MM-LDLM's measures as named options."""

    latent_loss_weight: float = Field(1.0, ge=0, le=MAX_WEIGHT)
    """Weight of the latent loss."""
    text_loss_weight: float = Field(1.0, ge=0, le=MAX_WEIGHT)
    """Weight of the text NELBO per token."""
    latent_loss: Literal["mse", "normalized_mse"] = "mse"
    """normalized_mse is MM-LDLM's: both sides L2-normalized, 2 (1 - cos); valid for x0-prediction
    only.
    """
    normalize_eps: float = Field(1e-8, gt=0, le=1)
    """Added to the norm in normalized_mse."""
    text_loss_clamp: float | None = Field(None, gt=0, le=LARGEST)
    """Clamp each sample's text NELBO per token (MM-LDLM: 100). Above it the gradient is zero.

    None: off.
    """
    latent_loss_clamp: float | None = Field(None, gt=0, le=LARGEST)
    """Clamp the loss of each latent (MM-LDLM: 10). Above it the gradient is zero. None: off."""
    text_candidates: int | None = Field(None, ge=1)
    """In training, score masked tokens against this many most frequent tokens and a sample of
    1,024 others that stands for the rest: an estimate of the NELBO at a fraction of the text
    head's cost. Evaluation is exact. None: against the whole vocabulary."""
    latent_weight_clip: float | None = Field(None, gt=0, le=LARGEST)
    """Largest weight of a sample's latent error (RadioDiff's weight clipping). None: off."""
    latent_prediction_clamp: float | None = Field(None, gt=0, le=LARGEST)
    """Clamp every element of the latent prediction to [-c, c] in the loss.

    Values outside receive no gradient.
    """
    latent_target_clamp: float | None = Field(None, gt=0, le=LARGEST)
    """Clamp every element of the latent target to [-c, c]. Larger values are then never learned.

    None: off.
    """
    allow_scale_free_latent_loss: bool = False
    """Permit normalized_mse with a noise or velocity target, which cannot learn the latent's
    scale.
    """

    @model_validator(mode="after")
    def _every_key_is_read(self) -> LossConfig:
        is_normalized = self.latent_loss == "normalized_mse"
        check_keys_are_read(
            self, "loss", ("normalize_eps", is_normalized, "loss.latent_loss=normalized_mse")
        )
        return self


class TranslationTrainingConfig(TrainingConfig):
    """Modes, and the common training keys."""

    loss_type: Annotated[Mode, OnResume.FIXED] = "mixed"
    """Mode: unconditional, l2t (embedding to text), t2l (text to embedding), or mixed (one mode
    per sample).
    """
    loss_type_weights: dict[PureMode, Weight] | None = None
    """Weights of the modes under mixed, as in 'training.loss_type_weights={l2t: 0.7, t2l: 0.3}' or
    training.loss_type_weights.l2t=0.7; a mode that is not named has weight 0. None: equal
    weights."""
    freeze: Annotated[Literal["auto", "by_mode", "none"], OnResume.IGNORE, FilledFromData()] = (
        "auto"
    )
    """by_mode: l2t freezes the latent encoder and head, t2l the text encoder and head. none: both
    sides are trained.
    auto: by_mode where training.init_from gives trained weights, none from scratch; a resumed run
    keeps what it began with."""
    condition_dropout: float = Field(0.1, ge=0, lt=1)
    """Fraction of l2t and t2l samples whose condition is replaced by the learned null
    (classifier-free guidance).
    """
    l2t_condition_noise: float = Field(0.0, ge=0, lt=1)
    """Fraction of the l2t samples with a given latent whose latent is noised, and the model is
    given the timestep of that noise: conditioning augmentation (arXiv 2106.15282) for latents that
    no encoder made. Evaluations have none."""
    l2t_condition_timestep: float = Field(0.3, gt=0, le=1)
    """Largest timestep of l2t_condition_noise; uniform between 0 and it."""

    @model_validator(mode="after")
    def _weights_belong_to_mixed(self) -> TranslationTrainingConfig:
        weights = self.loss_type_weights
        if weights is not None:
            if self.loss_type != "mixed":
                raise ValueError(
                    "training.loss_type_weights is read only when training.loss_type=mixed (it is"
                    f" {self.loss_type})"
                )
            check_weights("training.loss_type_weights", {str(k): v for k, v in weights.items()})
        return self

    @model_validator(mode="after")
    def _options_belong_to_a_mode(self) -> TranslationTrainingConfig:
        trains_l2t, noises = self.mode_weights()["l2t"] > 0, self.l2t_condition_noise > 0
        check_keys_are_read(
            self,
            "training",
            ("l2t_condition_noise", trains_l2t, "a training.loss_type that trains l2t"),
            ("l2t_condition_timestep", noises, "training.l2t_condition_noise above 0"),
        )
        return self

    def mode_weights(self) -> dict[str, float]:
        """Fractions of the three pure modes, which add up to 1."""
        if self.loss_type != "mixed":
            return {mode: float(mode == self.loss_type) for mode in PURE_MODES}
        weights = self.loss_type_weights or dict.fromkeys(PURE_MODES, 1.0)
        total = sum(weights.values())
        return {mode: weights.get(mode, 0.0) / total for mode in PURE_MODES}

    @property
    def trained_mode(self) -> Mode:
        """The only mode that is trained, by loss_type or its weights; else mixed."""
        trained = [mode for mode in PURE_MODES if self.mode_weights()[mode] > 0]
        return trained[0] if len(trained) == 1 else "mixed"


class TranslationConfig(Config):
    """One run of the translation task."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    data: StoreDataConfig = Field(default_factory=StoreDataConfig)
    text_diffusion: TextDiffusionConfig = Field(default_factory=TextDiffusionConfig)
    latent_diffusion: LatentDiffusionConfig = Field(default_factory=LatentDiffusionConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    training: TranslationTrainingConfig = Field(default_factory=TranslationTrainingConfig)

    @model_validator(mode="after")
    def _latent_head_fits_prediction(self) -> TranslationConfig:
        prediction, model = self.latent_diffusion.prediction, self.model
        # At t = 1 these hold the noise itself; v is then the latent alone.
        if model.scale_noisy_latents and prediction in ("epsilon", "flow", "x0_epsilon"):
            raise ValueError(
                "model.scale_noisy_latents=true does not go with"
                f" latent_diffusion.prediction={prediction}: the model would not read the noise"
                " that it is to predict"
            )
        if prediction != "x0_epsilon":
            if model.latent_predictions != 1:
                raise ValueError(
                    f"model.latent_predictions={model.latent_predictions} belongs to"
                    f" latent_diffusion.prediction=x0_epsilon (it is {prediction}): drop it"
                )
            return self
        # An assignment validates once more, so only a changed value is assigned.
        if model.latent_predictions != 2:
            model.latent_predictions = 2
        return self

    @model_validator(mode="after")
    def _loss_fits_prediction(self) -> TranslationConfig:
        noise_target = self.latent_diffusion.prediction != "x0"
        if (
            self.loss.latent_loss == "normalized_mse"
            and noise_target
            and not self.loss.allow_scale_free_latent_loss
        ):
            raise ValueError(
                "loss.latent_loss=normalized_mse with"
                f" latent_diffusion.prediction={self.latent_diffusion.prediction} cannot learn the"
                " scale of the noise, which every sampler needs (docs/objectives.md); use"
                " latent_diffusion.prediction=x0, or loss.latent_loss=mse; or accept it with"
                " loss.allow_scale_free_latent_loss=true"
            )
        return self
