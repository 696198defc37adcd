"""Saving and loading on two ranks of which one fails or is slow."""

from __future__ import annotations

from tests.support.helpers import ROOT, read_log, run_ranks


def events(folder, kind: str) -> list[dict]:
    return [event for event in read_log(folder, "run", "events.jsonl") if event["event"] == kind]


def test_one_failure_loses_one_checkpoint_a_slow_disk_none(store, tmp_path):
    """Two FSDP ranks: those that are well must not wait in collectives for one that failed, or for
    one that writes or checks for longer than engine.collective_timeout."""
    done = run_ranks(
        2, ROOT / "tests" / "support" / "checkpoint_worker.py", str(tmp_path), str(store)
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (failed,) = events(tmp_path, "save_failed")
    assert (
        failed["step"] == 2
        and "rank 0 on" in failed["reason"]
        and "out of pinned memory" in failed["reason"]
    )
    assert [event["step"] for event in events(tmp_path, "save")] == [4, 6, 7]
    assert [event["source"][-1] for event in events(tmp_path, "resume")] == ["6"]
    # One validation sample for two ranks: one of them has nothing to evaluate.
    for record in read_log(tmp_path, "run", "eval_log.jsonl"):
        assert record["l2t_nelbo"] > 0 and not any(
            name.endswith("_nonfinite") for name in record
        ), record
