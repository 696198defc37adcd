"""What sampling returns and shows: texts with their costs, what each pass did, and its trace."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mmldlm.sampling.settings import MAX_TRACED_TEXTS

_Result = TypeVar("_Result")


@dataclass
class TextSamples:
    """Sampled texts in the order of the latents.

    Attributes:
        tokens: Ids of each text without its EOS.
        lengths: Lengths that were filled, EOS counted. [N] int64
        num_rows: Forward passes times samples in them (guidance counts twice): the cost of all
            texts.
        passes: Passes that wrote each text, one after the other: its sequential depth. [N] int64
        num_scored: Positions whose logits these passes computed; 0: not counted.
        log_probabilities: Log-probabilities of each text's tokens when they were written, [n]
            fp32; None: not asked for.
    """

    tokens: list[list[int]]
    lengths: Tensor
    num_rows: int
    passes: Tensor
    num_scored: int = field(default=0, kw_only=True)
    log_probabilities: list[Tensor] | None = field(default=None, kw_only=True)


class SamplingInterrupted(KeyboardInterrupt):
    """An interrupt after the first batches of a sampler.

    Attributes:
        rows: Numbers of the finished samples, ascending.
        result: What the sampler would have returned, filled in these rows alone.
    """

    def __init__(self, rows: list[int], result: Any):
        super().__init__()
        self.rows, self.result = rows, result


def finished_part(sample: Callable[[], _Result]) -> tuple[_Result, list[int] | None]:
    """Return what a sampler returns, and the rows that are filled after an interrupt, else
    None.
    """
    try:
        return sample(), None
    except SamplingInterrupted as interrupt:
        return interrupt.result, interrupt.rows


@contextlib.contextmanager
def keeping_finished(result: Any) -> Iterator[list[int]]:
    """Yield a list for the rows of finished batches; an interrupt after the first one becomes a
    SamplingInterrupted.
    """
    finished: list[int] = []
    try:
        yield finished
    except KeyboardInterrupt as interrupt:
        if not finished:  # an interrupt within it may hold parts of another result
            raise KeyboardInterrupt from interrupt
        raise SamplingInterrupted(sorted(finished), result) from interrupt


@dataclass(frozen=True)
class TextPass:
    """One pass over R texts, which filled N positions.

    Probabilities are those of the model given what stood before (at temperature 1, without
    guidance and penalties).

    Attributes:
        samples: Indices of the texts. [R] int64
        before, after: Tokens before and after the pass, padded. [R, S] int64
        rows: The text of each filled position, of R. [N] int64
        positions: Its position in the text. [N] int64
        log_probabilities: Log-probability of the token that was written; NaN for a state that is
            not a token. [N] fp32
        top_tokens: The most probable tokens there, the best first. [N, K] int64
        top_log_probabilities: Their log-probabilities. [N, K] fp32
    """

    samples: Tensor
    before: Tensor
    after: Tensor
    rows: Tensor
    positions: Tensor
    log_probabilities: Tensor
    top_tokens: Tensor
    top_log_probabilities: Tensor


@dataclass(frozen=True)
class Recorder:
    """What to do after every pass.

    Attributes:
        on_pass: Function of the pass.
        num_candidates: Number K of the most probable tokens of each filled position.
    """

    on_pass: Callable[[TextPass], None]
    num_candidates: int = 0


def report_changes(
    recorder: Recorder,
    samples: Sequence[int],
    before: Tensor,
    after: Tensor,
    positions: Tensor,
    logits: Tensor,
) -> None:
    """Report a pass of a sampler that has no strategy: what it filled is the difference of two
    states.

    Args:
        samples: Indices of the B texts.
        before, after: Tokens before and after the pass. [B, S] int64
        positions: Positions in B * S that the pass could change. [M] int64
        logits: Logits of the model there. [M, V]
    """
    width, vocab_size = before.shape[1], logits.shape[1]
    rows, row_index = torch.unique(positions // width, return_inverse=True)
    changed = (after.flatten()[positions] != before.flatten()[positions]).nonzero()[:, 0]
    positions = positions[changed]
    row_index = row_index[changed]
    log_probs = logits[changed].float().log_softmax(-1)
    tokens = after.flatten()[positions]
    token_log_probs = log_probs.gather(1, tokens.clamp_max(vocab_size - 1)[:, None])[:, 0]
    token_log_probs = token_log_probs.masked_fill(tokens >= vocab_size, float("nan"))
    top, top_tokens = log_probs.topk(recorder.num_candidates, dim=-1)
    indices = torch.tensor(samples)[rows.cpu()]
    recorder.on_pass(
        TextPass(
            indices,
            before[rows],
            after[rows],
            row_index,
            positions % width,
            token_log_probs,
            top_tokens,
            top,
        )
    )


NUM_CANDIDATES = 5


class Write(NamedTuple):
    """One position that a pass changed.

    Attributes:
        position: Position in the text, from 0.
        token: Id of the new token; None: masked again.
        probability: Probability that the model gave the token; None if it gave none.
        candidates: Pairs (id, probability) of the most probable tokens, in descending order.
    """

    position: int
    token: int | None
    probability: float | None = None
    candidates: tuple[tuple[int, float], ...] = ()


@dataclass
class TextTrace:
    """What every pass wrote into one text; passes that did not read the text are left out."""

    passes: list[list[Write]] = field(default_factory=list)

    def replay(self, length: int, num_passes: int | None = None) -> list[int | None]:
        """Return the ids after the first passes (None: all) of a text of `length` positions; None:
        [MASK].
        """
        ids: list[int | None] = [None] * length
        for writes in self.passes[:num_passes]:
            for write in writes:
                ids[write.position] = write.token
        return ids


class TraceRecorder:
    """Keep the traces of the first texts of a sampler's call, which gets `recorder`.

    A sampler that changes tokens again, or masks them again, is recorded like any other.

    Args:
        mask_token_id: Id of [MASK].
        max_texts: Index from which on texts are left out.

    Attributes:
        texts: Traces by the index of their sample.
        starts_masked: Whether the texts started as [MASK]; else their positions came one by one.
    """

    def __init__(self, mask_token_id: int, max_texts: int = MAX_TRACED_TEXTS):
        self.mask_token_id, self.max_texts = mask_token_id, max_texts
        self.texts: dict[int, TextTrace] = {}
        self.starts_masked = True
        # What stood after the last pass over a text.
        self._last: dict[int, Tensor] = {}

    @property
    def recorder(self) -> Recorder:
        """What the sampler calls after every pass."""
        return Recorder(self.add, NUM_CANDIDATES)

    def add(self, text_pass: TextPass) -> None:
        """Record a pass."""
        if not self.texts and len(text_pass.samples):
            self.starts_masked = bool((text_pass.before == self.mask_token_id).any())
        for row, index in enumerate(text_pass.samples.tolist()):
            if index < self.max_texts:
                after, last = text_pass.after[row], self._last.get(index, text_pass.before[row])
                # A sampler may also mask tokens again between two passes over a text.
                masked_again = (after == self.mask_token_id) & (last != self.mask_token_id)
                self._last[index] = after
                masks = [
                    Write(position, None) for position in masked_again.nonzero()[:, 0].tolist()
                ]
                words = [
                    write for write in _writes(text_pass, row) if write.token != self.mask_token_id
                ]
                self.texts.setdefault(index, TextTrace()).passes.append(sorted(masks + words))


def _writes(text_pass: TextPass, row: int) -> list[Write]:
    """Return what a pass wrote into one of its texts."""
    filled = (text_pass.rows == row).nonzero()[:, 0]
    positions = text_pass.positions[filled]
    return [
        Write(
            position,
            token,
            None if math.isnan(log_probability) else math.exp(log_probability),
            tuple((id, p) for id, p in zip(ids, probabilities) if p > 0),
        )
        for position, token, log_probability, ids, probabilities in zip(
            positions.tolist(),
            text_pass.after[row, positions].tolist(),
            text_pass.log_probabilities[filled].tolist(),
            text_pass.top_tokens[filled].tolist(),
            text_pass.top_log_probabilities[filled].exp().tolist(),
        )
    ]
