"""What the two transformers over text and latents share: inputs and outputs of a forward pass, the
scaling of latents, compiled blocks, files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mmldlm.errors import UserError
from mmldlm.models.layers import Modulation, StreamLinear
from mmldlm.models.token_scores import TokenScores
from mmldlm.models.transformer_config import TransformerConfig
from mmldlm.utils.atomic_files import write_text
from mmldlm.utils.json_files import plain_value
from mmldlm.utils.validation import not_none


class TextInputs(NamedTuple):
    """Texts of a batch.

    Attributes:
        tokens: Token ids; S <= max_seq_len. [B, S] int64
        timesteps: In [0, 1], 0 clean, 1 fully masked; None: 0. [B]
        attention_mask: True for real tokens; None: all are. Tokens at a False position do not
            change results at a True one. [B, S] bool
        is_null: Samples whose text is replaced by the learned null; None: none. [B] bool
        token_positions: Ascending int64 indices into B * S of the text that may be attended to:
            the real tokens, of a null text its first position. Where a query names positions, only
            these are computed. None: found from the mask on a CPU; on a GPU, where that would make
            the host wait, padding is computed, too. [N]
    """

    tokens: Tensor
    timesteps: Tensor | None = None
    attention_mask: Tensor | None = None
    is_null: Tensor | None = None
    token_positions: Tensor | None = None


class LatentInputs(NamedTuple):
    """Latents of a batch.

    Attributes:
        values: In model space (`scale_latents`). [B, D] or [B, N, D]
        timesteps: In [0, 1], 0 clean, 1 pure noise; None: 0. [B]
        is_null: Samples whose latents are replaced by the learned null; None: none. [B] bool
    """

    values: Tensor
    timesteps: Tensor | None = None
    is_null: Tensor | None = None


class EncodedLatent(NamedTuple):
    """Latents as the blocks read them; they do not change while a text is sampled, so they are
    computed once.

    Attributes:
        tokens: Chunk tokens; None without them. [B, M, H]
        pooled: Pooled latent; None without one. [B, C]
        keys_values: Those of each block's cross-attention; None: not computed yet.
        side: What the text reads of a subclass's side inputs; None without them. [B, C]
        timesteps: Those of the latents. [B]
    """

    tokens: Tensor | None = None
    pooled: Tensor | None = None
    keys_values: tuple[tuple[Tensor, Tensor], ...] | None = None
    side: Tensor | None = None
    timesteps: Tensor | None = None

    def select(self, rows: Tensor) -> EncodedLatent:
        """Return the latents of the samples rows [B'] int64."""
        keys_values = self.keys_values
        if keys_values is not None:
            keys_values = tuple(
                (key.index_select(0, rows), value.index_select(0, rows))
                for key, value in keys_values
            )
        tokens, pooled, side, timesteps = (
            None if x is None else x.index_select(0, rows)
            for x in (self.tokens, self.pooled, self.side, self.timesteps)
        )
        return EncodedLatent(tokens, pooled, keys_values, side, timesteps)


class ModelOutput(NamedTuple):
    """Result of a forward pass. A NamedTuple, because the hooks of DeepSpeed's ZeRO-3 walk tuples,
    lists and dicts alone.

    Attributes:
        text: Scores of the tokens; None without a text.
        latent: What the latent head predicts: fp32 [B, P * D] or, as the latents, [B, N, P * D],
            with P predictions each; of a subclass what its `latent_outputs` returns. None for
            encoded latents, and of a model that predicts none.
        length_logits: Logits in fp32 of the lengths 1..max_seq_len (EOS counted), given the
            latents if they are clean, without them otherwise; None for encoded latents, and of a
            causal model. [B, max_seq_len]
    """

    text: TokenScores | None = None
    latent: Any = None
    length_logits: Tensor | None = None


class BaseTransformer(nn.Module):
    """Base of MultimodalMMDiT and PlainTransformer, which add `blocks` and the rest.

    Args:
        config: Shape and vocabulary, with all of `needed_keys` set.

    Class attributes:
        needed_keys: Keys that the data decides and a model cannot do without.

    Attributes:
        latent_mean, latent_std: Buffers with the scaling of the training latents. They are saved
            with the weights: without them samples cannot be unscaled. [D]
        normalizes_latents: Whether `scale_latents` divides latents by their norm before
            (`normalize_latents`).

    Raises:
        UserError: one of those is missing.
    """

    config_class: ClassVar[type[TransformerConfig]]
    needed_keys: ClassVar[tuple[str, ...]] = (
        "latent_dim",
        "vocab_size",
        "mask_token_id",
        "pad_token_id",
        "eos_token_id",
    )
    config: TransformerConfig
    blocks: Sequence[nn.Module]
    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: TransformerConfig):
        super().__init__()
        if missing := [key for key in self.needed_keys if getattr(config, key) is None]:
            raise UserError(
                "a complete model config",
                f"model.{', model.'.join(missing)} unset",
                "set them, or take them from a store",
            )
        self.config = config
        self._blocks_are_compiled = False
        self.normalizes_latents = False
        latent_dim = not_none(config.latent_dim)
        self.register_buffer("latent_mean", torch.zeros(latent_dim))
        self.register_buffer("latent_std", torch.ones(latent_dim))

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
        """Check the scaling of latents that was read with the weights.

        Args:
            source: Where it was read.

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

    def normalize_latents(self) -> None:
        """From now on divide latents by their norm before they are scaled, as training with
        latent_diffusion.l2_normalize does itself.
        """
        self.normalizes_latents = True

    def scale_latents(self, raw: Tensor) -> Tensor:
        """Encoder's latents [..., D] -> model space, fp32."""
        if self.normalizes_latents:
            raw = nn.functional.normalize(raw.float(), dim=-1)
        return (raw.float() - self.latent_mean.float()) / self.latent_std.float()

    def unscale_latents(self, latents: Tensor) -> Tensor:
        """Model space [..., D] -> encoder's latents, fp32."""
        return latents.float() * self.latent_std.float() + self.latent_mean.float()

    def latent_points(self, latents: LatentInputs | None, batch: int | None) -> LatentInputs:
        """Return latents with values [B, N, D]; None: those of `batch` samples without latents,
        which the learned null replaces.

        Raises:
            ValueError: a shape that does not fit the config.
        """
        config, device = self.config, self.latent_mean.device
        if latents is None:
            assert batch is not None, "batch is needed without latents"
            values = torch.zeros(
                batch, config.num_latents, not_none(config.latent_dim), device=device
            )
            return LatentInputs(values, is_null=torch.ones(batch, dtype=torch.bool, device=device))
        values = latents.values
        points = values[:, None] if values.dim() == 2 else values
        if points.shape[-1] != config.latent_dim or points.shape[1] > config.num_latents:
            raise ValueError(
                f"latents of shape {tuple(points.shape)}, but model.latent_dim is"
                f" {config.latent_dim} and model.num_latents {config.num_latents}"
            )
        return latents._replace(values=points)

    def initialize_layers(self) -> None:
        """Start from adaLN-Zero, where every block is the identity and every head reads the
        unmodulated norm, Xavier's bounds, and small embeddings.
        """
        for module in self.modules():
            if isinstance(module, (Modulation, StreamLinear)):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def check_text(self, text: TextInputs) -> None:
        """Raise a TypeError for what is no TextInputs, and a ValueError for texts longer than
        model.max_seq_len.
        """
        if not isinstance(text, TextInputs):
            raise TypeError(
                f"forward takes mmldlm.models.TextInputs(tokens, ...), not {type(text).__name__}"
            )
        if text.tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"text of {text.tokens.shape[1]} tokens, but model.max_seq_len is"
                f" {self.config.max_seq_len}"
            )

    def compile_blocks(self) -> None:
        """torch.compile every block by itself: compiling the complete model takes many minutes and
        gains nothing.
        """
        self._blocks_are_compiled = True
        for block in self.blocks:
            block.compile(dynamic=True)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model.safetensors and config.json (Hugging Face layout); a tied head is stored
        once.
        """
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        if self.config.tie_embeddings:
            del tensors["text_head.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        values = {"architecture": type(self).__name__, **self.config.model_dump()}
        text = json.dumps(values, indent=2, default=plain_value)
        write_text(folder / "config.json", text + "\n")
