"""Time limits and traces of the process group, in the environment."""

from __future__ import annotations

import os

from mmldlm.distributed.environment import FLIGHT_RECORDER_FILE, prepare_environment


def test_environment_is_bounded_by_the_timeout(monkeypatch, tmp_path):
    for name in [name for name in os.environ if "NCCL" in name or "TORCH_FR" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert prepare_environment(90.0, tmp_path / "logs") == []
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "90"
    assert (
        os.environ[FLIGHT_RECORDER_FILE[0]] == str(tmp_path / "logs" / "flight_rank_")
        and (tmp_path / "logs").is_dir()
    )


def test_what_the_user_set_stays_and_what_outlasts_the_timeout_is_named(monkeypatch):
    given = {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "12000000",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
    }
    monkeypatch.setattr(os, "environ", dict(given))
    notes = prepare_environment(600.0)
    assert given.items() <= os.environ.items()
    assert (
        "TORCH_FR_BUFFER_SIZE" not in os.environ
        and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    )
    assert [note.split("=")[0] for note in notes] == [
        name for name in given if "TRACE" not in name
    ]
