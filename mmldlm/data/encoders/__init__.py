"""Sentence encoders that make latents."""
