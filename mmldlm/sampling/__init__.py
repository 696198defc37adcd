"""Sampling: text from latents, latents from text, or both unconditionally."""

from mmldlm.sampling.latent_sampler import sample_latents
from mmldlm.sampling.pretrained import Pretrained, load_pretrained
from mmldlm.sampling.text.loop import TextSamples, sample_text

__all__ = ["Pretrained", "TextSamples", "load_pretrained", "sample_latents", "sample_text"]
