"""Objectives: what a noised batch asks of the model, and which parameters a mode trains."""

from mmldlm.objectives.translation import TranslationObjective

__all__ = ["TranslationObjective"]
