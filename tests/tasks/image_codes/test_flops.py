"""FLOPs of a model of codes against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.models.token_scores import TokenQuery
from mmldlm.tasks.image_codes.config import ImageCodesModelConfig
from mmldlm.tasks.image_codes.model import CodesMMDiT
from mmldlm.tasks.image_codes.task import ImageCodesTask
from tests.support.forward import run_model


@pytest.mark.parametrize("tokens_per_latent", [1, 2])
def test_flops_of_codes_agree_with_torchs_counter(tokens_per_latent):
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
        wanted = TokenQuery(torch.zeros(21, dtype=torch.int64))
        scored = torch.zeros(13, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        run_model(model, tokens, ids, t, t, text_positions=scored, latent_query=wanted)
    task = ImageCodesTask()
    found = task.estimate_flops(config, [9] * 3, 13, scored_codes=21)
    assert counter.get_total_flops() == found.forward
    every_code = task.estimate_flops(config, [9] * 3, 13)
    assert every_code.latent_head == 48 / 21 * found.latent_head
