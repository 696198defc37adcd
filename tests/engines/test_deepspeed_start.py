"""What the import of DeepSpeed leaves out."""

from __future__ import annotations

import pytest

from tests.support.helpers import run_ranks

ASKED_ABOUT_MUON = """
import sys
from mmldlm.engines.deepspeed import import_deepspeed
import_deepspeed()
from deepspeed.runtime.zero.muon import muon_optimizer, original_muon
assert muon_optimizer.MuonWithAuxAdam and original_muon.muon_update
assert "torch._inductor.compile_fx" not in sys.modules
"""


def test_deepspeeds_muon_does_not_load_torchs_compiler(tmp_path):
    """DeepSpeed imports its Muon under every optimizer; ours is another."""
    script = tmp_path / "asked.py"
    script.write_text(ASKED_ABOUT_MUON)
    done = run_ranks(1, script)
    assert done.returncode == 0, done.stdout[-2000:]


OLD_MOMENTS = """
import sys
import numpy as np
import torch
from mmldlm.config.schema import Config
from mmldlm.engines.build import build_engine
from mmldlm.engines.parameter_plan import ParameterPlan

class Zeros:
    def read(self, name, key, start, count):
        return np.zeros(count, np.float32)
    def moments_of(self, name):
        return ("exp_avg", "exp_avg_sq")

model = torch.nn.Linear(8, 8)
engine = {"kind": "deepspeed", "zero_stage": int(sys.argv[1])}
built = build_engine(model, Config(engine=engine, training={"dtype": "bf16"}), ParameterPlan())

def step():
    built.backward(built.module(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
    built.step(1e-3, float(built.grad_norm()))

def storages(tensors):
    return {t.untyped_storage().data_ptr() for t in tensors if t.dim()}

step()
built.load(Zeros(), 5)
built.sync_weights_from_masters()
step()
live = storages(t for state in built.optimizer_state().values() for t in state.values())
linked = storages(t for p in model.parameters() for t in p._hp_mapping.optim_fragment.values())
assert linked and linked <= live, (linked, live)
"""


@pytest.mark.parametrize("stage", ["1", "2"])
def test_a_rollback_leaves_no_old_moments_behind(tmp_path, stage):
    """DeepSpeed's views of them would keep them in memory."""
    script = tmp_path / "moments.py"
    script.write_text(OLD_MOMENTS)
    done = run_ranks(1, script, stage)
    assert done.returncode == 0, done.stdout[-2000:]
