"""Noise processes of text and latents, and the distribution of timesteps."""

from mmldlm.diffusion.decoupled import DecoupledProcess
from mmldlm.diffusion.gaussian import GaussianProcess
from mmldlm.diffusion.masked import MaskedDiffusion

__all__ = ["DecoupledProcess", "GaussianProcess", "MaskedDiffusion"]
