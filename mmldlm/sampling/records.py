"""What sampling returns and shows: texts with their costs, and the trace of their passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

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


NUM_CANDIDATES = 5


class Write(NamedTuple):
    """One position that a pass changed.

    Probabilities are those of the model given what stood before (at temperature 1, without
    guidance and penalties).

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


TextTrace = list[list[Write]]
"""What every pass wrote into one text; passes that did not read the text are left out."""


class Recorder:
    """Keep the traces of the first MAX_TRACED_TEXTS texts of a sampler's call, which calls `add`
    after every pass.

    A sampler that changes tokens again, or masks them again, is recorded like any other.

    Args:
        mask_token_id: Id of [MASK].

    Attributes:
        texts: Traces by the index of their sample.
        starts_masked: Whether the texts started as [MASK]; else their positions came one by one.
    """

    def __init__(self, mask_token_id: int):
        self.mask_token_id = mask_token_id
        self.texts: dict[int, TextTrace] = {}
        self.starts_masked = True
        # What stood after the last pass over a text.
        self._last: dict[int, Tensor] = {}

    def add(
        self,
        samples: Sequence[int],
        before: Tensor,
        after: Tensor,
        positions: Tensor,
        logits: Tensor,
    ) -> None:
        """Record a pass: what it filled is the difference of two states.

        Args:
            samples: Indices of the B texts.
            before, after: Tokens before and after the pass, padded. [B, S] int64
            positions: Positions in B * S that the pass could change. [M] int64
            logits: Logits of the model there, without penalties. [M, V]
        """
        width, mask = before.shape[1], self.mask_token_id
        owners = (positions // width).unique().tolist()
        if not self.texts and owners:
            self.starts_masked = bool((before[owners] == mask).any())
        writes: dict[int, list[Write]] = {}
        for row in owners:
            if (index := samples[row]) < MAX_TRACED_TEXTS:
                # A sampler may also mask tokens again between two passes over a text.
                last = self._last.get(index, before[row])
                masked_again = ((after[row] == mask) & (last != mask)).nonzero()[:, 0]
                writes[row] = [Write(position, None) for position in masked_again.tolist()]
                self._last[index] = after[row].clone()
        for position, write in _filled(before, after, positions, logits):
            if position // width in writes and write.token != mask:
                writes[position // width].append(write)
        for row, found in writes.items():
            self.texts.setdefault(samples[row], []).append(sorted(found))


def _filled(
    before: Tensor, after: Tensor, positions: Tensor, logits: Tensor
) -> Iterator[tuple[int, Write]]:
    """Yield each position in B * S that changed, and what was written there (`Recorder.add`)."""
    changed = (after.flatten()[positions] != before.flatten()[positions]).nonzero()[:, 0]
    positions, probabilities = positions[changed], logits[changed].float().softmax(-1)
    tokens, num_tokens = after.flatten()[positions], logits.shape[1]
    # A state that is not a token has no probability.
    own = probabilities.gather(1, tokens.clamp_max(num_tokens - 1)[:, None])[:, 0]
    top, candidates = probabilities.topk(NUM_CANDIDATES, dim=-1)
    columns = (positions, tokens, own, candidates, top)
    for position, token, probability, ids, values in zip(*(part.tolist() for part in columns)):
        yield (
            position,
            Write(
                position % before.shape[1],
                token,
                probability if token < num_tokens else None,
                tuple((id, value) for id, value in zip(ids, values) if value > 0),
            ),
        )
