"""From the last states of a transformer to one vector per text: poolings and dense layers of
sentence-transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch

from mmldlm.data.encoders.specs import Step


def pool(
    hidden: torch.Tensor, mask: torch.Tensor, pooling: str, num_prompt_tokens: int = 0
) -> torch.Tensor:
    """Pool the last states of each text to one vector.

    Args:
        hidden: [B, S, H] float32.
        mask: [B, S], 1 at real positions, with padding on the right.
        pooling: Pooling as in EncoderSpec; several joined with + are concatenated.
        num_prompt_tokens: Number of first positions that are left out.

    Returns:
        [B, H], or [B, H * number of poolings]. A text of prompt tokens alone gives no finite,
        non-zero vector.
    """
    if num_prompt_tokens:
        mask = mask.clone()
        mask[:, :num_prompt_tokens] = 0
    return torch.cat([_pool(hidden, mask, kind) for kind in pooling.split("+")], dim=-1)


def _pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    rows = torch.arange(len(hidden), device=hidden.device)
    if pooling == "cls":
        return hidden[rows, mask.argmax(1)]
    if pooling == "last":
        positions = torch.arange(mask.shape[1], device=mask.device)
        last = (mask * positions).argmax(1)
        return hidden[rows, last] * mask[rows, last].unsqueeze(-1)
    if pooling == "max":
        return hidden.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(1)
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    if pooling == "weightedmean":
        # Weights are positions in the text, the prompt included.
        weight = weight * torch.arange(
            1, mask.shape[1] + 1, device=hidden.device, dtype=hidden.dtype
        ).view(1, -1, 1)
    total = (hidden * weight).sum(1)
    total_weight = weight.sum(1).clamp(min=1e-9)
    return total / (total_weight.sqrt() if pooling == "mean_sqrt_len" else total_weight)


class Dense:
    """A dense layer of sentence-transformers, in float32.

    Attributes:
        in_width, width: Components before and after.
    """

    def __init__(self, folder: Path, step: Step, device: str):
        if (folder / "model.safetensors").is_file():
            from safetensors.torch import load_file

            weights = load_file(folder / "model.safetensors")
        else:
            weights = torch.load(
                folder / "pytorch_model.bin", map_location="cpu", weights_only=True
            )
        weights = {name: tensor.to(device, torch.float32) for name, tensor in weights.items()}
        self.weight, self.bias = weights["linear.weight"], weights.get("linear.bias")
        self.width, self.in_width = self.weight.shape
        self._has_residual = step.has_residual
        # A residual of another width has its own projection.
        self._residual = (
            weights["residual.weight"]
            if step.has_residual and self.width != self.in_width
            else None
        )
        self._activation = getattr(torch.nn, step.activation)()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._activation(torch.nn.functional.linear(x, self.weight, self.bias))
        if self._has_residual:
            out = out + (
                x if self._residual is None else torch.nn.functional.linear(x, self._residual)
            )
        return out
