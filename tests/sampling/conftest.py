"""Toy denoisers and a small converted model."""

from tests.support.toy_models import checkpoint, toys

__all__ = ["checkpoint", "toys"]
