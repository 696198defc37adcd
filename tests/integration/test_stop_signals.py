"""Stop signals wherever a run may be: real signals to real ranks."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support.helpers import ROOT, environment, read_log, run_ranks, train_words

WORKER = ROOT / "tests" / "support" / "signal_worker.py"


@pytest.fixture(scope="module")
def ended(store, tmp_path_factory):
    """The folder of all runs of signal_worker.py, and how each ended on either rank."""
    folder = tmp_path_factory.mktemp("signals")
    done = run_ranks(2, WORKER, str(store), str(folder), timeout=400)
    assert done.returncode == 0, done.stdout[-5000:]
    both = [json.loads((folder / f"codes_rank{rank}.json").read_text()) for rank in (0, 1)]
    assert both[0] == both[1], done.stdout[-5000:]
    return folder, both[0], done.stdout


@pytest.mark.parametrize(("name", "steps"), [("middle", 4), ("last", 6)])
def test_an_evaluation_is_left_at_the_next_batch_on_all_ranks(ended, name, steps):
    folder, codes, _ = ended
    assert codes[name] == 5 and codes[f"batches after the signal: {name}"] == 0
    assert not codes[f"has drawn a plot: {name}"], "which takes long after many steps"
    evaluated = [record["step"] for record in read_log(folder, name, "eval_log.jsonl")]
    assert evaluated == [2, 4, 6], "the one that was left is made after the resume, and none twice"
    ends = [event for event in read_log(folder, name, "events.jsonl") if event["event"] == "end"]
    assert [(event["step"], event["exit_code"]) for event in ends] == [(steps, 5), (6, 0)]
    assert "stopped by a signal" in ends[0]["reason"]
    assert ("without the last evaluation" in ends[0]["reason"]) == (name == "last")
    state = json.loads((folder / name / "latest" / "training_state.json").read_text())
    assert state["step"] == 6 and not state["evaluation_left"], "else each resume evaluates again"
    assert list((folder / name / "checkpoints").glob(".partial*")) == []


@pytest.mark.parametrize("name", ["middle", "last", "save", "search", "rollback"])
def test_resumed_it_has_the_figures_of_an_undisturbed_run(ended, name):
    folder, _, _ = ended
    expected, found = read_log(folder, "straight"), read_log(folder, name)
    keys = ("step", "loss", "grad_norm", "lr", "samples")
    if name == "search":  # begun with another last step, hence another learning rate
        keys = ("step", "samples")
    assert [[record[key] for key in keys] for record in found] == [
        [r[key] for key in keys] for r in expected
    ]
    if name != "search":
        figures = [read_log(folder, each, "eval_log.jsonl") for each in ("straight", name)]
        for record in (*figures[0], *figures[1]):
            record.pop("time")
        assert figures[0] == figures[1]


def test_a_save_is_waited_for_and_no_step_follows(ended):
    folder, codes, _ = ended
    assert codes["save"] == 5 and codes["save1"] == 0
    events = read_log(folder, "save", "events.jsonl")
    first = events[: [event["event"] for event in events].index("end") + 1]
    assert [event["step"] for event in first if event["event"] == "save"] == [3]
    assert first[-1]["step"] == 3 and first[-1]["exit_code"] == 5


def test_the_search_for_a_checkpoint_is_left_without_a_change(ended):
    folder, codes, output = ended
    assert codes["search"] == 0 and codes["search1"] == 5 and codes["search2"] == 0
    assert "stopped by a signal while checking a checkpoint" in output
    assert [e["event"] for e in read_log(folder, "search", "events.jsonl")].count("resume") == 1


def test_a_rollback_comes_to_its_end_and_the_run_stops_there(ended):
    folder, codes, _ = ended
    assert codes["rollback"] == 5 and codes["rollback1"] == 0
    events = read_log(folder, "rollback", "events.jsonl")
    kinds = [event["event"] for event in events]
    assert kinds.index("rollback") < kinds.index("end") and events[kinds.index("end")]["step"] == 3


def test_a_signal_while_waiting_for_an_absent_rank(store, tmp_path):
    """Rank 0 stands inside torch's rendezvous, where no Python handler runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    words = train_words(store, tmp_path, "run", "engine.kind=ddp")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "mmldlm" / "train.py"), *words],
        env=environment(**ranks),
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 5, error
    assert b"before the run began" in error and b"Traceback" not in error
    assert not list(tmp_path.glob("run/[!l]*"))
