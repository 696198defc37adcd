"""Which states the optimizer keeps of a weight, next to its step count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's two moments
MUON_MOMENTS = ("exp_avg",)  # Muon's momentum, under the key of AdamW's first moment


def moment_keys(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which of MOMENTS the weights of a parameter group with these settings have."""
    return MUON_MOMENTS if settings.get("muon") else MOMENTS
