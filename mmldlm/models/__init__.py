"""The MMDiT and its parts; torch only, knows nothing of diffusion or ranks.

MultimodalMMDiT is imported on first use, because preflight and convert import torch-free modules
of this package.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmldlm.models.mmdit import MultimodalMMDiT

__all__ = ["MultimodalMMDiT"]


def __getattr__(name: str) -> Any:
    if name == "MultimodalMMDiT":
        from mmldlm.models.mmdit import MultimodalMMDiT

        return MultimodalMMDiT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
