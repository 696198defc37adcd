"""Which edits of a text, alone or together, are worth a call of the judge."""

from __future__ import annotations

import numpy as np

from mmldlm.sampling.search.edits import Edits, Text
from mmldlm.sampling.search.judge import cosines

# Single edits that combinations start from, and those that are tried for the next place in one.
FIRST, NEXT = 12, 40
# A further edit must raise the expected cosine by this.
MIN_RISE = 1e-4


def promising_texts(
    text: Text,
    edits: Edits,
    embedding: np.ndarray,
    target: np.ndarray,
    *,
    max_edits: int,
    most: int,
    max_tokens: int,
) -> list[tuple[float, Text]]:
    """Return at most `most` texts that edits lead to, the most promising first, with their scores.

    The expected embedding after several edits is the text's true one plus the shifts of all: the error of the estimate
    at the text itself cancels. Without shifts, single edits in the order of their log-ratios.

    Args:
        embedding, target: of the text by the judge, and the latent. [M, D]
        max_edits: in one text.
        max_tokens: of a text; several insertions together are longer than any alone.
    """
    if edits.shifts is None:
        order = np.argsort(-edits.log_ratios, kind="stable")[:most]
        return [(float(edits.log_ratios[row]), edits.apply(text, [row])) for row in order.tolist()]
    targets = np.broadcast_to(target, edits.shifts.shape)
    single = cosines(embedding + edits.shifts, targets)
    order = np.argsort(-single, kind="stable").tolist()
    found = {edits.apply(text, [row]): float(single[row]) for row in order[:most]}
    for first in order[:FIRST]:
        rows, value = [first], float(single[first])
        while len(rows) < max_edits:
            values = cosines(embedding + edits.shifts[rows].sum(0) + edits.shifts, targets)
            ranked = np.argsort(-values, kind="stable")[:NEXT].tolist()
            chosen = next((row for row in ranked if edits.compatible(row, rows)), None)
            if chosen is None or values[chosen] <= value + MIN_RISE:
                break
            rows, value = [*rows, chosen], float(values[chosen])
            found.setdefault(edits.apply(text, rows), value)
    found.pop(text, None)
    ranked_texts = sorted(found.items(), key=lambda item: -item[1])
    return [(score, changed) for changed, score in ranked_texts if len(changed) <= max_tokens][:most]
