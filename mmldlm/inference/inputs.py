"""Inputs of sampling: texts, their token ids, and their embeddings from a file or from the
encoder.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.arrays import read_array
from mmldlm.data.codebook import check_ids
from mmldlm.data.corpora.text_files import FileUnit
from mmldlm.data.sentences import MAX_TEXT_BYTES, TOO_LARGE
from mmldlm.data.store import Store
from mmldlm.errors import UserError
from mmldlm.sampling.latents import latent_shape
from mmldlm.sampling.model import device_of
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.formatting import count_noun, describe_os_error, is_utf8, join_some, printable
from mmldlm.utils.progress import ProgressCallback

# Tolerance of the norm of vectors from a normalizing encoder.
_NORM_TOLERANCE = 0.05


def read_latents(source: str | np.ndarray, pretrained: Pretrained) -> np.ndarray:
    """Read embeddings from a .npy file, or check an array of them: [D] or [N, D]; [M, D] or
    [N, M, D] for a model of M latents per text.

    Returns:
        [N, D] or [N, M, D] fp32; of a model of ids int64.

    Raises:
        UserError: a missing file, not an array, an empty one, another dimension, NaN, infinite or
            zero vectors.
    """
    shape = latent_shape(pretrained.model.config)
    dims = ", ".join(map(str, shape))
    numbers = f"numbers [{dims}] or [N, {dims}] (the model's latents of one text)"
    if isinstance(source, np.ndarray):
        path, expected = "the array of embeddings", f"an array of {numbers}"
        fix, values = "give the encoder's vectors", source
    else:
        path, expected = source, f"a .npy file of {numbers} at {source}"
        fix = "save the encoder's vectors with numpy.save"
        values = _read_npy(path, expected, fix)
    num_ids = pretrained.num_ids
    number_type = np.floating if num_ids is None else np.integer
    if not isinstance(values, np.ndarray) or not np.issubdtype(values.dtype, number_type):
        raise UserError(expected, f"{getattr(values, 'dtype', type(values).__name__)}", fix)
    rows = values[None] if values.ndim == len(shape) else values
    if rows.shape[1:] != shape or rows.size == 0:
        raise UserError(expected, f"shape {list(values.shape)}", fix)
    if num_ids is not None:
        rows = rows.astype(np.int64)
        check_ids(rows, num_ids, path)
        return rows
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    # A patch of an image may be zero.
    is_zero = ~rows.any(-1) & (pretrained.image is None)
    bad = np.unique(np.nonzero(~np.isfinite(rows).all(-1) | is_zero)[0])
    if len(bad):
        rows_found = f"NaN, infinite or zero vectors in rows {join_some(bad, 10)}"
        raise UserError(f"finite, non-zero vectors in {path}", rows_found, fix)
    if pretrained.unit_norm:
        _warn_of_norms(np.linalg.norm(rows, axis=-1).reshape(len(rows), -1), path)
    return rows


def _read_npy(path: str, expected: str, fix: str) -> np.ndarray:
    try:
        return read_array(Path(path))
    except FileNotFoundError:
        raise UserError(expected, "no such file", "check the path") from None
    except OSError as error:
        raise UserError(expected, describe_os_error(error), fix) from error
    except ValueError as error:
        raise UserError(expected, f"not a .npy file: {error}", fix) from error


def _warn_of_norms(norms: np.ndarray, path: str) -> None:
    """Warn of vectors that are not unit vectors, by their norms [N, M]."""
    others = np.flatnonzero((np.abs(norms - 1) > _NORM_TOLERANCE).any(axis=1))
    if len(others):
        farthest = max(norms[others].flatten(), key=lambda norm: abs(norm - 1))
        print(
            f"warning: {len(others)} of {len(norms)} vectors in {path} are not of norm 1, as the"
            f" training latents are: the farthest has norm {farthest:.3g} (rows"
            f" {join_some(others, 10)}); check that they are unscaled outputs of the same encoder",
            file=sys.stderr,
        )


def encoder_identity(pretrained: Pretrained) -> dict[str, Any]:
    """Return the description of the encoder of the model's training latents.

    Raises:
        UserError: it is not known, or the model is one of images.
    """
    if pretrained.image is not None:
        raise UserError(
            "a model of texts and embeddings",
            f"a model of images ({pretrained.folder}), without an encoder of texts",
            "use a checkpoint of task=translation",
        )
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


def encode_texts(
    texts: Sequence[str],
    pretrained: Pretrained,
    progress: ProgressCallback | None = None,
    num_unknown: list[int] | None = None,
) -> np.ndarray:
    """Embed texts with the encoder that produced the model's training latents.

    Args:
        progress: Callback after every batch, with the number of texts (or parts of texts) done and
            in total.
        num_unknown: List that receives the number of tokens of each text that the encoder's
            tokenizer does not know (`check_unknown`); None for texts that a model wrote, which are
            not checked.

    Returns:
        [N, D], or [N, M, D] for a model of M latents per text.

    Raises:
        UserError: an unknown encoder, an encoder with other weights, or a text too short for M
            parts.
    """
    from mmldlm.data.encoders.encoder import Encoder
    from mmldlm.data.sentences import split_into_parts

    identity = encoder_identity(pretrained)
    count, all_parts = pretrained.model.config.num_latents, []
    for text in texts:
        # Split as in `mmldlm prepare`.
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

    encoder = Encoder.from_identity(identity, device=str(device_of(pretrained.model)))
    if num_unknown is not None:
        num_unknown[:] = check_unknown(
            texts, encoder.num_unknown(texts), f"of encoder {encoder.name}"
        )
    latents = encoder.encode(all_parts, advance)
    return latents.reshape(len(texts), *latent_shape(pretrained.model.config))


def check_latent_shape(store: Store, config: Any) -> None:
    """Check that a store has latents as the model reads them.

    Raises:
        UserError: they are of another dimension, or another number of each text.
    """
    models = (config.num_latents, config.latent_dim)
    stores = (store.latents_per_text, store.latent_dim)
    if models != stores:
        raise UserError(
            f"a store with {_describe_shape(*models)}, as the model was trained on",
            f"{_describe_shape(*stores)} in {store.root}",
            "name the store that the model was trained on, or one prepared with the same encoder"
            " and --latents-per-text",
        )


def _describe_shape(count: int, dim: int) -> str:
    return f"{count_noun(count, 'latent')} of {dim} dimensions per text"


def reason_without_encoder(error: Exception) -> str:
    """Say why `encode_texts` failed, for results that are valid without it."""
    return (
        f"{error.found} (expected {error.expected})"
        if isinstance(error, UserError)
        else str(error)
    )


def given_texts(texts: list[str] | None, text_file: str | None) -> list[str]:
    """Return the texts of --text or --text-file (one per line as `mmldlm prepare` reads them,
    blank lines ignored).

    Raises:
        UserError: a missing file, not UTF-8, no text, no string, a blank or a too long one.
    """
    if text_file:
        counts: Counter = Counter()
        try:
            texts = [
                line for _, line in FileUnit(Path(text_file), "txt", 0, None).lines(counts) if line
            ]
        except OSError as error:
            description = f"{text_file}: {describe_os_error(error)}"
            raise UserError(
                "a text file with one text per line", description, "check the path"
            ) from error
        if counts[TOO_LARGE]:
            description = f"{counts[TOO_LARGE]} longer lines in {text_file}"
            raise UserError(
                f"lines of at most {MAX_TEXT_BYTES:,} bytes",
                description,
                "split them into sentences",
            )
    if texts and (others := [text for text in texts if not isinstance(text, str)]):
        found = f"{repr(others[0])[:200]}, of type {type(others[0]).__name__}"
        raise UserError("texts as strings", found, "give a list of strings")
    if not texts or any(not text.strip() for text in texts):
        raise UserError(
            "texts that are not empty", f"{texts!r}", "name at least one text, none of them blank"
        )
    if wrong := [text for text in texts if not is_utf8(text)]:
        raise UserError(
            "--text in UTF-8", printable(wrong[0])[:200], "convert it, or give it in a --text-file"
        )
    return [text.strip() for text in texts]


def check_unknown(
    texts: Sequence[str], counts: Sequence[tuple[int, int]], whose: str
) -> list[int]:
    """Check given texts for words that a tokenizer does not know, which are all the same to it.

    Args:
        counts: Unknown tokens and all tokens of each text.
        whose: Name of the tokenizer, for the message.

    Returns:
        The unknown tokens of each text; a warning names the texts that have any.

    Raises:
        UserError: a text of unknown tokens alone: the result would be the same for any other such
            text.
    """
    for text, (num_unknown, num_tokens) in zip(texts, counts):
        if num_unknown and num_unknown == num_tokens:
            raise UserError(
                f"texts in words of the tokenizer {whose}",
                f"{text[:60]!r}: unknown tokens ([UNK]) alone",
                "write it in the language and script of the training texts, or use a model with"
                " another tokenizer",
            )
    unknown = [num_unknown for num_unknown, _ in counts]
    if some := [text for text, num_unknown in zip(texts, unknown) if num_unknown]:
        print(
            f"warning: {sum(unknown)} of {sum(num_tokens for _, num_tokens in counts)} tokens are"
            f" unknown ([UNK]) to the tokenizer {whose}: words that it does not know are all the"
            f" same to it; in {join_some((repr(text[:60]) for text in some), 3)}",
            file=sys.stderr,
        )
    return unknown


def unknown_tokens(
    texts: Sequence[str], ids: Sequence[Sequence[int]], pretrained: Pretrained
) -> list[int]:
    """Return the tokens of given texts that the model's tokenizer does not know; see
    `check_unknown`.
    """
    unknown = pretrained.tokenizer.unk_token_id
    return check_unknown(
        texts, [(list(row).count(unknown), len(row)) for row in ids], "of the model"
    )


def tokenize_texts(
    texts: Sequence[str], pretrained: Pretrained, truncate: bool = False
) -> list[list[int]]:
    """Tokenize texts without special tokens.

    Args:
        truncate: Whether to cut texts that are too long for the model.

    Raises:
        UserError: a text too long for the model, or without tokens.
    """
    ids = pretrained.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    limit = pretrained.model.config.max_seq_len - 1
    if truncate:
        ids = [row[:limit] for row in ids]
    for text, row in zip(texts, ids):
        if not 1 <= len(row) <= limit:
            raise UserError(
                f"texts of 1 to {limit} tokens (model.max_seq_len minus one for EOS)",
                f"{len(row)} tokens in {text[:60]!r}",
                "shorten it, or split it into sentences",
            )
    return ids
