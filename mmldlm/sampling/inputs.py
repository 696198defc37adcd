"""What `mmldlm sample` reads: texts, their token ids, and their embeddings from a file or from the encoder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmldlm.data.store.arrays import read_array
from mmldlm.errors import UserError
from mmldlm.observe.progress_meter import Advance
from mmldlm.sampling.latent_sampler import latent_shape
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.utils.formatting import describe_os_error

# Norms further from 1 than this are not vectors of an encoder that normalizes.
_NORM_SLACK = 0.05


def read_latents(path: str, pretrained: Pretrained) -> np.ndarray:
    """Embeddings [N, D] fp32 of a .npy file that holds [D] or [N, D]; of a model of M latents a text [N, M, D] of
    [M, D] or [N, M, D].

    Raises:
        UserError: no such file, not an array, empty, of another dimension, NaN, infinite or zero vectors.
    """
    shape = latent_shape(pretrained.model.config)
    one = ", ".join(map(str, shape))
    expected = f"a .npy file of numbers [{one}] or [N, {one}] (the model's latents of a text) at {path}"
    fix = "save the encoder's vectors with numpy.save; nothing is filled in for missing or damaged ones"
    try:
        values = read_array(Path(path))
    except FileNotFoundError:
        raise UserError(expected, "no such file", "check the path") from None
    except (OSError, ValueError) as error:
        raise UserError(expected, f"not a .npy file: {error}", fix) from error
    if not isinstance(values, np.ndarray) or not np.issubdtype(values.dtype, np.floating):
        raise UserError(expected, f"{getattr(values, 'dtype', type(values).__name__)}", fix)
    rows = values[None] if values.ndim == len(shape) else values
    if rows.shape[1:] != shape or rows.size == 0:
        raise UserError(expected, f"shape {list(values.shape)}", fix)
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    bad = np.unique(np.nonzero(~np.isfinite(rows).all(-1) | ~rows.any(-1))[0])
    if len(bad):
        named = ", ".join(map(str, bad[:10])) + (", ..." if len(bad) > 10 else "")
        raise UserError(f"finite, non-zero vectors in {path}", f"NaN, infinite or zero vectors in rows {named}", fix)
    norm = float(np.median(np.linalg.norm(rows, axis=-1)))
    if pretrained.unit_norm and abs(norm - 1) > _NORM_SLACK:
        print(
            f"warning: the vectors in {path} have norm {norm:.3g}, those the model was trained on have norm 1; "
            "are they of the same encoder, unscaled?",
            file=sys.stderr,
        )
    return rows


def encode_texts(texts: Sequence[str], pretrained: Pretrained, progress: Advance | None = None) -> np.ndarray:
    """Embeddings [N, D] of texts by the encoder the model was trained on; [N, M, D] where it has M latents per text.

    Args:
        progress: called after every batch with the texts (or pieces of texts) done so far, and in all.

    Raises:
        UserError: the checkpoint does not name its encoder, the one at hand has other weights, or a text is too short
            for M pieces.
    """
    from mmldlm.data.encoders.encoder import Encoder
    from mmldlm.data.sentences import split_into_parts

    identity = pretrained.encoder
    if identity is None:
        raise UserError(
            f'"encoder" in the model\'s config in {pretrained.folder}, which names the encoder of its latents',
            "no such key",
            "embed the texts yourself and pass --latent-file",
        )
    if not pretrained.has_encoder:
        raise UserError(
            "a model whose data names the encoder of its latents",
            "its store was packed without --encoder",
            "embed the texts yourself with that encoder and give the latents with --latent-file",
        )
    count, pieces = pretrained.model.config.max_latents, []
    for text in texts:  # cut as prepare cuts them
        parts = split_into_parts(text, count)
        if parts is None:
            raise UserError(
                f"texts of at least {count} characters, which the model's {count} latents are of",
                repr(text),
                "leave it out",
            )
        pieces += parts
    done = 0

    def advance(just_done: int) -> None:
        nonlocal done
        done += just_done
        if progress is not None:
            progress(done, len(pieces))

    latents = Encoder.from_identity(identity).encode(pieces, advance)
    return latents.reshape(len(texts), *latent_shape(pretrained.model.config))


def given_texts(texts: list[str] | None, text_file: str | None) -> list[str]:
    """The texts of --text, or of --text-file, one a line (blank lines left out).

    Raises:
        UserError: no such file, not UTF-8, no text, or a blank one.
    """
    if text_file:
        try:
            texts = Path(text_file).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            found = f"{text_file}: {describe_os_error(error)}"
            raise UserError("a text file, one text a line", found, "check the path") from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"UTF-8 text in {text_file}",
                f"byte 0x{error.object[error.start]:02x} at offset {error.start}",
                "save it as UTF-8 (for instance with iconv)",
            ) from None
        texts = [text for text in texts if text.strip()]
    if not texts or any(not text.strip() for text in texts):
        raise UserError("texts that are not empty", f"{texts!r}", "give at least one text, none of them blank")
    return [text.strip() for text in texts]


def tokenize_texts(texts: Sequence[str], pretrained: Pretrained) -> list[list[int]]:
    """Ids without special tokens.

    Raises:
        UserError: a text too long for the model, or of no token.
    """
    ids = pretrained.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    room = pretrained.model.config.max_seq_len - 1
    for text, row in zip(texts, ids):
        if not 1 <= len(row) <= room:
            raise UserError(
                f"texts of 1 to {room} tokens (model.max_seq_len, less one for EOS)",
                f"{len(row)} tokens in {text[:60]!r}",
                "shorten it, or split it into sentences",
            )
    return ids
