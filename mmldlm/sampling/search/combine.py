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
    text: Text, edits: Edits, embedding: np.ndarray, target: np.ndarray, *, max_edits: int, log_ratio_weight: float,
    most: int,
) -> list[tuple[float, Text, float]]:  # fmt: skip
    """Return at most `most` texts that edits lead to, the most promising first, with scores and sums of log-ratios.

    The expected embedding after several edits is the text's true one plus the shifts of all: the error of the estimate
    at the text itself cancels. Without shifts, single edits in the order of their log-ratios.

    Args:
        embedding, target: of the text by the judge, and the latent. [M, D]
        max_edits: in one text.
        log_ratio_weight: added to the expected cosine, per nat.
    """
    if edits.shifts is None:
        order = np.argsort(-edits.log_ratios, kind="stable")[:most]
        alone = edits.log_ratios.tolist()
        return [(alone[row], edits.apply(text, [row]), alone[row]) for row in order.tolist()]
    shifts, ratios = edits.shifts, log_ratio_weight * edits.log_ratios

    def scores(start: np.ndarray, ratio: float) -> np.ndarray:
        return cosines(start + shifts, np.broadcast_to(target, shifts.shape)) + ratio + ratios

    single = scores(embedding, 0.0)
    order = np.argsort(-single, kind="stable").tolist()
    found = {edits.apply(text, [row]): (float(single[row]), float(edits.log_ratios[row])) for row in order[:most]}
    for first in order[:FIRST]:
        rows, value = [first], float(single[first])
        while len(rows) < max_edits:
            values = scores(embedding + shifts[rows].sum(0), float(ratios[rows].sum()))
            ranked = np.argsort(-values, kind="stable")[:NEXT].tolist()
            chosen = next((row for row in ranked if edits.compatible(row, rows)), None)
            if chosen is None or values[chosen] <= value + MIN_RISE:
                break
            rows, value = [*rows, chosen], float(values[chosen])
            found.setdefault(edits.apply(text, rows), (value, float(edits.log_ratios[rows].sum())))
    found.pop(text, None)
    ranked = sorted(found.items(), key=lambda item: -item[1][0])[:most]
    return [(score, changed, ratio) for changed, (score, ratio) in ranked]
