"""What FSDP2 keeps in memory, and what torch raises when a checkpoint cannot be written."""

from __future__ import annotations

import json

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mmldlm.engines.build import check_engine
from mmldlm.engines.fsdp import FsdpEngine
from mmldlm.errors import UserError
from mmldlm.tasks.registry import load_config
from tests.support.helpers import ROOT, run_ranks


def test_a_full_disk_is_an_ordinary_error_that_names_rank_and_cause(tmp_path, monkeypatch):
    """CheckpointException is a BaseException: past every `except Exception`, it would end
    the job.
    """

    def full(*args, **kwargs):
        raise CheckpointException("write", {1: (OSError(28, "No space left on device"), None)})

    monkeypatch.setattr(dcp, "save", full)
    engine = FsdpEngine.__new__(FsdpEngine)
    engine.rank, engine._writers = 0, None
    with pytest.raises(RuntimeError, match=r"rank 1: OSError: \[Errno 28\] No space left"):
        engine.write({"names": {}, "tensors": {}}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_whole_stays_on_a_rank(store, tmp_path):
    """Neither the parameters of before, nor, with engine.shard_gradients, gradients that
    accumulate; the losses are the same. After an evaluation frozen weights are known as shards.
    """
    script = ROOT / "tests" / "support" / "fsdp_worker.py"
    done = run_ranks(2, script, str(store), str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    runs = json.loads((tmp_path / "runs.json").read_text())
    before, after = runs.pop("frozen")
    assert before and before == after
    assert [run["kept"] for run in runs.values()] == [0, 0]
    assert runs["whole"]["unsharded"] > 0 and runs["sharded"]["unsharded"] == 0
    assert runs["sharded"]["losses"] == pytest.approx(runs["whole"]["losses"], rel=1e-6)


def test_other_engines_refuse_its_key():
    config = load_config("tiny", None, ["engine.shard_gradients=true"])
    with pytest.raises(UserError, match=r"engine\.shard_gradients only with engine\.kind=fsdp"):
        check_engine(config, 2)
