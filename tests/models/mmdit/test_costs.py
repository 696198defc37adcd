"""FLOPs of many latents a sample against torch's own counter; tests/observe/test_flops.py has one
latent.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.models import MultimodalMMDiT
from mmldlm.models.mmdit.config import ModelConfig
from mmldlm.models.mmdit.costs import step_flops, training_flops


@pytest.mark.parametrize("num_latents,grid", [(16, [4, 4]), (64, None), (256, [16, 16])])
def test_flops_of_an_image_agree_with_torchs_counter(num_latents, grid):
    config = ModelConfig(
        hidden_size=64,
        n_blocks=2,
        n_heads=4,
        cond_dim=40,
        max_seq_len=16,
        latent_dim=48,
        tokens_per_latent=1,
        num_latents=num_latents,
        latent_grid=grid,
        vocab_size=120,
        mask_token_id=3,
        pad_token_id=0,
        eos_token_id=2,
    )
    with torch.device("meta"):
        model = MultimodalMMDiT(config)
        tokens, latents, t = (
            torch.zeros(3, 9, dtype=torch.int64),
            torch.zeros(3, num_latents, 48),
            torch.zeros(3),
        )
        scored = torch.zeros(13, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, latents, t, t, text_positions=scored)
    found = step_flops(config, [9] * 3, 13)
    assert counter.get_total_flops() == found.forward
    assert training_flops(config, 3, 27, 13) == pytest.approx(found.training)


@pytest.mark.parametrize("num_latents", [16, 36])
def test_flops_of_each_of_several_sizes_agree_with_torchs_counter(num_latents):
    config = ModelConfig(
        hidden_size=64,
        n_blocks=2,
        n_heads=4,
        cond_dim=40,
        max_seq_len=16,
        latent_dim=48,
        tokens_per_latent=1,
        num_latents=36,
        latent_grid=[6, 6],
        latent_grids=[[4, 4], [6, 6]],
        vocab_size=120,
        mask_token_id=3,
        pad_token_id=0,
        eos_token_id=2,
    )
    with torch.device("meta"):
        model = MultimodalMMDiT(config)
        tokens, latents, t = (
            torch.zeros(3, 9, dtype=torch.int64),
            torch.zeros(3, num_latents, 48),
            torch.zeros(3),
        )
        scored = torch.zeros(13, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, latents, t, t, text_positions=scored)
    found = step_flops(config, [9] * 3, 13, num_latents)
    assert counter.get_total_flops() == found.forward
    assert training_flops(config, 3, 27, 13, num_latents=num_latents) == pytest.approx(
        found.training
    )
