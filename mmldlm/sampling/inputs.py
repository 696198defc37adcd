"""Inputs of sampling: texts, their token ids, and their embeddings from a file or from the encoder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.images.codebook import check_ids
from mmldlm.data.store.arrays import read_array
from mmldlm.errors import UserError
from mmldlm.sampling.latent_sampler import latent_shape
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.utils.formatting import describe_os_error, is_utf8, join_some, printable
from mmldlm.utils.input_files import read_text
from mmldlm.utils.progress import ProgressCallback

# Tolerance of the norm of vectors from a normalizing encoder.
_NORM_TOLERANCE = 0.05


def read_latents(path: str, pretrained: Pretrained) -> np.ndarray:
    """Read embeddings from a .npy file of [D] or [N, D]; of [M, D] or [N, M, D] for a model of M latents per text.

    Returns:
        [N, D] or [N, M, D] fp32; of a model of codes their ids, int64.

    Raises:
        UserError: a missing file, not an array, an empty one, another dimension, NaN, infinite or zero vectors.
    """
    shape = latent_shape(pretrained.model.config)
    dims = ", ".join(map(str, shape))
    expected = f"a .npy file of numbers [{dims}] or [N, {dims}] (the model's latents of one text) at {path}"
    fix = "save the encoder's vectors with numpy.save"
    try:
        values = read_array(Path(path))
    except FileNotFoundError:
        raise UserError(expected, "no such file", "check the path") from None
    except (OSError, ValueError) as error:
        raise UserError(expected, f"not a .npy file: {error}", fix) from error
    is_codes = pretrained.num_codes is not None
    kind = np.integer if is_codes else np.floating
    if not isinstance(values, np.ndarray) or not np.issubdtype(values.dtype, kind):
        raise UserError(expected, f"{getattr(values, 'dtype', type(values).__name__)}", fix)
    rows = values[None] if values.ndim == len(shape) else values
    if rows.shape[1:] != shape or rows.size == 0:
        raise UserError(expected, f"shape {list(values.shape)}", fix)
    if is_codes:
        rows = rows.astype(np.int64)
        check_ids(rows, pretrained.num_codes, path)
        return rows
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    is_zero = ~rows.any(-1) & (pretrained.image is None)  # a patch of an image may be zero
    bad = np.unique(np.nonzero(~np.isfinite(rows).all(-1) | is_zero)[0])
    if len(bad):
        rows_found = f"NaN, infinite or zero vectors in rows {join_some(bad, 10)}"
        raise UserError(f"finite, non-zero vectors in {path}", rows_found, fix)
    norm = float(np.median(np.linalg.norm(rows, axis=-1)))
    if pretrained.unit_norm and abs(norm - 1) > _NORM_TOLERANCE:
        print(
            f"warning: the vectors in {path} have norm {norm:.3g}, the training latents have norm 1; "
            "check that they are unscaled outputs of the same encoder",
            file=sys.stderr,
        )
    return rows


def encoder_identity(pretrained: Pretrained) -> dict[str, Any]:
    """Return the description of the encoder of the model's training latents.

    Raises:
        UserError: it is not known, or the model is one of images.
    """
    if pretrained.image is not None:
        raise UserError(
            "a model of texts and embeddings", f"a model of images ({pretrained.folder}), without an encoder of texts",
            "use a checkpoint of task=translation",
        )  # fmt: skip
    if pretrained.encoder is None:
        raise UserError(
            f'"encoder" in the model\'s config in {pretrained.folder}, the encoder of its latents',
            "no such key",
            "embed the texts yourself and pass --latent-file",
        )
    if not pretrained.has_encoder:
        raise UserError(
            "a model with a known encoder of its latents",
            "its store was packed without --encoder",
            "embed the texts yourself with that encoder and pass --latent-file",
        )
    return pretrained.encoder


def encode_texts(texts: Sequence[str], pretrained: Pretrained, progress: ProgressCallback | None = None) -> np.ndarray:
    """Embed texts with the encoder that produced the model's training latents.

    Args:
        progress: called after every batch with the number of texts (or parts of texts) done and in total.

    Returns:
        [N, D], or [N, M, D] for a model of M latents per text.

    Raises:
        UserError: an unknown encoder, an encoder with other weights, or a text too short for M parts.
    """
    from mmldlm.data.encoders.encoder import Encoder
    from mmldlm.data.sentences import split_into_parts

    identity = encoder_identity(pretrained)
    count, all_parts = pretrained.model.config.num_latents, []
    for text in texts:  # split as in `mmldlm prepare`
        parts = split_into_parts(text, count)
        if parts is None:
            raise UserError(
                f"texts of at least {count} characters, for the model's {count} latents per text",
                repr(text),
                "omit it",
            )
        all_parts += parts
    done = 0

    def advance(num_new: int) -> None:
        nonlocal done
        done += num_new
        if progress is not None:
            progress(done, len(all_parts))

    latents = Encoder.from_identity(identity).encode(all_parts, advance)
    return latents.reshape(len(texts), *latent_shape(pretrained.model.config))


def reason_without_encoder(error: Exception) -> str:
    """Say why `encode_texts` failed, for results that are valid without it."""
    return f"{error.found} (expected {error.expected})" if isinstance(error, UserError) else str(error)


def given_texts(texts: list[str] | None, text_file: str | None) -> list[str]:
    """Return the texts of --text or --text-file (one per line, blank lines ignored).

    Raises:
        UserError: a missing file, not UTF-8, no text, or a blank one.
    """
    if text_file:
        try:
            texts = read_text(text_file).splitlines()
        except OSError as error:
            found = f"{text_file}: {describe_os_error(error)}"
            raise UserError("a text file with one text per line", found, "check the path") from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"UTF-8 text in {text_file}",
                f"byte 0x{error.object[error.start]:02x} at offset {error.start}",
                "save it as UTF-8 (for instance with iconv)",
            ) from None
        texts = [text for text in texts if text.strip()]
    if not texts or any(not text.strip() for text in texts):
        raise UserError("texts that are not empty", f"{texts!r}", "name at least one text, none of them blank")
    if wrong := [text for text in texts if not is_utf8(text)]:
        raise UserError("--text in UTF-8", printable(wrong[0])[:200], "convert it, or give it in a --text-file")
    return [text.strip() for text in texts]


def tokenize_texts(texts: Sequence[str], pretrained: Pretrained) -> list[list[int]]:
    """Tokenize texts without special tokens.

    Raises:
        UserError: a text too long for the model, or without tokens.
    """
    ids = pretrained.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    limit = pretrained.model.config.max_seq_len - 1
    for text, row in zip(texts, ids):
        if not 1 <= len(row) <= limit:
            raise UserError(
                f"texts of 1 to {limit} tokens (model.max_seq_len minus one for EOS)",
                f"{len(row)} tokens in {text[:60]!r}",
                "shorten it, or split it into sentences",
            )
    return ids
