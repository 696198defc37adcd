"""What the transformers over text and latents share: the scaling of latents, compiled blocks,
files.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmldlm.errors import UserError
from mmldlm.models import pretrained_io


class EncodedLatent(NamedTuple):
    """A latent as the blocks read it; it does not change during sampling, so it is computed once.

    Attributes:
        tokens: chunk tokens; None without them. [B, M, H]
        pooled: pooled latent; None without one. [B, C]
        keys_values: of each block's cross-attention; None: not computed yet.
        side: what the text reads of a subclass's side inputs; None without them. [B, C]
    """

    tokens: Tensor | None = None
    pooled: Tensor | None = None
    keys_values: tuple[tuple[Tensor, Tensor], ...] | None = None
    side: Tensor | None = None

    def select(self, rows: Tensor) -> EncodedLatent:
        """That of the samples rows [B'] int64."""
        keys_values = self.keys_values
        if keys_values is not None:
            keys_values = tuple(
                (key.index_select(0, rows), value.index_select(0, rows))
                for key, value in keys_values
            )
        tokens, pooled, side = (
            None if x is None else x.index_select(0, rows)
            for x in (self.tokens, self.pooled, self.side)
        )
        return EncodedLatent(tokens, pooled, keys_values, side)


class LatentTransformer(nn.Module):
    """Base of MultimodalMMDiT and PlainTransformer, which add `blocks` and the rest.

    Args:
        config: shape and vocabulary; latent_dim, vocab_size and the token ids must be set.

    Attributes:
        latent_mean, latent_std: buffers [D], the training latents' scaling. They are saved with
            the weights: without them samples cannot be unscaled.
        normalizes_latents: trained with latent_diffusion.scaling=l2_normalize.

    Raises:
        UserError: one of those is missing or out of range.
    """

    blocks: nn.ModuleList

    def __init__(self, config):
        super().__init__()
        check_config(config)
        self.config = config
        self._blocks_are_compiled = False
        self.normalizes_latents = False
        self.register_buffer("latent_mean", torch.zeros(config.latent_dim))
        self.register_buffer("latent_std", torch.ones(config.latent_dim))

    @property
    def num_ids(self) -> int | None:
        """Number of ids of which each latent is one; None: latents are vectors of values."""
        return None

    @torch.no_grad()
    def set_latent_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Store the training latents' scaling: model space = (raw - mean [D]) / std [D]."""
        self.latent_mean.copy_(torch.as_tensor(mean))
        self.latent_std.copy_(torch.as_tensor(std))

    def check_latent_statistics(self, source: str | Path) -> None:
        """Check the latents' scaling that was read with the weights.

        Args:
            source: where they were read.

        Raises:
            UserError: values that are not finite, or a deviation that is not above 0.
        """
        mean, std = self.latent_mean.float(), self.latent_std.float()
        is_wrong = ~torch.isfinite(mean) | ~torch.isfinite(std) | (std <= 0)
        if is_wrong.any():
            at = int(is_wrong.nonzero()[0])
            raise UserError(
                "the training latents' finite mean and deviation above 0 (latent_mean,"
                f" latent_std) in {source}",
                f"{float(mean[at])} and {float(std[at])} in dimension {at}",
                "copy the model again from its source, or convert the checkpoint again",
            )

    def scale_latents(self, raw: Tensor) -> Tensor:
        """Encoder's latents [..., D] -> model space, fp32."""
        if self.normalizes_latents:
            raw = nn.functional.normalize(raw.float(), dim=-1)
        return (raw.float() - self.latent_mean.float()) / self.latent_std.float()

    def unscale_latents(self, latents: Tensor) -> Tensor:
        """Model space [..., D] -> encoder's latents, fp32."""
        return latents.float() * self.latent_std.float() + self.latent_mean.float()

    def check_latents(self, points: Tensor) -> None:
        """Raise a ValueError for latents [B, N, D] whose shape does not fit the config."""
        config = self.config
        if points.shape[-1] != config.latent_dim or points.shape[1] > config.num_latents:
            raise ValueError(
                f"latents of shape {tuple(points.shape)}, but model.latent_dim is"
                f" {config.latent_dim} and model.num_latents {config.num_latents}"
            )

    def check_length(self, tokens: Tensor) -> None:
        """Raise a ValueError for texts [B, S] longer than model.max_seq_len."""
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"text of {tokens.shape[1]} tokens, but model.max_seq_len is"
                f" {self.config.max_seq_len}"
            )

    def dropout_rate(self, keys: Tensor | None) -> float:
        """model.dropout in training, 0 otherwise; a ValueError where it has no keys."""
        rate = self.config.dropout if self.training else 0.0
        if rate and keys is None:
            raise ValueError(
                f"model.dropout={rate} needs dropout_keys in training (or model.eval())"
            )
        return rate

    def compile_blocks(self) -> None:
        """torch.compile every block by itself: compiling the complete model takes many minutes and
        gains nothing.
        """
        self._blocks_are_compiled = True
        for block in self.blocks:
            block.compile(dynamic=True)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model.safetensors and config.json (Hugging Face layout) into folder."""
        pretrained_io.write(self, Path(folder))

    def config_dict(self) -> dict:
        """Contents of config.json: the model section plus the architecture's name."""
        return {"architecture": type(self).__name__, **self.config.model_dump()}


def check_config(config) -> None:
    """Raise a UserError for sizes or token ids that are unset or out of range."""
    keys = ("latent_dim", "vocab_size", "mask_token_id", "pad_token_id", "eos_token_id")
    missing = [key for key in keys if getattr(config, key) is None]
    if missing:
        raise UserError(
            "a complete model config",
            f"model.{', model.'.join(missing)} unset",
            "set them, or take them from a store",
        )
    for key in ("mask_token_id", "pad_token_id", "eos_token_id"):
        if not 0 <= getattr(config, key) < config.vocab_size:
            raise UserError(
                f"model.{key} below model.vocab_size={config.vocab_size}",
                f"model.{key}={getattr(config, key)}",
                "use the vocabulary size and ids of the tokenizer the data was prepared with",
            )


def rows_of_positions(positions: Tensor, packed: Tensor | None) -> Tensor:
    """[M] index among the computed text tokens of positions in B * S.

    Args:
        packed: ascending positions that are computed; None: all. [N]

    Raises:
        ValueError: (on a CPU) a position that is not computed.
    """
    if packed is None:
        return positions
    rows = torch.searchsorted(packed, positions.contiguous())
    if packed.device.type == "cpu" and not torch.equal(
        packed[rows.clamp_max(len(packed) - 1)], positions
    ):
        raise ValueError("text_positions names padding: only real tokens are computed")
    return rows
