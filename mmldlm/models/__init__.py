"""The networks and their parts; torch only, knows nothing of diffusion or ranks.

What needs torch is imported on first use, because preflight and convert import torch-free modules
of this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmldlm.models.base import LatentInputs, TextInputs
    from mmldlm.models.mmdit import MultimodalMMDiT
    from mmldlm.models.token_scores import TokenQuery

__all__ = ["LatentInputs", "MultimodalMMDiT", "TextInputs", "TokenQuery"]

_MODULES = {
    "LatentInputs": "base",
    "MultimodalMMDiT": "mmdit",
    "TextInputs": "base",
    "TokenQuery": "token_scores",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"mmldlm.models.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
