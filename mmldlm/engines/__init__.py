"""Engines: what runs a step. One seam (base), several kinds behind it."""

from mmldlm.engines.base import Engine, StepResult
from mmldlm.engines.build import build_engine

__all__ = ["Engine", "StepResult", "build_engine"]
