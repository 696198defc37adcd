"""Make DeepSpeed (ZeRO 1-3) apply or skip a step as our guard decides.

DeepSpeed 0.19.8 decides inside step(), in a way that depends on version, stage and settings (older
releases stepped on NaN). Its three optimizers compute there whether there is an overflow, and the
gradient norm. Both are overridden with what all ranks agreed on, which also saves their host
syncs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OverflowOverride:
    """Overrides the overflow check of DeepSpeedZeroOptimizer, BF16_Optimizer or
    DeepSpeedZeroOptimizer_Stage3.
    """

    def __init__(self, optimizer: Any, stage: int):
        self.optimizer = optimizer
        self.skip, self.norm = False, torch.zeros(())
        if stage == 3:
            self._norm_groups = optimizer._get_norm_groups
            optimizer._get_norm_groups = lambda: [self.norm]
            optimizer._overflow_check_and_loss_scale_update = self._has_overflow_stage3
        elif hasattr(optimizer, "single_partition_of_fp32_groups"):
            self._scaled_norm = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = lambda *args, **kwargs: self.norm
            optimizer.check_grad_overflow = True
            optimizer.check_overflow = self._has_overflow
        else:
            self._grads_for_norm = optimizer.get_grads_for_norm
            optimizer.get_grads_for_norm = self._grads_for_norm_bf16

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the reduced gradients, 0-d, not finite if any element is not.

        Collective.
        """
        if hasattr(self, "_norm_groups"):
            from deepspeed.runtime.utils import combine_grad_norm_groups

            return torch.as_tensor(combine_grad_norm_groups(self._norm_groups()))
        if hasattr(self, "_scaled_norm"):
            return torch.as_tensor(self._scaled_norm())
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        grads, _ = self._grads_for_norm()
        norm = torch.as_tensor(
            get_global_norm_of_tensors(input_tensors=grads, mpu=self.optimizer.mpu)
        )
        # DeepSpeed returns -1 for a norm that is not finite; combine_grad_norm_groups above turns
        # that into inf.
        return torch.where(norm < 0, torch.inf, norm)

    def set_skip(self, skip: bool, norm: float) -> None:
        """Decide what the next step() of the optimizer does."""
        self.skip, self.norm = skip, torch.tensor(norm)

    def _has_overflow(self, *args, **kwargs) -> None:
        self.optimizer.overflow = self.skip

    def _has_overflow_stage3(self, update_scale: bool = True) -> bool:
        self.optimizer.overflow = self.skip
        return (
            self.optimizer._loss_scale_update_and_overflow_cleanup() if update_scale else self.skip
        )

    def _grads_for_norm_bf16(self, for_clipping: bool = False):
        if for_clipping:
            return self._grads_for_norm(for_clipping=True)
        return [torch.tensor(float("inf")) if self.skip else self.norm], {}
