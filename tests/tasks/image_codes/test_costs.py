"""The costs of a model of codes, held against the model itself."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.tasks.image_codes.config import ImageCodesModelConfig
from mmldlm.tasks.image_codes.costs import (
    expected_shapes,
    parameter_counts,
    step_flops,
    training_flops,
)
from mmldlm.tasks.image_codes.model import CodesMMDiT, CodeTargets


@pytest.mark.parametrize("tokens_per_latent", [1, 2])
def test_flops_and_parameters_of_codes_agree_with_the_model(tokens_per_latent):
    config = ImageCodesModelConfig(
        hidden_size=64,
        n_blocks=2,
        n_heads=4,
        cond_dim=40,
        max_seq_len=16,
        latent_dim=1,
        vocab_size=120,
        tokens_per_latent=tokens_per_latent,
        num_latents=16,
        latent_grid=[4, 4],
        num_codes=77,
        mask_token_id=3,
        pad_token_id=0,
        eos_token_id=2,
    )
    with torch.device("meta"):
        model = CodesMMDiT(config)
        tokens, ids, t = (
            torch.zeros(3, 9, dtype=torch.int64),
            torch.zeros(3, 16, 1, dtype=torch.int64),
            torch.zeros(3),
        )
        wanted = CodeTargets(torch.zeros(21, dtype=torch.int64))
        scored = torch.zeros(13, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, ids, t, t, text_positions=scored, latent_query=wanted)
    found = step_flops(config, [9] * 3, 13, scored_codes=21)
    assert counter.get_total_flops() == found.forward
    assert training_flops(config, 3, 27, 13, scored_codes=21) == pytest.approx(found.training)
    assert step_flops(config, [9] * 3, 13).latent_head == 48 / 21 * found.latent_head
    counts = parameter_counts(config)
    for name, module in model.named_children():
        assert counts.get(name, 0) == sum(p.numel() for p in module.parameters()), name
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert expected_shapes(config.model_dump()).items() <= shapes.items()
