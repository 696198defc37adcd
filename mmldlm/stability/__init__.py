"""Protection of the weights from bad numbers: the guard, audits, bad samples, rollbacks."""

from mmldlm.stability.guard import Guard, StepDecision

__all__ = ["Guard", "StepDecision"]
