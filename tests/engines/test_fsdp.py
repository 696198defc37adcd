"""FSDP's checkpoints: what torch raises when one cannot be written."""

from __future__ import annotations

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mmldlm.engines.fsdp import FsdpEngine


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
