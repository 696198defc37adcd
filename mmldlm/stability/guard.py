"""Decide for every step whether it is applied, from numbers that are equal on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmldlm.config.schema import StabilityConfig
from mmldlm.stability.bad_sample_rate import BadSampleRate
from mmldlm.stability.loss_scaler import LossScaler
from mmldlm.stability.spike_window import SpikeWindow


@dataclass(frozen=True)
class StepDecision:
    """Whether a step is applied, and why not.

    Attributes:
        apply: if False, all ranks discard the gradients.
        reason: "" for an ordinary step; else what was found, also if spike_action=log applies the
            step.
        is_overflow: fp16 gradients overflowed and the loss scale has been lowered, which is
            normal.
    """

    apply: bool
    reason: str = ""
    is_overflow: bool = False


def nonfinite_word(value: float) -> str:
    """Return NaN or Inf for a log; both for a value that does not distinguish them (DeepSpeed's
    norm of -1).
    """
    return "NaN" if math.isnan(value) else "Inf" if math.isinf(value) else "NaN or Inf"


class Guard:
    """Windows of loss, gradient norm and bad samples, the fp16 loss scale, and the decision based
    on them.

    Args:
        config: the section `stability`.
        dtype: training.dtype.
    """

    def __init__(self, config: StabilityConfig, dtype: str = "fp32"):
        self.action = config.spike_action
        self.loss_scale = LossScaler(config, dtype)
        self.loss = SpikeWindow(config.spike_window, config.spike_sigma)
        self.norm = SpikeWindow(config.spike_window, config.spike_sigma)
        self.bad_samples = BadSampleRate(config.max_bad_sample_fraction)

    def decide(
        self, loss: float, num_bad_losses: int, grad_norm: float, num_usable: int = 1
    ) -> StepDecision:
        """Decide on a step whose gradients are ready.

        Args:
            loss: loss of the global batch.
            num_bad_losses: micro-batches over all ranks with a non-finite loss.
            grad_norm: global norm before clipping.
            num_usable: samples over all ranks that were not excluded as bad.
        """
        if not num_usable:  # loss and gradients are exactly 0, and would pass for a very good step
            return StepDecision(False, "no usable sample in the step")
        if num_bad_losses:
            return StepDecision(
                False,
                f"non-finite loss ({nonfinite_word(loss)}) in {num_bad_losses} micro-batch(es)",
            )
        if not math.isfinite(loss):
            return StepDecision(False, f"non-finite loss ({nonfinite_word(loss)})")
        if (
            not math.isfinite(grad_norm) or grad_norm < 0
        ):  # DeepSpeed returns -1 for a non-finite norm
            if self.loss_scale.can_decrease:
                scale = self.loss_scale.value
                reason = (
                    f"fp16 overflow at loss scale {scale:g}, now {self.loss_scale.on_overflow():g}"
                )
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
            "loss": self.loss.state(),
            "norm": self.norm.state(),
            "loss_scale": self.loss_scale.state(),
            "bad_share": self.bad_samples.state(),
        }

    def restore(self, state: dict[str, list]) -> None:
        """Restore the state of a checkpoint; {} (an older one) starts with empty windows."""
        self.loss_scale.restore(state.get("loss_scale", []))
        self.loss.restore(state.get("loss", []))
        self.norm.restore(state.get("norm", []))
        self.bad_samples.restore(state.get("bad_share", []))
