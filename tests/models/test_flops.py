"""The FLOP formula against torch's own counter, for every network."""

from __future__ import annotations

import pytest
import torch
from _reference_steps import Ours, Shape
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.models import MultimodalMMDiT
from mmldlm.models.flops import estimate_flops
from mmldlm.models.mmdit import MMDiTBlock
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.models.plain import PlainTransformer
from tests.support.forward import run_model
from tests.support.plain_models import SHAPES, batch_of, configured

SHAPE = Shape("small", depth=2, width=128, length=48, batch=4, vocab=1500, latent=96)


def counter() -> FlopCounterMode:
    """torch's, which does not know grouped products yet: rows @ [groups, K, N], or [O, rows] @
    [rows, I] by groups.
    """

    def grouped(a, b, *_, **__):
        return 2 * a[0] * a[1] * b[-1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped})


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("fill", [1.0, 0.4])
@pytest.mark.parametrize("more", [{}, {"tokens_per_latent": 3, "cond_dim": 40, "mlp_ratio": 2.0}])
def test_model_agrees_with_torchs_counter(fill, more, fused, monkeypatch):
    """Forward, and forward with backward; where padding is left out the counter must not see it
    either.
    """
    if fused:  # the counter hooks all modules, and hooked layers are really called
        monkeypatch.setattr(MMDiTBlock, "runs_fused", lambda self: True)
    variant = Ours(Shape(**{**vars(SHAPE), "fill": fill}), torch.float32, **more)
    lengths = variant.batch.attention_mask.sum(1).tolist()
    found = estimate_flops(variant.model.config, lengths, len(variant.batch.text_positions))
    with sdpa_kernel(SDPBackend.MATH), counter() as forward, torch.no_grad():
        variant.loss()
    assert forward.get_total_flops() == found.forward
    with sdpa_kernel(SDPBackend.MATH), counter() as both:
        variant.forward_backward()
    assert both.get_total_flops() == found.training


def model(**more) -> ModelConfig:
    return ModelConfig(
        latent_dim=32,
        vocab_size=30522,
        hidden_size=1024,
        n_blocks=24,
        n_heads=16,
        cond_dim=1024,
        tokens_per_latent=1,
        max_seq_len=4096,
        **more,
    )


def test_of_the_large_model_a_text_token_meets_one_stream_only():
    """503 MFLOP body + 62.5 MFLOP head forward a token (facts of the 892M model with full-width
    attention added).
    """
    one, more = (estimate_flops(model(), [512], scored, num_logits=0) for scored in (511, 512))
    assert more.text - one.text == 2 * 1024 * (1024 + 2 * 4096)  # what only scored rows compute
    with_head = estimate_flops(model(), [512], 512)
    assert (with_head.text - more.text) / 512 == pytest.approx(62.5e6, rel=1e-3)
    assert with_head.training / 512 < 6 * 892e6 / 2.4, (
        "6 N a token would count parameters that no token meets"
    )


def test_texts_of_uneven_lengths_count_as_their_mean():
    found = estimate_flops(model(), [100] * 8, 300).training
    uneven = estimate_flops(model(), [60, 140] * 4, 300).training
    assert found == pytest.approx(uneven, rel=0.01)


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
        run_model(model, tokens, latents, t, t, text_positions=scored)
    found = estimate_flops(config, [9] * 3, 13)
    assert counter.get_total_flops() == found.forward


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
        run_model(model, tokens, latents, t, t, text_positions=scored)
    found = estimate_flops(config, [9] * 3, 13, num_latents=num_latents)
    assert counter.get_total_flops() == found.forward


@pytest.mark.parametrize("name", SHAPES)
def test_a_plain_transformer_agrees_with_torchs_counter(name):
    config = configured(name)
    model, scored = PlainTransformer(config), 33
    model.requires_grad_(False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run_model(model, **batch_of(config, 3, 20, "cpu", scored))
    found = estimate_flops(config, [20] * 3, scored)
    assert counter.get_total_flops() == found.forward
