"""What the import of DeepSpeed leaves out."""

from __future__ import annotations

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
