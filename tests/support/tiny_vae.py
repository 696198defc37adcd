"""An autoencoder of images with random weights, saved as diffusers saves one: 4 x 4 pixels a
latent, D = 8.
"""

from __future__ import annotations

from pathlib import Path


def save_tiny_vae(folder: Path, seed: int = 0, **config) -> Path:
    """Save an AutoencoderKL of 15,000 weights; return its folder."""
    import torch
    from diffusers import AutoencoderKL

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoencoderKL(
            **{
                "block_out_channels": (8, 8),
                "down_block_types": ("DownEncoderBlock2D",) * 2,
                "up_block_types": ("UpDecoderBlock2D",) * 2,
                "latent_channels": 2,
                "norm_num_groups": 4,
                **config,
            }
        )
    model.save_pretrained(folder)
    return folder
