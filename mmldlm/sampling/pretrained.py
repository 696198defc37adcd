"""A converted checkpoint with everything that sampling needs beside the weights: tokenizer and diffusion settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from mmldlm.config.schema import LatentDiffusionConfig, TextDiffusionConfig
from mmldlm.data.tokenizer_files import read_tokenizer
from mmldlm.diffusion import ContinuousDiffusion, MaskedDiffusion
from mmldlm.errors import UserError
from mmldlm.models.files import COPY_AGAIN, read_config

# Latents of norm 1 have sum(mean^2 + std^2) = 1 exactly; other encoders miss it by far more than rounding.
_UNIT_TOLERANCE = 1e-2
_CONVERT = "make the folder with `mmldlm convert RUN/latest OUT`"


@dataclass
class Pretrained:
    """A model and the settings it was trained with.

    Attributes:
        model: in eval mode. tokenizer: fast Hugging Face tokenizer, or None (not needed to sample ids).
        text_config, latent_config: the sections it was trained with. mode_weights: share of each mode in training, None
            when the folder does not say. condition_dropout: how often the nulls were trained, None when not said.
        encoder: identity of the encoder of its latents, None when not said. folder: where it came from.
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
    def latent_diffusion(self) -> ContinuousDiffusion:
        """The noise process of its latents."""
        config = self.latent_config
        return ContinuousDiffusion(config.path, config.prediction, config.weighting, config.min_snr_gamma)

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
    def knows_encoder(self) -> bool:
        """Whether the encoder of its latents is named; `mmldlm pack` without --encoder calls it unknown."""
        return self.encoder is not None and self.encoder.get("name") != "unknown"

    def can_do(self, mode: str) -> bool:
        """Whether it was trained in a mode; True when its folder does not say."""
        return self.mode_weights is None or self.mode_weights.get(mode, 0) > 0

    def check_mode(self, mode: str) -> None:
        """Refuse a mode that was never trained: its output is noise, and looks like output.

        Raises:
            UserError: it was not trained in it.
        """
        if not self.can_do(mode):
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


def load_pretrained(folder: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Pretrained:
    """Load what `mmldlm convert` wrote.

    Raises:
        UserError: missing weights, config, tokenizer or diffusion settings, or a tokenizer of another vocabulary.
    """
    from mmldlm.models import MultimodalMMDiT

    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"a converted checkpoint at {folder}", "a file" if folder.exists() else "nothing there", _CONVERT
        )
    model = MultimodalMMDiT.from_pretrained(folder, device=device, dtype=dtype)
    values = read_config(folder)
    sections = {}
    for key, section in (("text_diffusion", TextDiffusionConfig), ("latent_diffusion", LatentDiffusionConfig)):
        if not isinstance(values.get(key), dict):
            raise UserError(
                f'"{key}" in {folder}/config.json: the diffusion settings the model was trained with',
                "no such key",
                f"{_CONVERT}; sampling with other settings than those of training gives nonsense without an error",
            )
        try:
            sections[key] = section(**values[key])
        except ValidationError as error:
            raise UserError(f'a valid "{key}" in {folder}/config.json', str(error), _CONVERT) from error
    model.normalises_latents = sections["latent_diffusion"].l2_normalise
    training, encoder = values.get("training") or {}, values.get("encoder")
    try:
        told = _Training(**training)
    except (ValidationError, TypeError) as error:
        raise UserError(f'a valid "training" in {folder}/config.json', str(error), COPY_AGAIN) from error
    if not isinstance(encoder, dict | None):
        raise UserError(f'an object "encoder" in {folder}/config.json', repr(encoder)[:100], COPY_AGAIN)
    return Pretrained(
        model,
        _tokenizer(folder, model),
        sections["text_diffusion"],
        sections["latent_diffusion"],
        told.mode_weights,
        told.condition_dropout,
        encoder,
        folder,
    )


class _Training(BaseModel):
    """What config.json says of the training; other keys are left alone."""

    mode_weights: dict[str, float] | None = None
    condition_dropout: float | None = None


def _tokenizer(folder: Path, model):
    place = folder / "tokenizer"
    if not place.is_dir():
        raise UserError(f"the tokenizer in {place}", "no such folder", _CONVERT)
    tokenizer = read_tokenizer(place, f"a tokenizer in {place}", _CONVERT)
    config = model.config
    wanted = {key: getattr(config, key) for key in ("mask_token_id", "pad_token_id", "eos_token_id")}
    found = {key: getattr(tokenizer, key) for key in wanted}
    if found != wanted or len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer the model was trained with in {place}: {wanted}, at most {config.vocab_size} tokens",
            f"{found}, {len(tokenizer)} tokens",
            _CONVERT,
        )
    return tokenizer
