"""A rank that is killed on another host while it commits: the previous checkpoint counts, and the
retry is exact.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.helpers import LONG, ROOT, read_log, run_ranks, train_words

# Python runs it at the start of every process: the rank ends by SIGKILL at the moment that is
# named, once.
KILLER = """
import os, signal

MOMENT, MARK = {moment!r}, {mark!r}

def die_once():
    try:
        os.close(os.open(MARK, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

fsync, rename = os.fsync, os.rename

def killed_when_sealed(fd):
    path = os.readlink("/proc/self/fd/" + str(fd))
    fsync(fd)
    if path.endswith("step_00000010/.files_rank1.json"):
        die_once()

def killed_when_renamed(source, target, **more):
    is_it = str(target).endswith("/step_00000010")
    if is_it and MOMENT == "before the rename":
        die_once()
    rename(source, target, **more)
    if is_it and MOMENT == "after the rename":
        die_once()

if MOMENT == "sealed":
    os.fsync = killed_when_sealed
else:
    os.rename = killed_when_renamed
"""
# moment -> the step from which the second attempt continues
MOMENTS = {"sealed": 5, "before the rename": 5, "after the rename": 10}


@pytest.fixture(scope="module")
def undisturbed(store, tmp_path_factory):
    """Return the losses of a run of two ranks without a kill."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run_ranks(2, ROOT / "mmldlm" / "train.py", *words(store, folder))
    assert done.returncode == 0, done.stdout[-3000:]
    return [(record["step"], record["loss"]) for record in read_log(folder, "run")]


def words(store, folder) -> list[str]:
    more = [
        "training.num_train_steps=15",
        "logging.save_freq=5",
        "logging.eval_freq=1000",
        "logging.plot=false",
    ]
    return train_words(store, folder, "run", "training.train_batch_size=4", *more)


@LONG
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_killed_while_it_commits(cluster, store, tmp_path, undisturbed, moment):
    (tmp_path / "killer").mkdir()
    (tmp_path / "killer" / "sitecustomize.py").write_text(
        KILLER.format(moment=moment, mark=str(tmp_path / "killed"))
    )
    (tmp_path / "hostfile").write_text("n1 slots=1\nn2 slots=1\n")
    environment = {
        "PYTHONPATH": f"{tmp_path / 'killer'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "mmldlm.launch",
        "--hostfile",
        tmp_path / "hostfile",
        "--retries",
        "1",
    ]
    process = cluster["n1"].popen(
        *command,
        "--level",
        "0",
        *words(store, tmp_path),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0 and (tmp_path / "killed").exists(), output[-4000:]
    resumed = [
        event for event in read_log(tmp_path, "run", "events.jsonl") if event["event"] == "resume"
    ]
    assert [event["step"] for event in resumed] == [MOMENTS[moment]], output[-4000:]
    assert [
        (record["step"], record["loss"]) for record in read_log(tmp_path, "run")
    ] == undisturbed
