"""Ranks and devices of one machine."""

from __future__ import annotations

import pytest
import torch

from mmldlm.distributed.environment import local_world_size, pick_device
from mmldlm.errors import UserError


def test_every_rank_reports_too_few_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "8", "LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "3"}.items():
        monkeypatch.setenv(name, value)
    for local_rank in (0, 7):
        with pytest.raises(
            UserError, match="each of the 8 ranks.*\n.*1 visible GPU.*CUDA_VISIBLE_DEVICES=3"
        ):
            pick_device(local_rank)
    monkeypatch.delenv("RANK")  # a shell inside an allocation, not a rank
    assert local_world_size(0) == 1
