"""Baselines: other models of text on the same trainer, data and evaluation (docs/baselines.md)."""
