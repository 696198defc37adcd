"""Judges of texts, and what a search for texts returns and costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mmldlm.data.sentences import split_into_parts
from mmldlm.errors import MmldlmError
from mmldlm.sampling.records import TextSamples

Ids = Sequence[int]


def cosines(embedded: np.ndarray, latents: np.ndarray) -> np.ndarray:
    """Cosines [N] fp64 of [N, D] with [N, D], or means over the M latents of [N, M, D].

    A zero vector, of a text that has no embedding, gets -1: any text is nearer.
    """
    embedded, latents = embedded.astype(np.float64), latents.astype(np.float64)
    norms = np.linalg.norm(embedded, axis=-1) * np.linalg.norm(latents, axis=-1)
    values = np.where(norms > 0, (embedded * latents).sum(-1) / np.maximum(norms, 1e-12), -1.0)
    return values.reshape(len(values), -1).mean(-1)


def strings_of(tokenizer: Any, texts: Sequence[Ids]) -> list[str]:
    """Return ids as strings, without special tokens and white space at the ends."""
    decoded = tokenizer.batch_decode(list(texts), skip_special_tokens=True)
    return [text.strip() for text in decoded]


class Judge(ABC):
    """Embeds texts, and counts what that costs.

    Args:
        tokenizer: Tokenizer of the ids.
        shape: Shape of the latents of one text, (D,) or (M, D).

    Attributes:
        name: Name in reports.
        num_calls: Texts that were embedded; a text that occurs twice in one call of `embed` is
            embedded once.
        num_tokens: Tokens in them, special tokens counted.
        flops: Forward FLOPs of the embedding.
    """

    name: ClassVar[str]

    def __init__(self, tokenizer: Any, shape: tuple[int, ...]):
        self._tokenizer, self._shape = tokenizer, shape
        self.num_calls, self.num_tokens, self.flops = 0, 0, 0.0

    def strings(self, texts: Sequence[Ids]) -> list[str]:
        """The texts as strings: two with the same string are the same text."""
        return strings_of(self._tokenizer, texts)

    def embed(self, texts: Sequence[Ids]) -> np.ndarray:
        """Embed texts of ids without EOS.

        Returns:
            [N, D] (or [N, M, D]) fp32, in the encoder's space. A text without characters (or with
            fewer than the model has latents per text) is a zero vector, without a call: `cosines`
            ranks it last.

        Raises:
            MmldlmError: an embedding with NaN or infinite values.
        """
        result = np.zeros((len(texts), *self._shape), dtype=np.float32)
        first: dict[str, int] = {}
        rows = []
        for row, text in enumerate(self.strings(texts)):
            if (
                first.setdefault(text, row) == row
                and text
                and split_into_parts(text, max(self._shape[:-1], default=1))
            ):
                rows.append(row)
        if rows:
            embedded = self._embed([texts[row] for row in rows])
            self.num_calls += len(rows)
            bad = np.flatnonzero(~np.isfinite(embedded.reshape(len(rows), -1)).all(-1))
            if len(bad):
                text = self.strings([texts[rows[bad[0]]]])[0]
                raise MmldlmError(
                    f"the judge ({self.name}) returned NaN or infinite values for the text"
                    f" {text[:80]!r}"
                )
            result[rows] = embedded
        return result[[first[text] for text in self.strings(texts)]]

    @abstractmethod
    def _embed(self, texts: Sequence[Ids]) -> np.ndarray:
        """Embed distinct texts, and add their tokens and FLOPs to the counts."""


@dataclass
class SamplingCost:
    """The cost of N texts, so that arms of equal cost can be compared.

    Attributes:
        num_texts: Number of texts N.
        denoiser_rows: Passes of the model times the texts in them.
        denoiser_positions: Text positions in these rows, EOS counted.
        denoiser_flops: Forward FLOPs of these rows; None for a task without a cost model.
        judge: Name of the judge; None: the texts were written without one.
        judge_calls: Texts that the judge embedded.
        judge_tokens: Tokens that it read, special tokens counted.
        judge_flops: Forward FLOPs of the judge.
        depth: Passes of model and judge one after the other, of the text that took most.
    """

    num_texts: int
    denoiser_rows: int = 0
    denoiser_positions: float = 0.0
    denoiser_flops: float | None = 0.0
    judge: str | None = None
    judge_calls: int = 0
    judge_tokens: int = 0
    judge_flops: float = 0.0
    depth: int = 0

    @property
    def flops(self) -> float | None:
        """FLOPs of model and judge."""
        return None if self.denoiser_flops is None else self.denoiser_flops + self.judge_flops

    def add_rows(self, rows: int, positions: float, flops: float | None) -> None:
        """Add passes of the model."""
        self.denoiser_rows += rows
        self.denoiser_positions += positions
        if flops is None or self.denoiser_flops is None:
            self.denoiser_flops = None
        else:
            self.denoiser_flops += flops

    def add_texts(self, samples: TextSamples, flops: float | None) -> None:
        """Add written texts and their forward FLOPs; the depth is the caller's to set."""
        passes = samples.passes.double()
        positions = samples.num_rows * float(
            (passes * samples.lengths).sum() / passes.sum().clamp_min(1)
        )
        self.add_rows(samples.num_rows, positions, flops)

    def add_judge(self, judge: Judge) -> None:
        """Copy the counts of a judge that judged these texts alone."""
        self.judge, self.judge_calls = judge.name, judge.num_calls
        self.judge_tokens, self.judge_flops = judge.num_tokens, judge.flops

    def per_text(self) -> dict[str, Any]:
        """JSON-ready means over the texts."""
        count = self.num_texts
        return {
            "judge": self.judge,
            "denoiser_rows": self.denoiser_rows / count,
            "denoiser_positions": self.denoiser_positions / count,
            "denoiser_gflops": None
            if self.denoiser_flops is None
            else self.denoiser_flops / count / 1e9,
            "judge_calls": self.judge_calls / count,
            "judge_tokens": self.judge_tokens / count,
            "judge_gflops": self.judge_flops / count / 1e9,
            "gflops": None if self.flops is None else self.flops / count / 1e9,
            "depth": self.depth,
        }


@dataclass
class FoundTexts:
    """The result of a search.

    Attributes:
        tokens: Ids of the texts that were kept, without EOS.
        cosine: Cosine of each text's embedding by the judge with its latent. [N] fp64
        score: What the search maximized: the cosine, of a correction with the log-ratios of its
            edits. [N] fp64
        calls: Texts that the judge embedded for each latent. [N] int64
        cost: Cost of the whole search.
    """

    tokens: list[list[int]]
    cosine: np.ndarray
    score: np.ndarray
    calls: np.ndarray
    cost: SamplingCost
