"""Masked diffusion of text, continuous diffusion of latents, and how timesteps are drawn; torch only."""

from mmldlm.diffusion.gaussian import GaussianProcess
from mmldlm.diffusion.masked import MaskedDiffusion

__all__ = ["GaussianProcess", "MaskedDiffusion"]
