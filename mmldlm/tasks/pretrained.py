"""A model with everything that sampling needs in addition to the weights: tokenizer and diffusion
settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from mmldlm.config.task_names import DEFAULT_TASK
from mmldlm.diffusion import GaussianProcess, MaskedDiffusion
from mmldlm.errors import UserError
from mmldlm.sampling.model import Model
from mmldlm.sampling.settings import REMOVED_SAMPLERS, RESULTS_PAGE
from mmldlm.tasks.registry import find_task

if TYPE_CHECKING:
    from mmldlm.tasks.text_task import TextTask
    from mmldlm.tasks.translation.config import LatentDiffusionConfig

# Latents of norm 1 have sum(mean^2 + std^2) = 1 up to rounding; other encoders differ by far more.
_UNIT_TOLERANCE = 1e-2


@dataclass
class Pretrained:
    """A model and the settings it was trained with.

    Attributes:
        model: The model, in eval mode.
        tokenizer: Fast Hugging Face tokenizer, or None (not needed to sample ids).
        text_config: Section text_diffusion of its training; None for a task without one.
        latent_config: Section latent_diffusion of its training; None for a task that predicts no
            latents.
        mode_weights: Fraction of each mode in training; None if unknown.
        condition_dropout: Fraction of samples trained on the null condition; None if unknown.
        condition_noise: Fraction of the l2t samples that were trained on a noised latent.
        encoder: Identity of the encoder of its latents; None if unknown.
        folder: Path that was opened.
        task: Task that trained it.
        image: Identity of the codec of its images; None for a model of texts.
        config_folder: Folder of its config.json, which has the files of the codec.
        vae: Folder of the autoencoder of its images, if it is elsewhere than the codec says.
    """

    model: Model
    tokenizer: Any
    text_config: Any
    latent_config: LatentDiffusionConfig | None
    mode_weights: dict[str, float] | None = None
    condition_dropout: float | None = None
    condition_noise: float = 0.0
    encoder: dict[str, Any] | None = None
    folder: Path | None = None
    task: TextTask = field(default_factory=lambda: cast("TextTask", find_task(DEFAULT_TASK)))
    image: dict[str, Any] | None = None
    config_folder: Path | None = None
    vae: str | None = None

    @property
    def text_diffusion(self) -> MaskedDiffusion:
        """Masking process of the text, for tasks of masked diffusion."""
        return MaskedDiffusion(
            self.model.config.mask_token_id, self.text_config.schedule, self.text_config.eps
        )

    @property
    def latent_diffusion(self) -> GaussianProcess:
        """Noise process of the latents."""
        assert self.latent_config is not None
        return self.latent_config.process()

    @property
    def unit_norm(self) -> bool:
        """Whether the training latents are unit vectors, according to the encoder or else to their
        statistics.
        """
        if self.latent_config is not None and self.latent_config.l2_normalize:
            return True
        if self.encoder is not None and "normalize" in self.encoder:
            return bool(self.encoder["normalize"])
        return latents_are_unit(self.model.latent_mean, self.model.latent_std)

    @property
    def renormalize(self) -> bool:
        """Whether samplers project x0 estimates onto the unit sphere."""
        return (
            self.latent_config is not None and self.latent_config.renormalize_x0 and self.unit_norm
        )

    @property
    def num_ids(self) -> int | None:
        """Number of ids of which each of its latents is one; None: they are values."""
        return getattr(self.model, "num_ids", None)

    @property
    def clamp_x0(self) -> float | None:
        """The bound that samplers clamp x0 estimates to, in the space of the stored latents; None:
        none.
        """
        return None if self.latent_config is None else self.latent_config.clamp_x0

    @property
    def reads_latents(self) -> bool:
        """Whether the model is conditioned on latents, or predicts them."""
        return self.latent_config is not None or self.supports("l2t")

    @property
    def has_encoder(self) -> bool:
        """Whether the encoder of its latents is known; `mmldlm pack` without --encoder records
        "unknown".
        """
        return self.encoder is not None and self.encoder.get("name") != "unknown"

    def supports(self, mode: str) -> bool:
        """Whether the model was trained in a mode; True if unknown."""
        return self.mode_weights is None or self.mode_weights.get(mode, 0) > 0

    def check_kind(self, kind: str, sampler: str | None = None) -> None:
        """Reject what the model's task lacks.

        Raises:
            UserError: a kind of samples or, where one is named, a sampler.
        """
        samplers = self.task.samplers
        name, where = self.task.name, self.folder or "a model"
        if kind not in samplers:
            raise UserError(
                f"a checkpoint of a task that has `sample {kind}`",
                f"task={name} in {where}, which has {', '.join(samplers)}",
                "use another checkpoint, or another kind of samples",
            )
        if sampler is not None and sampler not in samplers[kind]:
            known = ", ".join(samplers[kind])
            expected = f"--sampler {known} for `sample {kind}` of task={name}"
            is_removed = sampler in REMOVED_SAMPLERS
            removed = f" (removed, with its measurements in {RESULTS_PAGE})" if is_removed else ""
            raise UserError(
                expected, f"--sampler {sampler}{removed}", "choose one of them, or omit --sampler"
            )

    def check_mode(self, mode: str) -> None:
        """Reject a mode without training, whose output would be plausible-looking noise.

        Raises:
            UserError: the model was not trained in it.
        """
        if not self.supports(mode):
            how = (
                "another model.conditioning"
                if self.latent_config is None
                else f"training.loss_type={mode} or mixed"
            )
            trained = ", ".join(
                name for name, weight in (self.mode_weights or {}).items() if weight > 0
            )
            raise UserError(
                f"a model trained in mode {mode}",
                f"{self.folder or 'a model'} trained only in {trained or 'no mode'}",
                f"use another checkpoint, or train one with {how}",
            )

    def check_guidance(self, guidance: float) -> None:
        """Reject guidance for a model whose null condition was never trained.

        Raises:
            UserError: guidance other than 1 with condition_dropout 0.
        """
        if guidance != 1.0 and self.condition_dropout == 0:
            raise UserError(
                "--guidance 1 for a model trained with training.condition_dropout=0",
                f"--guidance {guidance}: its null conditions were never trained",
                "omit --guidance, or train with training.condition_dropout=0.1",
            )

    def check_condition_timestep(self, timestep: float) -> None:
        """Reject a noised condition for a model that was trained on clean ones alone.

        Raises:
            UserError: a timestep above 0 without training.l2t_condition_noise and mode
                unconditional.
        """
        trained = self.condition_noise > 0 or (self.mode_weights or {}).get("unconditional", 0) > 0
        if timestep > 0 and not trained:
            raise UserError(
                "--condition-timestep 0 for a model whose text was only ever trained on clean"
                " embeddings",
                f"--condition-timestep {timestep}",
                "omit it, or train with training.l2t_condition_noise=0.3",
            )


def latents_are_unit(mean: Tensor, std: Tensor) -> bool:
    """Whether data with this mean and std [D] has norm 1 on average."""
    return abs(float((mean.double() ** 2 + std.double() ** 2).sum()) - 1.0) < _UNIT_TOLERANCE
