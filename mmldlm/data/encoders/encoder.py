"""Sentence encoders: text -> latent.

One class for all encoders in specs.py, and for others by name. Below it, the poolings and dense
layers of sentence-transformers, from the last states of a transformer to one vector per text.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import normalizers

from mmldlm.data.encoders.model_files import (
    find_model_folder,
    name_to_load,
    read_tokenizer,
    weights_files,
)
from mmldlm.data.encoders.sentence_transformer import (
    MODULES,
    bare_transformer,
    positions,
    read_sentence_transformer,
)
from mmldlm.data.encoders.specs import ENCODERS, EncoderSpec, Step, with_options
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import sha256_of
from mmldlm.utils.formatting import first_line, join_some
from mmldlm.utils.paths import without_folders
from mmldlm.utils.validation import not_none

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_IDENTITY_OPTIONS = ("pooling", "normalize", "max_length")
# Options that identities omit at these values.
_OMITTED_OPTIONS = {"prefix": "", "lower_case": False, "include_prompt": True}
# Number of tokens that are read of a text by a model without a limit of its own.
_UNLIMITED = 8192


def usable_dtype(dtype: str | None, device: str) -> str:
    """Return the requested precision of the forward pass, else fp32 on the CPU and bf16 on a
    GPU.
    """
    return dtype or ("fp32" if device == "cpu" else "bf16")


def require_docstrings() -> None:
    """Check that Python keeps docstrings, of which transformers makes the classes of its models.

    Raises:
        UserError: it was started with PYTHONOPTIMIZE=2 or -OO.
    """
    if sys.flags.optimize >= 2:
        raise UserError(
            "Python with docstrings, of which transformers makes its models",
            "PYTHONOPTIMIZE=2 (or python -OO), which drops them",
            "unset PYTHONOPTIMIZE, or set it to 1",
        )


@contextlib.contextmanager
def no_loading_bar():
    """Hide the progress bar of loading, which takes under a second and would break the lines of a
    log.
    """
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
        name: Key of `ENCODERS`, a folder, or a Hugging Face repository.
        batch_tokens: Padded tokens per forward pass, a bound of memory (default: 1,024 on the CPU,
            whose caches hold no more, and 65,536 on a GPU).
        device: Torch device (default: a GPU if available).
        latent_dim: Number of components to which latents are cut and normalized again
            (Matryoshka).
        dtype: `fp32`, `bf16` or `fp16` (default: fp32 on the CPU, bf16 on a GPU).
        batch_size: Maximum texts per forward pass.
        compile: Whether to torch.compile the model (faster on a GPU after a few thousand texts).
        cache_dir: Folder for hub files.
        options: Fields of EncoderSpec to override (pooling, normalize, prefix, max_length). With a
            pooling, the bare transformer of a sentence-transformers model is used, unless is_bare
            is False.

    Raises:
        UserError: an unknown name, missing weights, weights of another width than registered, or a
            model that does not declare its pooling.
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
        self.folder, self.source = find_model_folder(name, cache_dir)
        self.name, spec = name, _find_spec(name, self.folder, options)
        self.transformer_folder = self.folder / spec.subfolder
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.batch_tokens = batch_tokens or (1024 if self.device == "cpu" else 65536)
        self.batch_size = batch_size
        self.dtype = usable_dtype(dtype, self.device)
        language = {"src_lang": spec.source_language} if spec.source_language else {}
        subject = f"encoder '{name}' in {self.transformer_folder}"
        fix = "copy or install these files again"
        self._tokenizer = read_tokenizer(
            self.transformer_folder, f"the tokenizer of {subject}", fix, **language
        )
        if spec.lower_case:
            lower_case_first(self._tokenizer, subject)
        self.spec = replace(
            spec, max_length=_max_length(spec, self.transformer_folder, self._tokenizer, options)
        )
        try:
            with no_loading_bar():
                self._model = _load(self.transformer_folder, spec.architecture, DTYPES[self.dtype])
            self._steps = [
                (step, Dense(self.folder / step.folder, step, self.device))
                if step.kind == "dense"
                else (step, None)
                for step in spec.steps
            ]
        except (MemoryError, UserError):
            raise
        except Exception as error:
            # safetensors, torch and transformers raise their own types.
            raise UserError(f"the weights of {subject}", first_line(error), fix) from error
        self._model.eval().requires_grad_(False).to(self.device)
        if compile:
            self._model = torch.compile(self._model, dynamic=True)
        config = self._model.config
        width = getattr(config, "hidden_size", None) or config.d_model
        width *= len(spec.pooling.split("+"))
        for step, dense in self._steps:
            if dense is not None and dense.in_width != width:
                raise UserError(
                    f"a dense layer of {width} inputs in {self.folder / step.folder}",
                    f"{dense.in_width}",
                    fix,
                )
            width = dense.width if dense is not None else min(step.dim or width, width)
        if spec.latent_dim not in (None, width):
            raise UserError(
                f"weights of encoder '{name}' with {spec.latent_dim} dimensions",
                f"{width} dimensions in {self.folder}",
                "reinstall the package or clear the hub cache: these are the weights of another"
                " model",
            )
        self.latent_dim = width if latent_dim is None else self._check_cut(latent_dim, width)
        self._weights_sha256: str | None = None
        # Tokens of the prompt that the pooling leaves out, counted as sentence-transformers does.
        self._num_prompt_tokens = 0
        if not spec.include_prompt and spec.prefix and (prompt := self._tokenize([""])[0][0]):
            self._num_prompt_tokens = len(prompt) - (prompt[-1] in self._tokenizer.all_special_ids)

    @classmethod
    def from_identity(cls, identity: dict[str, Any], **kwargs: Any) -> Encoder:
        """Load the encoder of a store's or a checkpoint's latents.

        Raises:
            UserError: it is not available, or its weights or modules differ.
        """
        options = {key: identity[key] for key in _IDENTITY_OPTIONS if key in identity}
        options |= {key: identity.get(key, default) for key, default in _OMITTED_OPTIONS.items()}
        is_bare = identity.get("is_bare", False)
        name = name_to_load(identity)
        encoder = cls(
            name, latent_dim=identity.get("cut_to"), is_bare=is_bare, **options, **kwargs
        )
        expected, actual = identity.get("weights_sha256"), encoder.weights_sha256()
        if expected is not None and actual != expected:
            raise UserError(
                f"encoder {identity['name']} with the weights of the data (sha256"
                f" {expected[:12]})",
                f"weights of sha256 {actual[:12]} from {encoder.source}",
                "install the encoder that prepared the data",
            )
        # Identities of earlier versions have no modules: these knew dense layers alone.
        before, now = identity.get("modules"), encoder.identity().get("modules")
        if before != now and (
            before is not None or any(step.kind != "dense" for step in encoder.spec.steps)
        ):
            raise UserError(
                f"encoder {identity['name']} with the modules of the data"
                f" ({', '.join(before or ['none'])})",
                f"{', '.join(now or ['none'])} in {encoder.folder}",
                "install the encoder that prepared the data, or prepare the data again",
            )
        return encoder

    def _check_cut(self, latent_dim: int, width: int) -> int:
        low, high = self.spec.matryoshka or (1, width)
        if self.spec.matryoshka is None and self.name in ENCODERS:
            raise UserError(
                f"no --latent-dim for encoder '{self.name}', which was not trained with"
                " Matryoshka",
                f"--latent-dim {latent_dim}",
                f"leave it out ({width} dimensions), or use --encoder qwen",
            )
        if not low <= latent_dim <= min(high, width):
            raise UserError(
                f"--latent-dim from {low} to {min(high, width)}",
                str(latent_dim),
                "choose one in that range",
            )
        return latent_dim

    def weights_sha256(self) -> str:
        """Return the SHA-256 of the weights, or that of the joined digests of several files.

        It is computed once: the files may be replaced while the encoder is in use.
        """
        if self._weights_sha256 is None:
            self._weights_sha256 = _joined_sha256(
                weights_files(self.transformer_folder, self.name)
            )
        return self._weights_sha256

    def identity(self) -> dict[str, Any]:
        """Return the JSON-ready description of the encoder; equal ones give comparable latents."""
        spec = self.spec
        identity = {
            "name": self.name if self.name in ENCODERS else without_folders(self.name),
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
            "lower_case": spec.lower_case or None,
            "include_prompt": None if spec.include_prompt else False,
            "is_bare": spec.is_bare or None,
            "modules": [self._describe(step) for step in spec.steps] or None,
        }
        return {**identity, **{key: value for key, value in optional.items() if value is not None}}

    def _describe(self, step: Step) -> str:
        """Return the words of an identity for a step after the pooling; of a dense layer with its
        weights.
        """
        if step.kind != "dense":
            return f"cut to {step.dim}" if step.kind == "cut" else step.kind
        digest = _joined_sha256(weights_files(self.folder / step.folder, self.name))
        return (
            f"dense {step.activation}{' with residual' if step.has_residual else ''} {digest[:12]}"
        )

    def encode(
        self,
        texts: Sequence[str],
        progress: Callable[[int], None] | None = None,
        is_cut: np.ndarray | None = None,
    ) -> np.ndarray:
        """Encode texts; up to rounding the result does not depend on their order.

        Args:
            texts: N texts.
            progress: Function that is called after each forward pass with its number of texts.
            is_cut: [N] bools that become True for texts longer than the encoder reads.

        Returns:
            float32 [N, D] in the order of `texts`. A text on which the model fails has NaN in its
            row.
        """
        latents = np.empty((len(texts), self.latent_dim), dtype=np.float32)
        if not len(texts):
            return latents
        encoded, cut = self._tokenize(texts)
        if is_cut is not None:
            is_cut[:] = cut
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
        return [len(ids) for ids in self._tokenize(texts)[0]]

    @property
    def max_length(self) -> int:
        """Tokens of a text that the encoder reads, special tokens and the prefix included."""
        return not_none(self.spec.max_length)

    @property
    def max_text_tokens(self) -> int:
        """Tokens of a text that the encoder reads, without special tokens and the prefix."""
        return self.max_length - len(self._tokenize([""])[0][0])

    def num_unknown(self, texts: Sequence[str]) -> list[tuple[int, int]]:
        """Return the unknown ([UNK]) tokens and all tokens of each text, without special tokens
        and prefix.
        """
        unknown = self._tokenizer.unk_token_id
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return [(0 if unknown is None else ids.count(unknown), len(ids)) for ids in encoded]

    def forward_flops(self, lengths: Sequence[int]) -> float:
        """Return the forward FLOPs of texts of these lengths: 2 per parameter (embeddings do not
        count) and token, and those of attention (arXiv 2001.08361)."""
        # Embeddings are looked up, and the pooler is not needed for the last states.
        unread = ("embed", "pooler")
        weights = sum(
            p.numel()
            for name, p in self._model.named_parameters()
            if not any(u in name for u in unread)
        )
        config = self._model.config
        layers = getattr(config, "num_hidden_layers", None) or config.num_layers
        width = getattr(config, "hidden_size", None) or config.d_model
        return sum(2.0 * weights * length + 4.0 * layers * width * length**2 for length in lengths)

    def _tokenize(self, texts: Sequence[str]) -> tuple[list[list[int]], np.ndarray]:
        """Return the ids that the encoder reads of each text, and [N] whether the text goes on
        behind them.
        """
        closing = self.spec.closing_token
        room = self.max_length
        full = [self.spec.prefix + text for text in texts]
        encoded = self._tokenizer(full, truncation=True, max_length=room, padding=False)[
            "input_ids"
        ]
        is_cut = np.zeros(len(texts), bool)
        filled = [
            row for row, ids in enumerate(encoded) if len(ids) >= room - (closing is not None)
        ]
        if filled:
            complete = self._tokenizer(
                [full[row] for row in filled], truncation=False, verbose=False
            )["input_ids"]
            last = None if closing is None else self._tokenizer.convert_tokens_to_ids(closing)
            is_cut[filled] = [
                len(ids) + (last is not None and ids[-1:] != [last]) > room for ids in complete
            ]
        if closing is None:
            return encoded, is_cut
        last = self._tokenizer.convert_tokens_to_ids(closing)
        return [ids if ids[-1:] == [last] else [*ids[: room - 1], last] for ids in encoded], is_cut

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        ids, mask = ids.to(self.device), mask.to(self.device)
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        pooled = pool(hidden, mask, self.spec.pooling, self._num_prompt_tokens)
        for step, dense in self._steps:
            if dense is not None:
                pooled = dense(pooled)
            else:
                pooled = pooled[:, : step.dim] if step.kind == "cut" else _unit(pooled)
        is_cut = self.latent_dim < pooled.shape[1]
        pooled = pooled[:, : self.latent_dim]
        if self.spec.normalize or is_cut and self.spec.matryoshka:
            pooled = _unit(pooled)
        return pooled.cpu().numpy()


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    # No epsilon: a zero vector must become NaN and be rejected, not stored as data.
    return vectors / vectors.norm(dim=-1, keepdim=True)


def _joined_sha256(paths: Sequence[Path]) -> str:
    digests = [sha256_of(path) for path in paths]
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def _find_spec(name: str, folder: Path, options: dict[str, Any]) -> EncoderSpec:
    is_bare = options.pop("is_bare", options.get("pooling") is not None)
    if name in ENCODERS:
        return with_options(ENCODERS[name], **options)
    spec = None if is_bare else read_sentence_transformer(folder, name)
    if spec is None:
        if options.get("pooling") is None:
            raise UserError(
                f"the pooling of encoder '{name}' ({MODULES} of sentence-transformers)",
                f"no such file in {folder}",
                "give --pooling mean, cls or last, and --prefix, --no-normalize, --max-length if"
                " its card says so",
            )
        spec = bare_transformer(folder, name)
    return with_options(spec, **options)


def _max_length(spec: EncoderSpec, folder: Path, tokenizer: Any, options: dict[str, Any]) -> int:
    """Return the tokens that are read of a text.

    Raises:
        UserError: --max-length above the positions of the model, which would fail on long texts
            alone.
    """
    limit = positions(folder)
    if spec.max_length is None:
        return min(tokenizer.model_max_length, limit or _UNLIMITED, _UNLIMITED)
    if options.get("max_length") is not None and limit is not None and spec.max_length > limit:
        raise UserError(
            f"--max-length of at most {limit}, the positions of {folder}",
            str(spec.max_length),
            "give a smaller one",
        )
    return spec.max_length


def lower_case_first(tokenizer: Any, subject: str) -> None:
    """Lower-case texts before the other rules of a tokenizer, as sentence-transformers does for
    do_lower_case.

    Raises:
        UserError: a tokenizer without such rules.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"a fast tokenizer for do_lower_case of {subject}",
            type(tokenizer).__name__,
            "save it with its fast class (a tokenizer.json)",
        )
    core = tokenizer.backend_tokenizer
    rules = [] if core.normalizer is None else [core.normalizer]
    if isinstance(core.normalizer, normalizers.Sequence):
        rules = list(core.normalizer)  # type: ignore[call-overload]
    if not any(isinstance(rule, normalizers.Lowercase) for rule in rules):
        core.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rules])


def _load(folder: Path, architecture: str, dtype: torch.dtype) -> Any:
    """Load a transformer.

    Raises:
        UserError: the files lack weights, which transformers would fill with random numbers.
    """
    require_docstrings()
    from transformers import AutoModel, MT5EncoderModel, T5EncoderModel, UMT5EncoderModel

    kinds = {"t5": T5EncoderModel, "mt5": MT5EncoderModel, "umt5": UMT5EncoderModel}
    kind: Any = kinds.get(architecture, AutoModel)
    if architecture == "m2m":
        from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder

        kind = M2M100Encoder
    model, report = kind.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        dtype=dtype,
        output_loading_info=True,
    )
    # The pooler is not used: pooling takes the last states.
    missing = [name for name in report["missing_keys"] if "pooler" not in name]
    missing += [str(name) for name in report["mismatched_keys"]]
    if missing:
        raise UserError(
            f"all weights of the model that config.json describes in {folder}",
            f"none that fit for {join_some(sorted(missing), 3)}",
            "copy the model again, or choose another encoder",
        )
    return model


def token_budget_batches(
    lengths: Sequence[int] | np.ndarray, batch_tokens: int, batch_size: int | None = None
) -> list[np.ndarray]:
    """Group rows by length, each group padded to at most `batch_tokens` tokens and with at most
    `batch_size` rows.

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


def pool(
    hidden: torch.Tensor, mask: torch.Tensor, pooling: str, num_prompt_tokens: int = 0
) -> torch.Tensor:
    """Pool the last states of each text to one vector.

    Args:
        hidden: [B, S, H] float32.
        mask: [B, S], 1 at real positions, with padding on the right.
        pooling: Pooling as in EncoderSpec; several joined with + are concatenated.
        num_prompt_tokens: Number of first positions that are left out.

    Returns:
        [B, H], or [B, H * number of poolings]. A text of prompt tokens alone gives no finite,
        non-zero vector.
    """
    if num_prompt_tokens:
        mask = mask.clone()
        mask[:, :num_prompt_tokens] = 0
    return torch.cat([_pool(hidden, mask, kind) for kind in pooling.split("+")], dim=-1)


def _pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    rows = torch.arange(len(hidden), device=hidden.device)
    if pooling == "cls":
        return hidden[rows, mask.argmax(1)]
    if pooling == "last":
        positions = torch.arange(mask.shape[1], device=mask.device)
        last = (mask * positions).argmax(1)
        return hidden[rows, last] * mask[rows, last].unsqueeze(-1)
    if pooling == "max":
        return hidden.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(1)
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    if pooling == "weightedmean":
        # Weights are positions in the text, the prompt included.
        weight = weight * torch.arange(
            1, mask.shape[1] + 1, device=hidden.device, dtype=hidden.dtype
        ).view(1, -1, 1)
    total = (hidden * weight).sum(1)
    total_weight = weight.sum(1).clamp(min=1e-9)
    return total / (total_weight.sqrt() if pooling == "mean_sqrt_len" else total_weight)


class Dense:
    """A dense layer of sentence-transformers, in float32.

    Attributes:
        in_width, width: Components before and after.
    """

    def __init__(self, folder: Path, step: Step, device: str):
        if (folder / "model.safetensors").is_file():
            from safetensors.torch import load_file

            weights = load_file(folder / "model.safetensors")
        else:
            weights = torch.load(
                folder / "pytorch_model.bin", map_location="cpu", weights_only=True
            )
        weights = {name: tensor.to(device, torch.float32) for name, tensor in weights.items()}
        self.weight, self.bias = weights["linear.weight"], weights.get("linear.bias")
        self.width, self.in_width = self.weight.shape
        self._has_residual = step.has_residual
        # A residual of another width has its own projection.
        self._residual = (
            weights["residual.weight"]
            if step.has_residual and self.width != self.in_width
            else None
        )
        self._activation = getattr(torch.nn, step.activation)()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._activation(torch.nn.functional.linear(x, self.weight, self.bias))
        if self._has_residual:
            out = out + (
                x if self._residual is None else torch.nn.functional.linear(x, self._residual)
            )
        return out
