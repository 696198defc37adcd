"""What a run writes down and reads back is checked where it is read; a run that trained nothing
does not end with 0.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import zlib
from pathlib import Path

import pytest

from tests.trials.harness import SLOW, mmldlm, records, refuses, succeeds, tiny_run, train_rank


@pytest.fixture
def run(trial_run, tmp_path) -> Path:
    """A copy of a finished run of six steps, with checkpoints at 3 and 6."""
    shutil.copytree(trial_run, tmp_path / "r0", symlinks=True)
    return tmp_path / "r0"


def change_state(checkpoint: Path, **values: object) -> None:
    """Change training_state.json, and the manifest with it: the file is as the manifest says."""
    path = checkpoint / "training_state.json"
    state = json.loads(path.read_text(encoding="utf-8")) | values
    content = {key: value for key, value in state.items() if value is not ...}
    path.write_text(json.dumps(content), encoding="utf-8")
    list_anew(path)


def list_anew(path: Path) -> None:
    """Let the manifest of a checkpoint say of a small file what it is now."""
    manifest, crc = path.with_name("manifest.json"), zlib.crc32(path.read_bytes())
    listed = json.loads(manifest.read_text(encoding="utf-8"))
    listed["files"][path.name] = {"bytes": path.stat().st_size, "crc32": crc, "tail_crc32": crc}
    manifest.write_text(json.dumps(listed), encoding="utf-8")


WRONG_STATES: dict[str, dict] = {
    "guard is a list": {"guard": [1]},
    "guard of words": {"guard": {"loss": ["x"]}},
    "guard that is not finite": {"guard": {"norm": [float("nan")]}},
    "loss scale of one": {"guard": {"loss_scale": [1.0]}},
    "passed_over of one": {"passed_over": [[1]]},
    "passed_over reversed": {"passed_over": [[5, 2]]},
    "step -5": {"step": -5},
    "step of another checkpoint": {"step": 5},
    "step true": {"step": True},
    "step as text": {"step": "6"},
    "more applied than steps": {"applied_steps": 10**6},
    "lr_scale is a word": {"lr_scale": "x"},
    "lr_scale 0": {"lr_scale": 0},
    "lr_scale of infinity": {"lr_scale": float("inf")},
    "rolled_back_to": {"rolled_back_to": -7},
    "evaluation_left": {"evaluation_left": "no"},
    "huge": {"consumed_samples": 10**40},
    "no step": {"step": ...},
    "plan": {"plan": 5},
}


def few(kinds, *shown):
    """Parameters of which the named ones run by default, and all with --trials.

    In-process tests have all of them.
    """
    return [pytest.param(kind, marks=() if kind in shown else SLOW) for kind in kinds]


@pytest.mark.parametrize("kind", few(WRONG_STATES, "guard is a list"))
def test_resume_auto_takes_the_checkpoint_before_one_with_wrong_values(kind, run, trial_store):
    """trials-3 BAD 26."""
    change_state(run / "checkpoints" / "step_00000006", **WRONG_STATES[kind])
    key = next(iter(WRONG_STATES[kind]))
    resumed = train_rank(*tiny_run(trial_store, run.parent, "r0", "training.resume=auto"))
    succeeds(resumed, f"step_00000006 is damaged and was skipped: .*{key}", "step 6/6")
    assert [
        event["step"] for event in records(run / "events.jsonl") if event["event"] == "resume"
    ] == [3]


@SLOW
@pytest.mark.parametrize("kind", WRONG_STATES)
def test_a_checkpoint_with_wrong_values_is_refused_by_name(kind, run, trial_store, tmp_path):
    """trials-3 BAD 26."""
    checkpoint = run / "checkpoints" / "step_00000006"
    change_state(checkpoint, **WRONG_STATES[kind])
    words = tiny_run(
        trial_store, tmp_path, "new", f"training.resume={checkpoint}", "training.num_train_steps=8"
    )
    refuses(train_rank(*words), "training_state.json", next(iter(WRONG_STATES[kind])))


@SLOW
def test_a_run_goes_on_as_it_would_have(run, trial_store):
    """A state without faults is read: trials-3 BAD 26 must refuse nothing that is right."""
    words = tiny_run(
        trial_store, run.parent, "r0", "training.resume=auto", "training.num_train_steps=8"
    )
    resumed = train_rank(*words)
    succeeds(resumed, "step 8/8", "num_train_steps: 6 -> 8", "the learning rate rises from")


FOREIGN = {
    "pickle of another program": "os.getcwd",
    "no dict": [1],
    "no tensor": {"torch": 5, "cuda": None},
    "other size": {"torch": "zeros", "cuda": None},
}


@SLOW
@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_random_states_are_refused_without_torchs_advice(kind, run, trial_store):
    """trials-3 POOR 5, and records that are read back (BAD 26)."""
    import pickle

    import torch

    value = FOREIGN[kind]
    path = run / "checkpoints" / "step_00000006" / "rng_state_rank0.pt"
    if kind == "pickle of another program":
        path.write_bytes(pickle.dumps(os.getcwd))
    else:
        torch.save(
            (
                {"torch": torch.zeros(3, dtype=torch.uint8), "cuda": None}
                if kind == "other size"
                else value
            ),
            path,
        )
    list_anew(path)
    words = tiny_run(
        trial_store, run.parent, "r0", "training.resume=auto", "training.num_train_steps=8"
    )
    result = train_rank(*words)
    refuses(result, r"rng_state_rank0\.pt")
    assert "weights_only" not in result


# -- the lock -------------------------------------------------------------------------------------


def lock(**values: object) -> str:
    place = [socket.gethostname()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        place.append(read())
    holder = {
        "host": "a",
        "pid": 1,
        "started": "",
        "restarts": 0,
        "place": place,
        "born": None,
        "job": None,
    }
    return json.dumps(holder | values)


WRONG_LOCKS = {
    "pid 10^30": lock(pid=10**30),
    "pid true": lock(pid=True),
    "pid -1": lock(pid=-1),
    "born a number": lock(born=5),
    "restarts": lock(restarts="x"),
    "job a list": lock(job=[1]),
    "not JSON": "{",
    "a list": "[1]",
    "nothing": "",
    "deep": "[" * 100_000,
    "NUL": "\0" * 100,
}


@pytest.mark.parametrize("kind", few(WRONG_LOCKS, "pid 10^30"))
def test_a_lock_with_wrong_values_is_of_an_unknown_job(kind, trial_store, tmp_path):
    """trials-3 BAD 26.

    It is watched, as it may be torn: for half of the collective timeout here, else for minutes.
    """
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").write_text(WRONG_LOCKS[kind], encoding="utf-8")
    words = tiny_run(
        trial_store, tmp_path, "r", "training.num_train_steps=1", "engine.collective_timeout=2"
    )
    refuses(train_rank(*words), "an unknown job trains in it")


# -- replay ---------------------------------------------------------------------------------------

WRONG_RECORDS = {
    "cut": '{"step": 3',
    "a list": "[1]",
    "step alone": '{"step": 3}',
    "nothing": "",
    "deep": "[" * 100_000,
    "not UTF-8": "\udcff",
    "NUL": "\0\0",
}


@pytest.mark.parametrize("kind", few(WRONG_RECORDS, "step alone"))
def test_a_damaged_record_of_a_skip_is_refused_by_name(kind, run):
    """trials-3 BAD 13."""
    (run / "forensics").mkdir()
    path = run / "forensics" / "step_00000003.json"
    path.write_text(WRONG_RECORDS[kind], encoding="utf-8", errors="surrogateescape")
    (run / "forensics" / "step_abc.json").write_text("{}", encoding="utf-8")  # of something else
    refuses(mmldlm("replay", run, "3"), r"step_00000003\.json")
    refuses(mmldlm("replay", run, "last"), r"step_00000003\.json")


# -- a run that trained nothing -------------------------------------------------------------------

OVERFLOWS = ("training.dtype=fp16", "stability.loss_scale=1e18", "optimizer.warmup_steps=1")


def test_a_run_in_which_no_step_was_applied_ends_with_4(trial_store, tmp_path):
    """trials-3 BAD 17."""
    result = train_rank(*tiny_run(trial_store, tmp_path, "skipped", *OVERFLOWS))
    refuses(result, "none was applied", code=4)
    assert all(
        record["skipped"] for record in records(tmp_path / "skipped" / "training_log.jsonl")
    )
    assert records(tmp_path / "skipped" / "events.jsonl")[-1]["exit_code"] == 4


@SLOW
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_all_ranks_of_a_run_that_trained_nothing_end_alike(engine, trial_store, tmp_path):
    """trials-3 BAD 17: collective."""
    words = tiny_run(trial_store, tmp_path, "skipped", *OVERFLOWS, f"engine.kind={engine}")
    words.remove("engine.kind=single")
    result = mmldlm("train", "--nproc", "2", *words, timeout=240)
    refuses(result, "none was applied", code=4)


@SLOW
def test_a_resume_in_which_every_step_is_skipped_ends_with_4(run, trial_store):
    """trials-3 BAD 17: the weights are older than the run says."""
    words = tiny_run(
        trial_store,
        run.parent,
        "r0",
        "training.resume=auto",
        "training.num_train_steps=10",
        *OVERFLOWS,
    )
    refuses(train_rank(*words), "none was applied", code=4)


# -- other records --------------------------------------------------------------------------------


@SLOW
@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[",
        "[" * 100_000,
        '{"format": "FORMAT"}',
        (
            '{"format": "FORMAT", "config_sha256": 1, "world_size": "x", "installed": [], "time":'
            ' "t", "exit_code": 0}'
        ),
    ],
    ids=["{}", "cut", "deep", "format", "types"],
)
def test_a_damaged_receipt_does_not_end_a_run(content, trial_store, tmp_path):
    """trials-3 BAD 26: all records that are read back."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "preflight.json").write_text(
        content.replace("FORMAT", "mmldlm-preflight"), encoding="utf-8"
    )
    succeeds(train_rank(*tiny_run(trial_store, tmp_path, "r", "training.num_train_steps=1")))


LINES = (
    '{"event": "save"}',
    '{"event": "end", "exit_code": "x"}',
    '{"event": 5}',
    "[]",
    '{"step": "x"}',
    "\0",
    '{"event": "passed_over", "step": 1e400}',
    '{"event": "save_failed", "step": null}',
)


@pytest.mark.parametrize("file", few(["events.jsonl", "training_log.jsonl"], "events.jsonl"))
def test_damaged_lines_do_not_end_the_monitor(file, run):
    """trials-3 BAD 26: events and the log."""
    with open(run / file, "a", encoding="utf-8") as opened:
        opened.writelines(f"{line}\n" for line in LINES)
    watched = mmldlm("monitor", "--once", run)
    assert watched.code in (0, 1) and not watched.traceback, watched.output
