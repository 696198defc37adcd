"""Dynamic loss scaling for fp16 (arXiv 1710.03740): one scale for all ranks, engines and stages, in the checkpoint."""

from __future__ import annotations

from mmldlm.config.schema import StabilityConfig

INITIAL, WINDOW, MIN, LARGEST = 65536.0, 1000, 1.0, 2.0**24


class LossScaler:
    """Halved when the scaled gradients overflow, doubled after a window of steps without. bf16 and fp32 have the range
    of fp32 and need none: the scale stays 1.

    Args:
        config: loss_scale and loss_scale_window. dtype: training.dtype.

    Attributes:
        value: what the next step's losses are multiplied by. num_sound: steps since it last changed.
    """

    def __init__(self, config: StabilityConfig, dtype: str):
        self.is_on = dtype == "fp16"
        self.value = (config.loss_scale or INITIAL) if self.is_on else 1.0
        self.window = config.loss_scale_window or WINDOW
        self.good_steps = 0

    def on_overflow(self) -> float:
        """After a step whose losses were finite and whose gradients were not: the new, lower scale."""
        self.value, self.good_steps = max(self.value / 2, MIN), 0
        return self.value

    def on_success(self) -> None:
        """After a step with finite gradients."""
        if not self.is_on:
            return
        self.good_steps += 1
        if self.good_steps >= self.window and self.value < LARGEST:
            self.value, self.good_steps = self.value * 2, 0

    @property
    def can_decrease(self) -> bool:
        """Whether an overflow may still be the scale's fault and not the run's."""
        return self.is_on and self.value > MIN

    def state(self) -> list[float]:
        """For the checkpoint."""
        return [self.value, self.good_steps] if self.is_on else []

    def restore(self, state: list[float]) -> None:
        """From a checkpoint; one of another dtype ([]) starts afresh."""
        if self.is_on and state:
            self.value, self.good_steps = float(state[0]), int(state[1])
