"""A converted model, a judge without weights, and texts that it alone knows."""

from tests.sampling.conftest import checkpoint
from tests.sampling.search.conftest import hidden, judge, new_judge, pretrained

__all__ = ["checkpoint", "hidden", "judge", "new_judge", "pretrained"]
