"""A converted model, a judge without weights, and texts that it alone knows."""

from tests.inference.conftest import checkpoint, hidden, judge, new_judge, pretrained

__all__ = ["checkpoint", "hidden", "judge", "new_judge", "pretrained"]
