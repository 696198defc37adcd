"""What stands between a bad number and the weights: the guard, audits, bad samples."""

from mmldlm.stability.guard import Guard, StepDecision

__all__ = ["Guard", "StepDecision"]
