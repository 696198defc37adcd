"""The guard: decide for every step whether it is applied, from numbers that are equal on all
ranks. Its state is the spike window, the rate of bad samples and the fp16 loss scale.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmldlm.config.schema import LOSS_SCALE, LOSS_SCALE_WINDOW, StabilityConfig

NO_USABLE_SAMPLE = "no usable sample in the step"


@dataclass(frozen=True)
class StepDecision:
    """Whether a step is applied, and why not.

    Attributes:
        apply: Whether to apply the step; if False, all ranks discard the gradients.
        reason: "" for an ordinary step; else what was found, also if spike_action=log applies the
            step.
        is_overflow: fp16 gradients overflowed and the loss scale has been lowered, which is
            normal.
    """

    apply: bool
    reason: str = ""
    is_overflow: bool = False


def nonfinite_word(value: float) -> str:
    """Return NaN or Inf for a log. (The norm of ZeRO-1 to 3 is Inf for both.)"""
    return "NaN" if math.isnan(value) else "Inf"


class Guard:
    """Windows of loss, gradient norm and bad samples, the fp16 loss scale, and the decision based
    on them.

    Args:
        config: Section `stability` of the config.
        dtype: Compute dtype (training.dtype).
    """

    def __init__(self, config: StabilityConfig, dtype: str = "fp32"):
        self.action = config.spike_action
        self.loss_scale = LossScaler(config, dtype)
        self.loss = SpikeWindow(config.spike_window, config.spike_sigma)
        self.norm = SpikeWindow(config.spike_window, config.spike_sigma)
        self.bad_samples = BadSampleRate(config.max_bad_sample_fraction)

    def decide(
        self, loss: float, num_nonfinite_losses: int, grad_norm: float, num_usable: int = 1
    ) -> StepDecision:
        """Decide on a step whose gradients are ready, and update the statistics of spikes and the
        loss scale.

        Args:
            loss: Loss of the global batch.
            num_nonfinite_losses: Number of micro-batches over all ranks with a non-finite loss.
            grad_norm: Global norm before clipping.
            num_usable: Number of samples over all ranks that were not excluded as bad.
        """
        # Loss and gradients are then exactly 0, and would pass for a very good step.
        if not num_usable:
            return StepDecision(False, NO_USABLE_SAMPLE)
        if num_nonfinite_losses:
            return StepDecision(
                False,
                f"non-finite loss ({nonfinite_word(loss)})"
                f" in {num_nonfinite_losses} micro-batch(es)",
            )
        if not math.isfinite(loss):
            return StepDecision(False, f"non-finite loss ({nonfinite_word(loss)})")
        if not math.isfinite(grad_norm):
            if self.loss_scale.can_decrease:
                scale = self.loss_scale.value
                lower = self.loss_scale.on_overflow()
                reason = f"fp16 overflow at loss scale {scale:g}, now {lower:g}"
                return StepDecision(False, reason, is_overflow=True)
            return StepDecision(False, f"non-finite gradient norm ({nonfinite_word(grad_norm)})")
        self.loss_scale.on_success()
        spikes = []
        if self.action != "off":
            for name, value, window in (
                ("loss", loss, self.loss),
                ("gradient norm", grad_norm, self.norm),
            ):
                if window.is_spike(value):
                    spikes.append(f"spike: {name} {value:.4g} above {window.threshold():.4g}")
        if spikes:
            # A skipped spike must not widen the window; one that is only logged is part of the new
            # normal.
            if self.action == "log":
                self._update_statistics(loss, grad_norm)
            return StepDecision(self.action == "log", "; ".join(spikes))
        self._update_statistics(loss, grad_norm)
        return StepDecision(True)

    def _update_statistics(self, loss: float, grad_norm: float) -> None:
        self.loss.update(loss)
        self.norm.update(grad_norm)

    def state(self) -> dict[str, list]:
        """Return the state for the checkpoint."""
        return {
            "loss": list(self.loss.values),
            "norm": list(self.norm.values),
            "loss_scale": self.loss_scale.state(),
            "bad_share": list(self.bad_samples.batches),
        }

    def restore(self, state: dict[str, list]) -> None:
        """Restore the state of a checkpoint; {} (an older one) starts with empty windows."""
        self.loss_scale.restore(state.get("loss_scale", []))
        windows: tuple[tuple[str, deque[Any]], ...] = (
            ("loss", self.loss.values),
            ("norm", self.norm.values),
            ("bad_share", self.bad_samples.batches),
        )
        for key, window in windows:
            window.clear()
            window.extend(state.get(key, ()))


class SpikeWindow:
    """The last `size` finite values that were not spikes.

    A value is a spike if it is more than sigma standard deviations above the mean of at least size
    / 2 values. This is OLMo's rule with two additions: non-finite values never enter, and the
    window is part of the checkpoint.
    """

    def __init__(self, size: int, sigma: float):
        self.size, self.sigma = size, sigma
        self.values: deque[float] = deque(maxlen=size)

    def threshold(self) -> float:
        """Return the value above which a value is a spike; inf with too few values."""
        count = len(self.values)
        if count < max(self.size // 2, 2):
            return math.inf
        mean = math.fsum(self.values) / count
        variance = math.fsum((value - mean) ** 2 for value in self.values) / count
        return mean + self.sigma * math.sqrt(variance)

    def is_spike(self, value: float) -> bool:
        """Whether a finite value is a spike. The window is not changed."""
        return value > self.threshold()

    def update(self, value: float) -> None:
        """Add a value to the window, unless it is not finite."""
        if math.isfinite(value):
            self.values.append(value)


BAD_SAMPLE_WINDOW = 100  # in global batches
MIN_BATCHES = 20  # with fewer, one bad batch would be a high fraction


class BadSampleRate:
    """Fraction of bad samples in the last BAD_SAMPLE_WINDOW global batches.

    It is part of the checkpoint, so that a resumed run stops at the same step as an uninterrupted
    one. A checkpoint of a full window is never above the limit, because the run ends first: after
    the data is repaired, the run can resume. One of a run's first MIN_BATCHES batches may be.

    Args:
        limit: Largest fraction of bad samples (stability.max_bad_sample_fraction).
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.batches: deque[Sequence[int]] = deque(maxlen=BAD_SAMPLE_WINDOW)

    def update(self, num_bad: int, num_samples: int) -> None:
        """Count one global batch; both numbers are sums over all ranks."""
        self.batches.append((num_bad, num_samples))

    def check(self) -> str | None:
        """Return a message if the fraction in the window is above the limit, else None."""
        num_bad, num_samples = (
            (sum(column) for column in zip(*self.batches)) if self.batches else (0, 0)
        )
        if len(self.batches) < MIN_BATCHES or num_bad <= self.limit * num_samples:
            return None
        return (
            f"{num_bad} of the {num_samples} samples of the last {len(self.batches)} global"
            f" batches were bad ({num_bad / num_samples:.0%}, above"
            f" stability.max_bad_sample_fraction={self.limit:g})"
        )


MIN_SCALE, MAX_SCALE = 1.0, 2.0**24


class LossScaler:
    """Halve the scale when scaled gradients overflow; double it after a window of steps without
    overflow.

    bf16 and fp32 have the range of fp32 and need no scaling: the scale stays 1.

    Args:
        config: Section with loss_scale and loss_scale_window.
        dtype: Compute dtype (training.dtype).

    Attributes:
        value: Factor of the next step's losses.
        good_steps: Steps since the scale last changed.
    """

    def __init__(self, config: StabilityConfig, dtype: str):
        self.is_on = dtype == "fp16"
        self.value = (config.loss_scale or LOSS_SCALE) if self.is_on else 1.0
        self.window = config.loss_scale_window or LOSS_SCALE_WINDOW
        self.good_steps = 0

    def on_overflow(self) -> float:
        """Lower the scale after a step with finite losses and non-finite gradients; return the new
        scale.
        """
        self.value, self.good_steps = max(self.value / 2, MIN_SCALE), 0
        return self.value

    def on_success(self) -> None:
        """Count a step with finite gradients."""
        if not self.is_on:
            return
        self.good_steps += 1
        if self.good_steps >= self.window and self.value < MAX_SCALE:
            self.value, self.good_steps = self.value * 2, 0

    @property
    def can_decrease(self) -> bool:
        """Whether an overflow may be caused by the scale and not by the run."""
        return self.is_on and self.value > MIN_SCALE

    def state(self) -> list[float]:
        """Return the state for the checkpoint."""
        return [self.value, self.good_steps] if self.is_on else []

    def restore(self, state: list[float]) -> None:
        """Restore the state of a checkpoint; one of another dtype ([]) changes nothing."""
        if self.is_on and state:
            self.value, self.good_steps = float(state[0]), int(state[1])
