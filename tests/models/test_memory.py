"""The memory of activations against what autograd keeps."""

from __future__ import annotations

import pytest
import torch

from mmldlm.models.memory import plain_activation_bytes
from mmldlm.models.plain import PlainTransformer
from mmldlm.models.plain_config import PlainConfig
from tests.support.forward import run_model
from tests.support.plain_models import SHAPES, batch_of, configured


def kept_for_backward(config: PlainConfig, batch: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of the storages that autograd keeps, without weights."""
    with torch.device("meta"):
        model = PlainTransformer(config).to(dtype)
    scored = batch * length if config.causal else batch * length // 2
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept, alive = {}, []  # alive: no address is used twice

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor.detach()  # itself, an output would keep its graph alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run_model(model, **batch_of(config, batch, length, "meta", scored, dtype))
    del out
    return sum(kept.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_activations(name, dtype):
    for keys in ({}, {"hidden_size": 192, "n_blocks": 4}, {"hidden_size": 192, "dropout": 0.1}):
        config = configured(name, **keys)
        kept = kept_for_backward(
            config, 4, 40, torch.float32 if dtype == "fp32" else torch.bfloat16
        )
        assert plain_activation_bytes(
            config, 4, 40, dtype, 1.0 if config.causal else 0.5
        ) == pytest.approx(kept, rel=0.065)
