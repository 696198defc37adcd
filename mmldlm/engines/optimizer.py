"""AdamW with weight decay only where it belongs, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import nn

from mmldlm.config.schema import OptimizerConfig


def parameter_groups(model: nn.Module, weight_decay: float, no_decay: Collection[str] = ()) -> list[dict]:
    """Two AdamW groups of the trainable parameters: matrices with weight decay; norms, biases, embeddings without.

    Args:
        no_decay: names of further parameters without weight decay (ParameterPlan.no_decay).
    """
    no_decay_modules = (nn.Embedding, nn.LayerNorm, nn.RMSNorm)
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, no_decay_modules)
        for parameter in module.parameters(recurse=False)
    }
    with_decay, without_decay = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_exempt = parameter.dim() < 2 or id(parameter) in embeddings or name in no_decay
        (without_decay if is_exempt else with_decay).append(parameter)
    groups = [{"params": with_decay, "weight_decay": weight_decay}, {"params": without_decay, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig, no_decay: Collection[str] = ()) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; fused is 5 x faster than the default on CPU as well as on GPU."""
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay, no_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def learning_rate(applied_steps: int, num_train_steps: int, config: OptimizerConfig) -> float:
    """Rate of the next step after `applied_steps` steps that really moved the weights.

    Linear warm-up from lr / warmup_steps, then cosine or linear to min_lr, or constant; at and after the end it stays
    at the last value, never turning up again.
    """
    if applied_steps < config.warmup_steps:
        return config.lr * (applied_steps + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(num_train_steps - config.warmup_steps, 1)
    progress = min((applied_steps - config.warmup_steps) / span, 1.0)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr + (config.lr - config.min_lr) * share


def _clip_coefficient(max_norm: float | None, norm: float, loss_scale: float) -> float:
    clip = 1.0 if max_norm is None else min(max_norm / (norm + 1e-6), 1.0)
    return clip / loss_scale


def scale_gradients(parameters: list[torch.Tensor], max_norm: float | None, norm: float, loss_scale: float) -> None:
    """Take the loss scale out of gradients and clip them to max_norm (None: no clipping), in place, without a sync.

    The rule of torch.nn.utils.clip_grad_norm_: times max_norm / (norm + 1e-6), at most 1.

    Args:
        norm: their global norm, loss scale taken out.
    """
    factor = _clip_coefficient(max_norm, norm, loss_scale)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


def clipped_step(optimizer: torch.optim.AdamW, max_norm: float | None, norm: float, loss_scale: float) -> None:
    """`scale_gradients`, then AdamW's step; the fused kernel scales while it reads them, so no pass goes before it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(hasattr(parameter, "full_tensor") for parameter in parameters):  # of a shard the kernel takes no scale
        scale_gradients(parameters, max_norm, norm, loss_scale)
    elif (factor := _clip_coefficient(max_norm, norm, loss_scale)) != 1.0:
        # What torch.amp.GradScaler hands over in this way; filled, not copied, so that a GPU is not waited for.
        optimizer.grad_scale = torch.full((), 1 / factor, device=parameters[0].device)
    try:
        optimizer.step()
    finally:
        optimizer.grad_scale = None
