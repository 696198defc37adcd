"""The optimizer with weight decay on matrices only, gradient clipping, and the learning-rate
schedule.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from mmldlm.config.schema import OptimizerConfig
from mmldlm.engines.muon import MuonAdamW
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some

# Default where optimizer.muon_momentum is not set.
MUON_MOMENTUM = 0.95


def parameter_groups(model: nn.Module, plan: ParameterPlan, config: OptimizerConfig) -> list[dict]:
    """Groups of the trainable parameters: Muon's matrices, AdamW's with weight decay, AdamW's
    without.

    Without weight decay are norms, biases, embeddings, and ParameterPlan.no_decay. Empty groups
    are left out.

    Raises:
        UserError: optimizer.kind=muon without a trainable matrix in the plan, or a name in it that
            the model lacks.
    """
    no_decay_modules = (nn.Embedding, nn.LayerNorm, nn.RMSNorm)
    undecayed = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, no_decay_modules)
        for parameter in module.parameters(recurse=False)
    }
    if unknown := sorted(set(plan.matrices) - {name for name, _ in model.named_parameters()}):
        raise UserError(
            "names of parameters in the task's ParameterPlan.matrices",
            f"{join_some(unknown)}, which the model does not have",
            "correct the task's parameter_plan (docs/tasks.md)",
        )
    matrices: list[nn.Parameter] = []
    with_decay: list[nn.Parameter] = []
    without_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_exempt = parameter.dim() < 2 or id(parameter) in undecayed or name in plan.no_decay
        if config.kind == "muon" and name in plan.matrices:
            _check_block_rows(
                name, parameter.shape[0] // plan.matrices[name], config.muon_block_rows
            )
            matrices.append(parameter)
        else:
            (without_decay if is_exempt else with_decay).append(parameter)
    if config.kind == "muon" and not matrices:
        raise UserError(
            "trainable matrices for Muon (ParameterPlan.matrices of the task)",
            "none",
            "set optimizer.kind=adamw, freeze less of the model, or let the task name its matrices"
            " (docs/tasks.md)",
        )
    muon = {"muon": True, "lr_factor": config.muon_rate() / config.lr}
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, **(muon if matrices else {})},
        {"params": with_decay, "weight_decay": config.weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check_block_rows(name: str, rows: int, block_rows: int | None) -> None:
    if block_rows is not None and rows > block_rows and rows % block_rows:
        raise UserError(
            f"optimizer.muon_block_rows that divides the {rows} rows of a matrix of {name}",
            str(block_rows),
            "choose a divisor, such as the width of an attention head, or leave it unset",
        )


def build_optimizer(
    model: nn.Module, plan: ParameterPlan, config: OptimizerConfig
) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters (5 x faster than the default, on CPU and GPU), or
    MuonAdamW.
    """
    groups = parameter_groups(model, plan, config)
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "fused": True,
    }
    if config.kind == "muon":
        momentum = MUON_MOMENTUM if config.muon_momentum is None else config.muon_momentum
        return MuonAdamW(groups, momentum, config.muon_block_rows, **settings)
    return torch.optim.AdamW(groups, **settings)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the schedule's learning rate; each group's own is a multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


def learning_rate(applied_steps: int, num_train_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of the next step after `applied_steps` steps that were not skipped.

    Linear warm-up from lr / warmup_steps, then cosine or linear decay to min_lr, or constant. At
    and after the end it stays at the last value.
    """
    if applied_steps < config.warmup_steps:
        return config.lr * (applied_steps + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(num_train_steps - config.warmup_steps, 1)
    progress = min((applied_steps - config.warmup_steps) / span, 1.0)
    fraction = (
        0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    )
    return config.min_lr + (config.lr - config.min_lr) * fraction


def _clip_coefficient(max_norm: float | None, norm: float, loss_scale: float) -> float:
    clip = 1.0 if max_norm is None else min(max_norm / (norm + 1e-6), 1.0)
    return clip / loss_scale


def scale_gradients(
    parameters: list[torch.Tensor], max_norm: float | None, norm: float, loss_scale: float
) -> None:
    """Unscale gradients and clip them to max_norm (None: no clipping), in place, without a host
    sync.

    The rule of torch.nn.utils.clip_grad_norm_: times max_norm / (norm + 1e-6), at most 1.

    Args:
        norm: Unscaled global norm of the gradients.
    """
    factor = _clip_coefficient(max_norm, norm, loss_scale)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


def clipped_step(
    optimizer: torch.optim.AdamW, max_norm: float | None, norm: float, loss_scale: float
) -> None:
    """Unscale, clip and step; the fused kernel scales gradients while it reads them, without an
    extra pass.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Neither Muon nor the kernel for a shard takes a scale.
    if isinstance(optimizer, MuonAdamW) or any(
        hasattr(parameter, "full_tensor") for parameter in parameters
    ):
        scale_gradients(parameters, max_norm, norm, loss_scale)
    elif (factor := _clip_coefficient(max_norm, norm, loss_scale)) != 1.0:
        # The attribute that torch.amp.GradScaler sets; filled, not copied, to avoid a host sync.
        scale = torch.full((), 1 / factor, device=parameters[0].device)
        optimizer.grad_scale = scale  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        optimizer.grad_scale = None  # type: ignore[attr-defined]
