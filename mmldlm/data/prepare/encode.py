"""The encoding stage: turn samples into latents, shard by shard, and set aside texts on which the
encoder fails.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mmldlm.data.arrays import read_npz, write_npz
from mmldlm.data.encoders.encoder import Encoder
from mmldlm.data.sentences import split_into_parts
from mmldlm.errors import MmldlmError
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.formatting import first_line
from mmldlm.utils.resources import threads_per_rank
from mmldlm.utils.validation import not_none

SAMPLES_PER_SHARD = 4096
# When this many texts fail one by one and none succeeds, the encoder or the GPU is broken, not the
# texts.
FATAL_ERRORS = 16
# In tokens.
_SMALLEST_BUDGET = 1024


@dataclass
class EncodeResult:
    """A shard of latents.

    Attributes:
        is_ok: [N] whether each text has a latent.
        latents: [M, D] float32 of the M texts that have one, or [M, K, D] with K latents per text.
        reasons: Position in the shard -> reason of a missing latent.
        is_cut: [N] whether each text is longer than the encoder reads.
    """

    is_ok: np.ndarray
    latents: np.ndarray
    reasons: dict[int, str]
    is_cut: np.ndarray


def encode(
    encoder: Encoder,
    texts: Sequence[str],
    retries: int,
    progress: Callable[[int], None] | None = None,
    latents_per_text: int = 1,
) -> EncodeResult:
    """Encode texts; retry those on which the encoder fails one by one.

    Args:
        encoder: Sentence encoder.
        texts: Texts of one shard.
        retries: Attempts per text after the failure of its batch.
        progress: Function that is called with the number of pieces done since the last call.
        latents_per_text: Number of pieces per text (`split_into_parts`); a text is valid if all
            its pieces are.

    Raises:
        MmldlmError: the encoder fails on everything.
    """
    if latents_per_text == 1:
        return _encode(encoder, texts, retries, progress)
    pieces = [
        piece for text in texts for piece in not_none(split_into_parts(text, latents_per_text))
    ]
    vectors = _encode(encoder, pieces, retries, progress)
    latents = np.zeros((len(pieces), encoder.latent_dim), np.float32)
    latents[vectors.is_ok] = vectors.latents
    is_ok = np.all(vectors.is_ok.reshape(-1, latents_per_text), axis=1)
    reasons: dict[int, str] = {}
    for position, reason in vectors.reasons.items():
        text, piece = divmod(position, latents_per_text)
        reasons.setdefault(text, f"piece {piece + 1} of {latents_per_text}: {reason}")
    is_cut = np.any(vectors.is_cut.reshape(-1, latents_per_text), axis=1)
    return EncodeResult(
        is_ok, latents.reshape(len(texts), latents_per_text, -1)[is_ok], reasons, is_cut
    )


def _encode(
    encoder: Encoder, texts: Sequence[str], retries: int, progress: Callable[[int], None] | None
) -> EncodeResult:
    reasons: dict[int, str] = {}
    is_cut = np.zeros(len(texts), bool)
    try:
        latents = _encode_all(encoder, texts, progress, is_cut)
        failed = np.flatnonzero(invalid_rows(latents)).tolist()
    except MmldlmError:
        # A user error, or the failure of another rank.
        raise
    except Exception as error:
        # Any failure counts: out of memory, a kernel, a panic of the tokenizer.
        _release_memory(error)
        latents = np.full((len(texts), encoder.latent_dim), np.nan, np.float32)
        failed = list(range(len(texts)))
    num_good = len(texts) - len(failed)
    for position in failed:
        latent, reason = _encode_one(encoder, texts[position], retries)
        if latent is None:
            reasons[position] = reason
        else:
            latents[position] = latent
            num_good += 1
        if num_good == 0 and len(reasons) >= FATAL_ERRORS:
            raise MmldlmError(
                f"encoder {encoder.name} fails on every text: {reason}\n"
                "  the work so far is kept; rerun the same command to resume"
            )
    is_ok = np.ones(len(texts), dtype=bool)
    is_ok[list(reasons)] = False
    return EncodeResult(is_ok, latents[is_ok], reasons, is_cut)


def _encode_all(
    encoder: Encoder,
    texts: Sequence[str],
    progress: Callable[[int], None] | None,
    is_cut: np.ndarray,
) -> np.ndarray:
    """Encode all texts, in smaller batches where the device runs out of memory."""
    budget = encoder.batch_tokens
    try:
        while True:
            try:
                return encoder.encode(texts, progress, is_cut)
            except torch.cuda.OutOfMemoryError as error:
                if encoder.batch_tokens <= _SMALLEST_BUDGET:
                    raise
                _release_memory(error)
                encoder.batch_tokens //= 2
                # Some of these texts have been counted already.
                progress = None
    finally:
        encoder.batch_tokens = budget


def invalid_rows(latents: np.ndarray) -> np.ndarray:
    """Return [N] bools: latents with NaN or infinite values, and zero vectors."""
    return ~np.isfinite(latents).all(axis=1) | ~latents.any(axis=1)


def _encode_one(encoder: Encoder, text: str, retries: int) -> tuple[np.ndarray | None, str]:
    reason = ""
    for _ in range(max(retries, 1)):
        try:
            latent = encoder.encode([text])
        except MmldlmError:
            raise
        except Exception as error:
            _release_memory(error)
            reason = first_line(error)
            continue
        if not invalid_rows(latent)[0]:
            return latent[0], ""
        reason = "a zero vector" if np.isfinite(latent).all() else "NaN or infinite values"
    return None, reason


def _release_memory(error: Exception) -> None:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        torch.cuda.empty_cache()


def write_encoded(path: Path, encoded: EncodeResult) -> None:
    """Write a shard of latents atomically."""
    reasons = np.frombuffer(json.dumps(encoded.reasons).encode(), np.uint8)
    write_npz(
        path, is_ok=encoded.is_ok, latents=encoded.latents, reasons=reasons, is_cut=encoded.is_cut
    )


def read_encoded(path: Path) -> EncodeResult:
    """Read a shard of latents, with its CRCs checked."""
    file = read_npz(path)
    # Results of earlier versions do not have it.
    is_cut = file.get("is_cut", np.zeros(len(file["is_ok"]), bool))
    return EncodeResult(file["is_ok"], file["latents"], _reasons(file), is_cut)


def read_reasons(path: Path) -> dict[int, str]:
    """Read the positions of the texts of a shard without a latent, and the reasons, but not the
    latents.
    """
    return _reasons(read_npz(path, "reasons"))


def _reasons(file: dict[str, np.ndarray]) -> dict[int, str]:
    return {
        int(position): reason for position, reason in json.loads(file["reasons"].tobytes()).items()
    }


def device_of_rank(local_rank: int) -> str:
    """Return the GPU of a rank of this machine; without GPUs the CPU, whose cores the ranks
    share.
    """
    if torch.cuda.is_available():
        return f"cuda:{local_rank % torch.cuda.device_count()}"
    if "OMP_NUM_THREADS" not in os.environ:
        local_world_size = int_from_env("LOCAL_WORLD_SIZE", 1)
        torch.set_num_threads(threads_per_rank(local_world_size))
    return "cpu"
