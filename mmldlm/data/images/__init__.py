"""Images as latents: corpora, the codec between pixels and latents, and contact sheets.

Without torch.
"""
