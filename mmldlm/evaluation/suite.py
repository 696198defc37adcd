"""The evaluation suites, and their common helpers."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from mmldlm.utils.progress import ProgressCallback

SUITES = {
    "conditioning_gain": (
        "NELBO, text overlap and retrieval on unseen sentences, with and without the condition"
    ),
    "stsb": "correlation of embedding similarity with human scores (STS Benchmark)",
}

Log = Callable[[str], ProgressCallback | None]
"""Called with one line per stage; the result, if any, is called as the stage progresses
(`ProgressBar.start`).
"""


def batch_budget(model: nn.Module, batch_size: int | None) -> dict[str, int]:
    """Return `batch_tokens` of the samplers and the NELBO for batch_size texts of full length."""
    return {} if batch_size is None else {"batch_tokens": batch_size * model.config.max_seq_len}
