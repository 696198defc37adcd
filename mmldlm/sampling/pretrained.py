"""A model with everything that sampling needs beside the weights: tokenizer and diffusion settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from mmldlm.config.schema import LatentDiffusionConfig, TextDiffusionConfig
from mmldlm.data.encoders.tokenizer_files import read_tokenizer
from mmldlm.diffusion import GaussianProcess, MaskedDiffusion
from mmldlm.errors import UserError
from mmldlm.models.pretrained_io import COPY_AGAIN
from mmldlm.sampling.load_model import CONVERT, load_model

# Latents of norm 1 have sum(mean^2 + std^2) = 1 exactly; other encoders miss it by far more than rounding.
_UNIT_TOLERANCE = 1e-2


@dataclass
class Pretrained:
    """A model and the settings it was trained with.

    Attributes:
        model: in eval mode. tokenizer: fast Hugging Face tokenizer, or None (not needed to sample ids).
        text_config, latent_config: the sections it was trained with. mode_weights: share of each mode in training, None
            when the folder does not say. condition_dropout: how often the nulls were trained, None when not said.
        encoder: identity of the encoder of its latents, None when not said. folder: what was opened.
    """

    model: nn.Module
    tokenizer: Any
    text_config: TextDiffusionConfig
    latent_config: LatentDiffusionConfig
    mode_weights: dict[str, float] | None = None
    condition_dropout: float | None = None
    encoder: dict[str, Any] | None = None
    folder: Path | None = None

    @property
    def text_diffusion(self) -> MaskedDiffusion:
        """The masking process of its text."""
        return MaskedDiffusion(self.model.config.mask_token_id, self.text_config.schedule, self.text_config.eps)

    @property
    def latent_diffusion(self) -> GaussianProcess:
        """The noise process of its latents."""
        config = self.latent_config
        return GaussianProcess(config.path, config.prediction, config.weighting, config.min_snr_gamma)

    @property
    def unit_norm(self) -> bool:
        """Whether the latents it was trained on are unit vectors: as its encoder says, else by their statistics."""
        if self.latent_config.l2_normalise:
            return True
        if self.encoder is not None and "normalize" in self.encoder:
            return bool(self.encoder["normalize"])
        return latents_are_unit(self.model.latent_mean, self.model.latent_std)

    @property
    def renormalise(self) -> bool:
        """Whether samplers put x0 estimates back on the unit sphere."""
        return self.latent_config.renormalise_x0 and self.unit_norm

    @property
    def has_encoder(self) -> bool:
        """Whether the encoder of its latents is named; `mmldlm pack` without --encoder calls it unknown."""
        return self.encoder is not None and self.encoder.get("name") != "unknown"

    def supports(self, mode: str) -> bool:
        """Whether it was trained in a mode; True when its folder does not say."""
        return self.mode_weights is None or self.mode_weights.get(mode, 0) > 0

    def check_mode(self, mode: str) -> None:
        """Refuse a mode that was never trained: its output is noise, and looks like output.

        Raises:
            UserError: it was not trained in it.
        """
        if not self.supports(mode):
            learned = ", ".join(name for name, weight in (self.mode_weights or {}).items() if weight > 0)
            raise UserError(
                f"a model trained in mode {mode}",
                f"{self.folder or 'it'} learned only {learned or 'nothing'}",
                f"give another checkpoint, or train one with training.loss_type={mode} or mixed",
            )

    def check_guidance(self, guidance: float) -> None:
        """Refuse guidance whose null was never trained.

        Raises:
            UserError: guidance other than 1 with condition_dropout 0.
        """
        if guidance != 1.0 and self.condition_dropout == 0:
            raise UserError(
                "--guidance 1 for a model trained with training.condition_dropout=0",
                f"--guidance {guidance}: its nulls were never trained",
                "leave --guidance out, or train with training.condition_dropout=0.1",
            )


def latents_are_unit(mean: Tensor, std: Tensor) -> bool:
    """Whether data with this mean and std [D] has norm 1 on average, which only unit vectors have by design."""
    return abs(float((mean.double() ** 2 + std.double() ** 2).sum()) - 1.0) < _UNIT_TOLERANCE


def load_pretrained(path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Pretrained:
    """Load a model and its settings from whatever the user names.

    Args:
        path: a run, RUN/latest, a checkpoint of any engine, a model.pt, or a folder that `mmldlm convert` wrote. Of a
            checkpoint the weights are taken, as `mmldlm convert` does by default, not their moving average.

    Raises:
        UserError: nothing readable there, damaged files, no config, tokenizer or diffusion settings beside the weights,
            or a tokenizer of another vocabulary.
    """
    model, values, config_path = load_model(path, device, dtype)
    sections = {}
    for key, section in (("text_diffusion", TextDiffusionConfig), ("latent_diffusion", LatentDiffusionConfig)):
        if not isinstance(values.get(key), dict):
            raise UserError(
                f'"{key}" in {config_path}: the diffusion settings the model was trained with',
                "no such key",
                f"{CONVERT}; sampling with other settings than those of training gives nonsense without an error",
            )
        try:
            sections[key] = section(**values[key])
        except ValidationError as error:
            raise UserError(f'a valid "{key}" in {config_path}', str(error), CONVERT) from error
    model.normalizes_latents = sections["latent_diffusion"].l2_normalise
    training, encoder = values.get("training") or {}, values.get("encoder")
    try:
        told = _Training(**training)
    except (ValidationError, TypeError) as error:
        raise UserError(f'a valid "training" in {config_path}', str(error), COPY_AGAIN) from error
    if not isinstance(encoder, dict | None):
        raise UserError(f'an object "encoder" in {config_path}', repr(encoder)[:100], COPY_AGAIN)
    return Pretrained(
        model,
        _tokenizer(config_path.parent, model),
        sections["text_diffusion"],
        sections["latent_diffusion"],
        told.mode_weights,
        told.condition_dropout,
        encoder,
        Path(path),
    )


class _Training(BaseModel):
    """What config.json says of the training; other keys are left alone."""

    mode_weights: dict[str, float] | None = None
    condition_dropout: float | None = None


def usable_device(name: str | None) -> str:
    """The device that --device names, or the default: cuda where there is one, else cpu.

    Raises:
        UserError: a device that this machine or this build of torch does not have.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        found = f"{name}: not a device of torch"
    else:
        try:
            torch.empty(1, device=device)
            found = f"{name}: a device without memory" if device.type == "meta" else None
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has one for each kind of absence
            found = f"{name}: {(str(error).splitlines() or ['not here'])[0]}"
    if found is not None:
        number = torch.cuda.device_count() if torch.cuda.is_available() else 0
        known = f"cpu, or cuda:0 to cuda:{number - 1}" if number else "cpu (torch sees no GPU)"
        check = "`python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'`"
        raise UserError(
            f"a --device that this machine has: {known}",
            found,
            "leave --device out" if number else f"leave --device out; why no GPU is seen: `nvidia-smi`, {check}",
        )
    return name


def _tokenizer(folder: Path, model):
    place = folder / "tokenizer"
    if not place.is_dir():
        raise UserError(f"the tokenizer in {place}", "no such folder", CONVERT)
    tokenizer = read_tokenizer(place, f"a tokenizer in {place}", CONVERT)
    config = model.config
    wanted = {key: getattr(config, key) for key in ("mask_token_id", "pad_token_id", "eos_token_id")}
    found = {key: getattr(tokenizer, key) for key in wanted}
    if found != wanted or len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer the model was trained with in {place}: {wanted}, at most {config.vocab_size} tokens",
            f"{found}, {len(tokenizer)} tokens",
            CONVERT,
        )
    return tokenizer
