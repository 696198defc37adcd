"""Dynamic loss scaling for fp16 (arXiv 1710.03740): one scale for all ranks, engines and stages, in the checkpoint."""

from __future__ import annotations

from mmldlm.config.schema import StabilityConfig

FIRST, WINDOW, LEAST, LARGEST = 65536.0, 1000, 1.0, 2.0**24


class LossScale:
    """Halved when the scaled gradients overflow, doubled after a window of steps without. bf16 and fp32 have the range
    of fp32 and need none: the scale stays 1.

    Args:
        config: loss_scale and loss_scale_window. dtype: training.dtype.

    Attributes:
        value: what the next step's losses are multiplied by. num_sound: steps since it last changed.
    """

    def __init__(self, config: StabilityConfig, dtype: str):
        self.is_on = dtype == "fp16"
        self.value = (config.loss_scale or FIRST) if self.is_on else 1.0
        self.window = config.loss_scale_window or WINDOW
        self.num_sound = 0

    def overflowed(self) -> float:
        """After a step whose losses were finite and whose gradients were not: the new, lower scale."""
        self.value, self.num_sound = max(self.value / 2, LEAST), 0
        return self.value

    def passed(self) -> None:
        """After a step with finite gradients."""
        if not self.is_on:
            return
        self.num_sound += 1
        if self.num_sound >= self.window and self.value < LARGEST:
            self.value, self.num_sound = self.value * 2, 0

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may still be the scale's fault and not the run's."""
        return self.is_on and self.value > LEAST

    def state(self) -> list[float]:
        """For the checkpoint."""
        return [self.value, self.num_sound] if self.is_on else []

    def restore(self, state: list[float]) -> None:
        """From a checkpoint; one of another dtype ([]) starts afresh."""
        if self.is_on and state:
            self.value, self.num_sound = float(state[0]), int(state[1])
