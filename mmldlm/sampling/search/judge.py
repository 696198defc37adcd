"""Judges of texts: how near the embedding of a text is to the latent that it was written from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mmldlm.data.encoders.encoder import Encoder
from mmldlm.data.sentences import split_into_parts
from mmldlm.errors import MmldlmError, UserError
from mmldlm.sampling.device import device_of
from mmldlm.sampling.inputs import encoder_identity, reason_without_encoder
from mmldlm.sampling.latent_sampler import latent_shape, sample_latents, steps_given_text
from mmldlm.sampling.pretrained import Pretrained

Ids = Sequence[int]


def cosines(embedded: np.ndarray, latents: np.ndarray) -> np.ndarray:
    """Cosines [N] fp64 of [N, D] with [N, D], or means over the M latents of [N, M, D].

    A zero vector, of a text that has no embedding, gets -1: any text is nearer.
    """
    embedded, latents = embedded.astype(np.float64), latents.astype(np.float64)
    norms = np.linalg.norm(embedded, axis=-1) * np.linalg.norm(latents, axis=-1)
    found = np.where(norms > 0, (embedded * latents).sum(-1) / np.maximum(norms, 1e-12), -1.0)
    return found.reshape(len(found), -1).mean(-1)


class Judge(ABC):
    """Embeds texts, and counts what that costs.

    Attributes:
        name: of JUDGES, as reports name it.
        num_calls: texts that were embedded; a text that occurs twice in one call of `embed` is
            embedded once.
        num_tokens: tokens in them, special tokens counted.
        flops: forward FLOPs of that.
    """

    name: ClassVar[str]

    def __init__(self, pretrained: Pretrained):
        self._pretrained = pretrained
        self.num_calls, self.num_tokens, self.flops = 0, 0, 0.0

    def strings(self, texts: Sequence[Ids]) -> list[str]:
        """The texts as strings: two with the same string are the same text."""
        return [
            text.strip()
            for text in self._pretrained.tokenizer.batch_decode(texts, skip_special_tokens=True)
        ]

    def embed(self, texts: Sequence[Ids]) -> np.ndarray:
        """Embed texts of ids without EOS.

        Returns:
            [N, D] (or [N, M, D]) fp32, in the encoder's space. A text without characters (or with
            fewer than the model has latents per text) is a zero vector, without a call: `cosines`
            puts it last.

        Raises:
            MmldlmError: an embedding with NaN or infinite values.
        """
        shape = latent_shape(self._pretrained.model.config)
        result = np.zeros((len(texts), *shape), dtype=np.float32)
        first: dict[str, int] = {}
        rows = []
        for row, text in enumerate(self.strings(texts)):
            if (
                first.setdefault(text, row) == row
                and text
                and split_into_parts(text, max(shape[:-1], default=1))
            ):
                rows.append(row)
        if rows:
            found = self._embed([texts[row] for row in rows])
            self.num_calls += len(rows)
            bad = np.flatnonzero(~np.isfinite(found.reshape(len(rows), -1)).all(-1))
            if len(bad):
                text = self.strings([texts[rows[bad[0]]]])[0]
                raise MmldlmError(
                    f"the judge ({self.name}) returned NaN or infinite values for the text"
                    f" {text[:80]!r}"
                )
            result[rows] = found
        return result[[first[text] for text in self.strings(texts)]]

    @abstractmethod
    def _embed(self, texts: Sequence[Ids]) -> np.ndarray:
        """Embed distinct texts, and add their tokens and FLOPs to the counts."""


class EncoderJudge(Judge):
    """The encoder of the model's training latents itself.

    Raises:
        UserError: it is not known or not available, or its latents have another dimension than the
            model's.
    """

    name = "encoder"

    def __init__(self, pretrained: Pretrained):
        super().__init__(pretrained)
        expected = "the encoder of the model's latents, which judges the texts of --search"
        try:
            self._encoder = Encoder.from_identity(
                encoder_identity(pretrained), device=str(device_of(pretrained.model))
            )
        except (UserError, ImportError, OSError) as error:
            fix = (
                "install that encoder, or add --judge t2l, the model's own estimate of embeddings"
            )
            raise UserError(expected, reason_without_encoder(error), fix) from error
        dims, own = pretrained.model.config.latent_dim, self._encoder.latent_dim
        if dims != own:
            raise UserError(
                f"an encoder of {dims} dimensions, those of the model's latents",
                f"{own} dimensions from {self._encoder.source}",
                'correct "encoder" in the config.json of the model, or add --judge t2l',
            )

    def _embed(self, texts: Sequence[Ids]) -> np.ndarray:
        shape = latent_shape(self._pretrained.model.config)
        count = max(shape[:-1], default=1)
        parts = [part for text in self.strings(texts) for part in split_into_parts(text, count)]
        lengths = self._encoder.num_tokens(parts)
        self.num_tokens += sum(lengths)
        self.flops += self._encoder.forward_flops(lengths)
        return self._encoder.encode(parts).reshape(len(texts), *shape)


class T2lJudge(Judge):
    """The model's own estimate of a text's embedding, where the encoder is missing: worse, and
    without other weights.

    Raises:
        UserError: the model estimates no embeddings from texts.
    """

    name = "t2l"

    def __init__(self, pretrained: Pretrained):
        super().__init__(pretrained)
        if not estimates_embeddings(pretrained):
            raise UserError(
                "a model that estimates embeddings from texts, for --judge t2l",
                f"task={pretrained.task.name}, trained without mode t2l",
                "omit --judge and install the encoder of the model's latents",
            )

    def _embed(self, texts: Sequence[Ids]) -> np.ndarray:
        pretrained, lengths = self._pretrained, [len(text) + 1 for text in texts]
        config, steps = pretrained.model.config, steps_given_text(pretrained.latent_diffusion)
        self.num_tokens += sum(lengths)
        self.flops += steps * sum(
            pretrained.task.pass_flops(config, length, 0) for length in lengths
        )
        return estimate_embeddings(pretrained, texts)


def estimates_embeddings(pretrained: Pretrained) -> bool:
    """Whether the model was trained to estimate embeddings from texts."""
    return "t2l" in pretrained.task.samplers and pretrained.supports("t2l")


def estimate_embeddings(
    pretrained: Pretrained, texts: Sequence[Ids], batch_tokens: int = 4096
) -> np.ndarray:
    """The model's estimates [N, D] (or [N, M, D]) fp32 of the embeddings of texts, a function of
    each text alone.

    Raises:
        MmldlmError: NaN or infinite estimates.
    """
    return sample_latents(
        pretrained.model, texts, diffusion=pretrained.latent_diffusion,
        steps=steps_given_text(pretrained.latent_diffusion), renormalize=pretrained.renormalize,
        clamp=pretrained.clamp_x0, unit=pretrained.renormalize, draw_indices=[0] * len(texts),
        batch_tokens=batch_tokens,
    ).numpy()  # fmt: skip


JUDGES: dict[str, Any] = {"encoder": EncoderJudge, "t2l": T2lJudge}
