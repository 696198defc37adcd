"""Noise processes of text and latents, and how timesteps are drawn; torch only."""

from mmldlm.diffusion.decoupled import DecoupledProcess
from mmldlm.diffusion.gaussian import GaussianProcess
from mmldlm.diffusion.masked import MaskedDiffusion

__all__ = ["DecoupledProcess", "GaussianProcess", "MaskedDiffusion"]
