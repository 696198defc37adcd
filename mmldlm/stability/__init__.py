"""What stands between a bad number and the weights: the guard, audits, bad samples."""

from mmldlm.stability.guard import Guard, Verdict

__all__ = ["Guard", "Verdict"]
