"""The MMDiT and its parts; torch only, knows nothing of diffusion or ranks."""

from mmldlm.models.mmdit.model import MultimodalMMDiT

__all__ = ["MultimodalMMDiT"]
