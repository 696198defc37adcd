"""Weights that do not fit the table in the manifest are refused; the shapes are those of a model
that was built.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mmldlm.checkpoints.commit import begin
from mmldlm.checkpoints.convert import convert
from mmldlm.checkpoints.manifest import tensor_table
from mmldlm.errors import UserError

torch = pytest.importorskip("torch", reason="torch is not installed")
SIZES = {
    "hidden_size": 32,
    "n_blocks": 2,
    "n_heads": 2,
    "cond_dim": 16,
    "latent_dim": 10,
    "tokens_per_latent": 4,
    "vocab_size": 50,
    "mask_token_id": 1,
    "pad_token_id": 2,
    "eos_token_id": 3,
    "max_seq_len": 20,
    "mlp_ratio": 2.5,
    "num_latents": 3,
    "latent_predictions": 2,
}


def built(**more):
    from mmldlm.models import MultimodalMMDiT
    from mmldlm.models.mmdit_config import ModelConfig

    config = ModelConfig(**{**SIZES, **more})
    return config.model_dump(), MultimodalMMDiT(config).state_dict()


def run_of(run_dir, state: dict, config: dict, **manifest):
    pending = begin(run_dir, 1)
    (pending.path / "engine").mkdir()
    torch.save(state, pending.path / "engine" / "model.pt")
    (pending.path / "model_config.json").write_text(
        json.dumps({"architecture": "MultimodalMMDiT", **config})
    )
    pending.commit(engine="single", **manifest)
    return run_dir


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "n_blocks"])
def test_the_table_decides_where_there_is_one(tmp_path, name):
    """Then weights are compared tensor by tensor, and no name in the config is known."""
    config, state = built()
    config = {**config, "architecture": "SomebodysModel"}
    _, other = built(**{name: 2 * config[name]})
    table = tensor_table({key: value.shape for key, value in other.items()})
    with pytest.raises(UserError, match=r"as .*manifest.json says"):
        convert(run_of(tmp_path / "other", state, config, tensors=table), tmp_path / "out")
    table = tensor_table({key: value.shape for key, value in state.items()})
    more = {**table, "one_more.weight": "2x3"}
    with pytest.raises(UserError, match="one_more.weight: 2x3"):
        convert(run_of(tmp_path / "more", state, config, tensors=more), tmp_path / "out")
    first = next(iter(table))
    fewer = {key: shape for key, shape in table.items() if key != first}
    with pytest.raises(UserError, match=f"{first}: no such weight"):
        convert(run_of(tmp_path / "fewer", state, config, tensors=fewer), tmp_path / "out")
    convert(run_of(tmp_path / "right", state, config, tensors=table), tmp_path / "out")


def test_a_header_of_brackets_is_refused(tmp_path):
    header = b"[" * 5_000_000
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="intact checkpoint file"):
        convert(tmp_path, tmp_path / "out")


def test_the_shapes_need_no_torch():
    """The import of torch would take longer than most conversions."""
    code = (
        "import sys, mmldlm.commands.convert\n"
        "from mmldlm.tasks.registry import find_config_class\n"
        "find_config_class('translation')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
