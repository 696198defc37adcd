"""A judge without weights, and texts that it alone knows."""

from tests.sampling.search.conftest import hidden, judge, new_judge, pretrained

__all__ = ["hidden", "judge", "new_judge", "pretrained"]
