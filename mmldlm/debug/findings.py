"""Results of the sanity checks: failures per check, and the table of PASS and FAIL."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from mmldlm.utils.formatting import join_some

# id -> title, in the order of the table.
CHECKS = {
    "step_runs": "forward, backward and step run",
    "device": "the model is on the device",
    "optimizer": "the optimizer holds the parameters",
    "groups": "parameter groups",
    "precision": "precision and autocast",
    "gradient_scale": "gradients are those of the loss",
    "batches": "batches are intact, on the device",
    "train_mode": "train mode",
    "loss_graph": "the loss has its graph",
    "in_place": "nothing is changed in place",
    "gradient_coverage": "gradients reach what is trainable",
    "frozen": "frozen parameters stay as they are",
    "finite": "every number is finite",
    "clipping": "the optimizer gets clipped gradients",
    "weights_update": "parameters with a gradient change",
    "overfit": "the loss falls on one batch",
    "memory": "peak memory",
}
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
MAX_LISTED = 4
"""Names and failures that one reason spells out."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        id: key of CHECKS.
        title: description of the check.
        status: PASS, FAIL, or NOT RUN if an earlier failure ended the steps.
        reason: what was found.
    """

    id: str
    title: str
    status: str
    reason: str


class Findings:
    """Failures per check. A check passes if it ran and found none."""

    def __init__(self):
        self._failures: dict[str, dict[str, None]] = defaultdict(dict)
        self._passed: dict[str, str] = {}

    def passed(self, check: str, reason: str) -> None:
        """Record that a check ran; `reason` is printed if it has no failure."""
        assert check in CHECKS
        self._passed[check] = reason

    def failed(self, check: str, text: str) -> None:
        """Record a failure; the same text counts once."""
        assert check in CHECKS
        self._failures[check][text] = None

    def rows(self) -> list[Row]:
        """Return the table."""
        rows = []
        for check, title in CHECKS.items():
            failures = list(self._failures[check])
            more = f"; {len(failures) - MAX_LISTED} more" if len(failures) > MAX_LISTED else ""
            status = FAIL if failures else PASS if check in self._passed else NOT_RUN
            not_reached = "the steps ended before this check"
            reason = (
                "; ".join(failures[:MAX_LISTED]) + more
                if failures
                else self._passed.get(check, not_reached)
            )
            rows.append(Row(check, title, status, reason))
        return rows


def format_names(names: list[str]) -> str:
    """Join names: `a, b, c, d and 3 more`."""
    return join_some(names, MAX_LISTED)
