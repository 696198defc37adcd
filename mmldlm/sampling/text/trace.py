"""Record how texts were written, pass by pass, for `mmldlm sample --trace`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    pass

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
        """Return the ids after the first passes (None: all) of a text of `length` positions; None: [MASK]."""
        ids: list[int | None] = [None] * length
        for written in self.passes[:num_passes]:
            for write in written:
                ids[write.position] = write.token
        return ids
