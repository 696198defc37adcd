"""Another precision than training.dtype, wherever it comes from, is named before the first
step.
"""

from __future__ import annotations

import pytest
import torch

from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.engines.torch_engines import SingleEngine
from mmldlm.errors import UserError
from mmldlm.models import MultimodalMMDiT
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.stability.audit import check_precision, precision_problems
from mmldlm.tasks.registry import load_config


def engine_and_config(dtype: str):
    config = load_config("tiny", None, [f"training.dtype={dtype}", "engine.kind=single"])
    shape = dict(hidden_size=16, n_blocks=1, n_heads=2, cond_dim=16, latent_dim=6, vocab_size=30)
    ids = dict(mask_token_id=3, pad_token_id=0, eos_token_id=2)
    model = MultimodalMMDiT(ModelConfig(**shape, **ids))
    return SingleEngine(model, config, ParameterPlan()), config


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_agrees_has_no_faults(dtype):
    engine, config = engine_and_config(dtype)
    word = {"fp32": "no"}.get(dtype, dtype)
    assert precision_problems(engine, config, {}) == []
    assert precision_problems(engine, config, {"ACCELERATE_MIXED_PRECISION": word}) == []
    check_precision(engine, config)


def test_launcher_autocast_default_dtype_and_masters_are_named():
    engine, config = engine_and_config("fp32")
    assert precision_problems(engine, config, {"ACCELERATE_MIXED_PRECISION": "bf16"}) == [
        "the launcher sets ACCELERATE_MIXED_PRECISION=bf16"
    ]
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast to torch.bfloat16" in precision_problems(engine, config, {})[0]
        with pytest.raises(UserError, match="training.dtype=fp32 everywhere"):
            check_precision(engine, config)
    torch.set_default_dtype(torch.float64)
    try:
        assert "default dtype is torch.float64" in precision_problems(engine, config, {})[0]
    finally:
        torch.set_default_dtype(torch.float32)
    engine.model.bfloat16()
    assert any(
        "master weights in torch.bfloat16" in problem
        for problem in precision_problems(engine, config, {})
    )
