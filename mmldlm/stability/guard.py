"""Judges every step before the optimizer moves a weight: on numbers that all ranks share, so all judge alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmldlm.config.schema import StabilityConfig
from mmldlm.stability.bad_sample_rate import BadSampleRate
from mmldlm.stability.loss_scaler import LossScaler
from mmldlm.stability.spike_window import SpikeWindow


@dataclass(frozen=True)
class StepDecision:
    """Whether a step may be applied, and why not.

    Attributes:
        apply: False: the gradients are thrown away on all ranks.
        reason: "" for an ordinary step; else what was found, also where spike_action=log applies the step all the same.
        is_overflow: fp16 gradients were too large for the loss scale, which has been lowered: nothing is wrong yet.
    """

    apply: bool
    reason: str = ""
    is_overflow: bool = False


def nonfinite_word(value: float) -> str:
    """What people search logs for: NaN or Inf, or both where the value does not say (DeepSpeed's norm of -1)."""
    return "NaN" if math.isnan(value) else "Inf" if math.isinf(value) else "NaN or Inf"


class Guard:
    """Windows of loss, gradient norm and bad samples, the loss scale of fp16, and the rule over them.

    Args:
        config: the section. dtype: training.dtype.
    """

    def __init__(self, config: StabilityConfig, dtype: str = "fp32"):
        self.action = config.spike_action
        self.loss_scale = LossScaler(config, dtype)
        self.loss = SpikeWindow(config.spike_window, config.spike_sigma)
        self.norm = SpikeWindow(config.spike_window, config.spike_sigma)
        self.bad_share = BadSampleRate(config.max_bad_share)

    def decide(self, loss: float, num_bad_losses: int, grad_norm: float, num_usable: int = 1) -> StepDecision:
        """Look at a step whose gradients are ready.

        Args:
            loss: of the global batch. num_bad_losses: micro-batches, over all ranks, whose loss was not finite.
            grad_norm: global norm before clipping. num_usable: samples, over all ranks, that were not left out as bad.
        """
        if not num_usable:  # its loss and gradients are exactly 0: applied, they would pass for a very good step
            return StepDecision(False, "no usable sample in the step")
        if num_bad_losses:
            return StepDecision(False, f"non-finite loss ({nonfinite_word(loss)}) in {num_bad_losses} micro-batch(es)")
        if not math.isfinite(loss):
            return StepDecision(False, f"non-finite loss ({nonfinite_word(loss)})")
        if not math.isfinite(grad_norm) or grad_norm < 0:  # DeepSpeed says -1 for a norm that is not finite
            if self.loss_scale.can_decrease:
                scale = self.loss_scale.value
                reason = f"fp16 overflow at loss scale {scale:g}, now {self.loss_scale.on_overflow():g}"
                return StepDecision(False, reason, is_overflow=True)
            return StepDecision(False, f"non-finite gradient norm ({nonfinite_word(grad_norm)})")
        self.loss_scale.on_success()
        spikes = []
        if self.action != "off":
            for name, value, window in (("loss", loss, self.loss), ("gradient norm", grad_norm, self.norm)):
                if window.is_spike(value):
                    spikes.append(f"spike: {name} {value:.4g} above {window.limit():.4g}")
        if spikes:
            # A spike that is skipped must not widen the window; one that is only logged is the new ordinary.
            if self.action == "log":
                self._admit(loss, grad_norm)
            return StepDecision(self.action == "log", "; ".join(spikes))
        self._admit(loss, grad_norm)
        return StepDecision(True)

    def _admit(self, loss: float, grad_norm: float) -> None:
        self.loss.admit(loss)
        self.norm.admit(grad_norm)

    def state(self) -> dict[str, list]:
        """For the checkpoint."""
        return {
            "loss": self.loss.state(),
            "norm": self.norm.state(),
            "loss_scale": self.loss_scale.state(),
            "bad_share": self.bad_share.state(),
        }

    def restore(self, state: dict[str, list]) -> None:
        """From a checkpoint; {} (an older one) starts with empty windows."""
        self.loss_scale.restore(state.get("loss_scale", []))
        self.loss.restore(state.get("loss", []))
        self.norm.restore(state.get("norm", []))
        self.bad_share.restore(state.get("bad_share", []))
