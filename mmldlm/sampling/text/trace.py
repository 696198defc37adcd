"""Record how texts were written, pass by pass, for `mmldlm sample --trace`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from mmldlm.errors import UserError
from mmldlm.sampling.text.records import Recorder, TextPass

if TYPE_CHECKING:
    from mmldlm.sampling.pretrained import Pretrained

MAX_TEXTS = 50
NUM_CANDIDATES = 5


class Write(NamedTuple):
    """One position that a pass changed.

    Attributes:
        position: in the text, from 0.
        token: id of the new token; None: masked again.
        probability: that the model gave the token; None if it gave none.
        candidates: (id, probability) of the most probable tokens, in descending order.
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
        for written in self.passes[:num_passes]:
            for write in written:
                ids[write.position] = write.token
        return ids


class TraceRecorder:
    """Keep the traces of the first texts of a sampler's call, which gets `recorder`.

    A sampler that changes tokens again, or masks them again, is recorded like any other.

    Args:
        mask_token_id: id of [MASK].
        max_texts: texts with an index from here on are left out.

    Attributes:
        texts: traces by the index of their sample.
        starts_masked: whether the texts started as [MASK]; else their positions came one by one.
    """

    def __init__(self, mask_token_id: int, max_texts: int = MAX_TEXTS):
        self.mask_token_id, self.max_texts = mask_token_id, max_texts
        self.texts: dict[int, TextTrace] = {}
        self.starts_masked = True
        self._last: dict[int, Tensor] = {}  # what stood after the last pass over a text

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


def start_trace(pretrained: Pretrained, sampler: str) -> TraceRecorder:
    """Return the recorder of --trace.

    Raises:
        UserError: the sampler does not show its passes.
    """
    task = pretrained.task
    if not task.records_passes(sampler):
        known = dict.fromkeys(
            name for names in task.samplers.values() for name in names if task.records_passes(name)
        )
        raise UserError(
            "--trace with a sampler that shows its passes",
            f"--sampler {sampler} of task={task.name}",
            f"add --sampler {' or '.join(known)}" if known else "omit --trace",
        )
    return TraceRecorder(pretrained.model.config.mask_token_id)


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
