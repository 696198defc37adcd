"""What a step of DeepSpeed's optimizers does, decided by mmldlm.

DeepSpeed's `step()` asks its optimizer whether gradients overflowed, and for the norm by which it
clips. Both are answered here, in private functions of DeepSpeed 0.19.8:

| optimizer | asked for the overflow | asked for the norm |
|---|---|---|
| DeepSpeedZeroOptimizer (ZeRO-1, 2) | check_overflow | scaled_global_norm |
| DeepSpeedZeroOptimizer_Stage3 | _overflow_check_and_loss_scale_update | _get_norm_groups |
| BF16_Optimizer | get_grads_for_norm: an infinite norm | get_grads_for_norm |

DeepSpeed takes BF16_Optimizer for ZeRO-1 in bf16 with fp32 accumulation, not offloaded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class StepControl:
    """Decides what the next `step()` of a ZeRO optimizer does.

    Args:
        optimizer: DeepSpeed's optimizer, whose functions are replaced.
        stage: ZeRO stage, 1 to 3.
    """

    def __init__(self, optimizer: Any, stage: int):
        self.optimizer = optimizer
        self._skips, self._norm = False, torch.zeros(())
        if stage == 3:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            norm_groups = optimizer._get_norm_groups
            self._optimizer_norm = lambda: combine_grad_norm_groups(norm_groups())
            optimizer._get_norm_groups = lambda: [self._norm]
            optimizer._overflow_check_and_loss_scale_update = self._has_overflow_stage3
        elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # ZeRO-1 and 2
            self._optimizer_norm = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = lambda *args, **kwargs: self._norm
            optimizer.check_grad_overflow = True
            optimizer.check_overflow = self._has_overflow
        else:  # BF16_Optimizer
            self._grads_for_norm = optimizer.get_grads_for_norm
            self._optimizer_norm = self._norm_bf16
            optimizer.get_grads_for_norm = self._grads_for_norm_bf16

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the reduced gradients, 0-d, not finite if any element is not.

        Collective.
        """
        norm = torch.as_tensor(self._optimizer_norm())
        # Some of DeepSpeed's functions return -1 for a norm that is not finite.
        return torch.where(norm < 0, torch.inf, norm)

    def apply(self, norm: float) -> None:
        """Let the next step clip by this norm, that of the scaled gradients, and update."""
        self._skips, self._norm = False, torch.tensor(norm)

    def skip(self) -> None:
        """Let the next step discard the gradients."""
        self._skips, self._norm = True, torch.tensor(math.inf)

    def _has_overflow(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer.overflow = self._skips

    def _has_overflow_stage3(self, update_scale: bool = True) -> bool:
        self.optimizer.overflow = self._skips
        return (
            self.optimizer._loss_scale_update_and_overflow_cleanup()
            if update_scale
            else self._skips
        )

    def _norm_bf16(self) -> Tensor:
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        grads, _ = self._grads_for_norm()
        return get_global_norm_of_tensors(input_tensors=grads, mpu=self.optimizer.mpu)

    def _grads_for_norm_bf16(self, for_clipping: bool = False) -> Any:
        if for_clipping:
            return self._grads_for_norm(for_clipping=True)
        return [self._norm], {}
