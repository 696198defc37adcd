"""Samplers: from a model and a process to texts and latents.

Nothing is imported here, so that `sampling.settings` is read without torch.
"""
