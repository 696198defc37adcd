"""Pretrained models that make latents: sentence encoders, and autoencoders of images."""
