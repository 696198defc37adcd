"""Dynamic loss scaling for fp16 (arXiv 1710.03740): one scale for all ranks, engines and stages,
in the checkpoint.
"""

from __future__ import annotations

from mmldlm.config.schema import StabilityConfig

INITIAL, WINDOW, MIN, LARGEST = 65536.0, 1000, 1.0, 2.0**24


class LossScaler:
    """Halve the scale when scaled gradients overflow; double it after a window of steps without
    overflow.

    bf16 and fp32 have the range of fp32 and need no scaling: the scale stays 1.

    Args:
        config: loss_scale and loss_scale_window.
        dtype: training.dtype.

    Attributes:
        value: factor of the next step's losses.
        good_steps: steps since the scale last changed.
    """

    def __init__(self, config: StabilityConfig, dtype: str):
        self.is_on = dtype == "fp16"
        self.value = (config.loss_scale or INITIAL) if self.is_on else 1.0
        self.window = config.loss_scale_window or WINDOW
        self.good_steps = 0

    def on_overflow(self) -> float:
        """Lower the scale after a step with finite losses and non-finite gradients; return the new
        scale.
        """
        self.value, self.good_steps = max(self.value / 2, MIN), 0
        return self.value

    def on_success(self) -> None:
        """Count a step with finite gradients."""
        if not self.is_on:
            return
        self.good_steps += 1
        if self.good_steps >= self.window and self.value < LARGEST:
            self.value, self.good_steps = self.value * 2, 0

    @property
    def can_decrease(self) -> bool:
        """Whether an overflow may be caused by the scale and not by the run."""
        return self.is_on and self.value > MIN

    def state(self) -> list[float]:
        """Return the state for the checkpoint."""
        return [self.value, self.good_steps] if self.is_on else []

    def restore(self, state: list[float]) -> None:
        """Restore the state of a checkpoint; one of another dtype ([]) starts from the initial
        scale.
        """
        if self.is_on and state:
            self.value, self.good_steps = float(state[0]), int(state[1])
