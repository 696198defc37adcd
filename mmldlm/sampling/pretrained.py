"""A model with everything that sampling needs in addition to the weights: tokenizer and diffusion
settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from mmldlm.config.task_names import DEFAULT_TASK
from mmldlm.config.text_samplers import REMOVED_SAMPLERS, RESULTS_PAGE
from mmldlm.data.encoders.model_files import read_tokenizer
from mmldlm.data.encoders.specs import find_identity_problems
from mmldlm.data.manifest import find_codec_problems
from mmldlm.diffusion import GaussianProcess, MaskedDiffusion
from mmldlm.errors import UserError
from mmldlm.models.pretrained_io import COPY_AGAIN
from mmldlm.sampling.load_model import CONVERT, load_model
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
        model: in eval mode.
        tokenizer: fast Hugging Face tokenizer, or None (not needed to sample ids).
        text_config: the text_diffusion section of its training; None for a task without one.
        latent_config: the latent_diffusion section of its training; None for a task that predicts
            no latents.
        mode_weights: fraction of each mode in training; None if unknown.
        condition_dropout: how often the null conditions were trained; None if unknown.
        condition_noise: share of the l2t samples that were trained on a noised latent.
        encoder: identity of the encoder of its latents; None if unknown.
        folder: the path that was opened.
        task: that trained it.
        image: identity of the codec of its images; None for a model of texts.
        config_folder: folder of its config.json, which has the files of the codec.
        vae: folder of the autoencoder of its images, if it is elsewhere than the codec says.
    """

    model: nn.Module
    tokenizer: Any
    text_config: Any
    latent_config: LatentDiffusionConfig | None
    mode_weights: dict[str, float] | None = None
    condition_dropout: float | None = None
    condition_noise: float = 0.0
    encoder: dict[str, Any] | None = None
    folder: Path | None = None
    task: TextTask = field(default_factory=lambda: find_task(DEFAULT_TASK))
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


def load_pretrained(
    path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Pretrained:
    """Load a model and its settings from a run, checkpoint or converted folder.

    Args:
        path: a run, RUN/latest, a checkpoint of any engine, a model.pt, or a folder written by
            `mmldlm convert`. From a checkpoint the weights are read, not their moving average (as
            in `mmldlm convert` without --ema).

    Raises:
        UserError: unreadable or corrupt files, a missing config, tokenizer or diffusion settings,
            or a tokenizer with another vocabulary.
    """
    model, values, config_path, task = load_model(path, device, dtype)
    sections: dict[str, Any] = {"text_diffusion": None, "latent_diffusion": None}
    for key in sections:
        if key not in task.config_class.model_fields:
            continue
        if not isinstance(values.get(key), dict):
            raise UserError(
                f'"{key}" in {config_path}: the diffusion settings the model was trained with',
                "no such key",
                f"{CONVERT}; other settings than those of training would give nonsense without an"
                " error",
            )
        try:
            sections[key] = task.config_class.model_fields[key].annotation(**values[key])
        except ValidationError as error:
            raise UserError(f'a valid "{key}" in {config_path}', str(error), CONVERT) from error
    if sections["latent_diffusion"] is not None:
        model.normalizes_latents = sections["latent_diffusion"].l2_normalize
    training, encoder = values.get("training") or {}, values.get("encoder")
    try:
        settings = _TrainingSettings(**training)
    except (ValidationError, TypeError) as error:
        raise UserError(f'a valid "training" in {config_path}', str(error), COPY_AGAIN) from error
    if encoder is not None and (problem := find_identity_problems(encoder)):
        raise UserError(f'a valid "encoder" in {config_path}', problem, COPY_AGAIN)
    image = values.get("image")
    if image is not None and (problem := find_codec_problems(image)):
        raise UserError(f'a valid "image" in {config_path}', problem, COPY_AGAIN)
    return Pretrained(
        model,
        _load_tokenizer(config_path.parent, model),
        sections["text_diffusion"],
        sections["latent_diffusion"],
        settings.mode_weights,
        settings.condition_dropout,
        settings.l2t_condition_noise,
        encoder,
        Path(path),
        task,
        image,
        config_path.parent,
    )


class _TrainingSettings(BaseModel):
    """Keys of "training" in config.json that sampling uses; others are ignored."""

    mode_weights: dict[str, float] | None = None
    condition_dropout: float | None = None
    l2t_condition_noise: float = 0.0


def _load_tokenizer(folder: Path, model: nn.Module) -> Any:
    path = folder / "tokenizer"
    if not path.is_dir():
        raise UserError(f"the tokenizer in {path}", "no such folder", CONVERT)
    tokenizer = read_tokenizer(path, f"a tokenizer in {path}", CONVERT)
    config = model.config
    expected = {
        key: getattr(config, key) for key in ("mask_token_id", "pad_token_id", "eos_token_id")
    }
    found = {key: getattr(tokenizer, key) for key in expected}
    if found != expected or len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer the model was trained with in {path}: {expected}, at most"
            f" {config.vocab_size} tokens",
            f"{found}, {len(tokenizer)} tokens",
            CONVERT,
        )
    return tokenizer
