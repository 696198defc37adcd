"""The FLOP model against torch's own counter, and MFU that is never invented."""

from __future__ import annotations

import pytest
import torch
from _reference_steps import Ours, Shape
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.models.mmdit.block import MMDiTBlock
from mmldlm.models.mmdit.config import ModelConfig
from mmldlm.models.mmdit.costs import step_flops, training_flops
from mmldlm.observe.throughput import peak_flops

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
    tensors = variant.batch.tensors
    lengths = tensors["attention_mask"].sum(1).tolist()
    found = step_flops(variant.model.config, lengths, len(tensors["text_positions"]))
    with sdpa_kernel(SDPBackend.MATH), counter() as forward, torch.no_grad():
        variant.loss()
    assert forward.get_total_flops() == found.forward
    with sdpa_kernel(SDPBackend.MATH), counter() as both:
        variant.forward_backward()
    assert both.get_total_flops() == pytest.approx(found.without_input_gradients, rel=0.01)


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
    flops = step_flops(model(), [512], 512)
    assert flops.text_blocks / 512 == 24 * 24 * 1024**2
    assert flops.text_head / 512 == pytest.approx(62.5e6, rel=1e-3)
    assert flops.training / 512 < 6 * 892e6 / 2.4, (
        "6 N a token would count parameters that no token meets"
    )


def test_the_runs_counts_give_the_same_figure():
    lengths, scored = [100] * 8, 300
    flops = training_flops(model(), num_samples=8, num_tokens=800.0, num_scored=300.0)
    assert flops == pytest.approx(step_flops(model(), lengths, scored).training, rel=1e-9)
    uneven = step_flops(model(), [60, 140] * 4, scored).training
    assert flops == pytest.approx(uneven, rel=0.01)
    assert training_flops(model(), 0, 0.0, 0.0) == 0.0


def test_peaks_are_known_or_not_given():
    assert peak_flops("NVIDIA H200", "bf16") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert (
        peak_flops("NVIDIA H200 NVL", "fp16") == peak_flops("NVIDIA H200 NVL", "bf16") == 835.5e12
    )
    assert peak_flops(None, "bf16") is None and peak_flops("Some GPU 1", "bf16") is None
    assert peak_flops(None, "bf16", 2.5) == 2.5e12
