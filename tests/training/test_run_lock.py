"""One job a run folder: a second one is refused on all ranks, and a job that is gone stands in
nobody's way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from mmldlm.errors import UserError
from mmldlm.training import run_folder
from mmldlm.training.run_folder import RunLock
from mmldlm.utils.run_files import LOCK
from tests.support.helpers import environment, train_words


def child(code: str = "import time; time.sleep(600)") -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment()
    )


def hold(folder) -> subprocess.Popen:
    """Another process of this host that holds the lock."""
    code = (
        f"from mmldlm.training.run_folder import *; RunLock(Path({str(folder)!r})).acquire(print)"
    )
    code += "; print('held', flush=True)"
    process = child(f"{code}; time.sleep(600)")
    assert process.stdout.readline() == "held\n"
    return process


def acquire(folder, **more) -> tuple[RunLock, list[str]]:
    lock, told = RunLock(folder), []
    lock.acquire(told.append, **more)
    return lock, told


def rewrite(folder, age: float = 0.0, **changed) -> None:
    """Make the lock one of another place, or another age."""
    path = folder / LOCK
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    os.utime(path, (time.time() - age, time.time() - age))


OTHER = {"place": ["elsewhere"], "host": "elsewhere", "pid": 7}


def test_on_one_host_the_process_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "EXIT_GRACE", 0.5)
    holder = hold(tmp_path)
    rewrite(tmp_path, age=10_000)  # nothing was logged for long, but it lives
    with pytest.raises(UserError, match=f"process {holder.pid} on .*trains in it"):
        acquire(tmp_path)
    holder.kill()  # and is not waited for: a zombie is gone, too
    time.sleep(0.2)
    lock, told = acquire(tmp_path)
    assert told[-1].endswith("that process has exited")
    holder.wait()
    again, told = acquire(tmp_path)  # a process that trains twice
    assert told == []
    lock.release()
    assert (tmp_path / LOCK).exists(), "it is the second time's"
    again.release()
    assert list(tmp_path.iterdir()) == []


def test_a_reused_process_number_is_another_process(tmp_path):
    with child() as other:
        acquire(tmp_path)
        rewrite(tmp_path, pid=other.pid)
        assert acquire(tmp_path)[1][0].endswith("that process has exited")
        other.kill()


@pytest.mark.parametrize("age", [-86_400, 0, 100_000])  # of the lock by this host's clock
def test_from_another_host_what_this_job_watches_decides_whatever_the_clocks_say(
    tmp_path, monkeypatch, age
):
    monkeypatch.setattr(run_folder, "STALE_AFTER", 0.6)
    # On a busy machine the usual pause could be longer than that.
    monkeypatch.setattr(run_folder, "_POLL", 0.05)
    acquire(tmp_path)
    rewrite(tmp_path, age=age, **OTHER)
    with pytest.raises(UserError, match="half of engine.collective_timeout"):  # less patience
        acquire(tmp_path, timeout=0.1)

    def renew() -> None:
        renewed = (tmp_path / LOCK).stat().st_mtime + 1
        os.utime(tmp_path / LOCK, (renewed, renewed))

    with pytest.raises(UserError, match="renewed while this job watched it"):
        acquire(tmp_path, heartbeat=renew)
    told = acquire(tmp_path)[1]
    assert (
        "process 7 on elsewhere" in told[0]
        and "waiting" in told[0]
        and "not renewed for 1 s" in told[1]
    )


def test_a_torn_lock_is_refused(tmp_path):
    # Torn: nobody knows whose.
    (tmp_path / LOCK).write_text("{")
    with pytest.raises(UserError, match="an unknown job"):
        acquire(tmp_path, timeout=0.1)


def test_a_lock_that_cannot_be_read_is_named_and_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / LOCK
    path.mkdir()
    with pytest.raises(UserError, match=r"\.lock.*\n.*Is a directory"):
        acquire(tmp_path)
    path.rmdir()
    path.symlink_to("nowhere")
    with pytest.raises(UserError, match="a link to nowhere"):
        acquire(tmp_path)
    path.unlink()
    path.symlink_to(LOCK)
    with pytest.raises(UserError, match="symbolic links"):
        acquire(tmp_path)
    path.unlink()
    path.write_text("{}")

    def refuse(found, *args):  # of another user with mode 600; the tests may run as root
        raise PermissionError(13, "Permission denied", str(found))

    with monkeypatch.context() as patch, pytest.raises(UserError, match="Permission denied"):
        patch.setattr(run_folder, "read_bytes", refuse)
        acquire(tmp_path)
    for partial in ('{"host": "x"}', '{"host": "x", "pid": "7"}', "[]", '"x"', "[" * 100_000):
        path.write_text(partial)
        with pytest.raises(UserError, match="an unknown job"):
            acquire(tmp_path, timeout=0.1)


def test_a_requeued_slurm_job_takes_its_own_lock_over_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    acquire(tmp_path)
    rewrite(tmp_path, **OTHER)
    with pytest.raises(UserError, match="Slurm job 12"):  # another step of the same job
        acquire(tmp_path, timeout=0.1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "restarted the job" in acquire(tmp_path)[1][0]


def test_it_is_renewed_while_the_process_is_busy_until_another_job_takes_it(tmp_path, monkeypatch):
    """In a step that takes longer than a dead holder is waited for, nothing else would."""
    monkeypatch.setattr(run_folder, "RENEW_INTERVAL", 0.05)
    lock, _ = acquire(tmp_path)
    path = tmp_path / LOCK
    os.utime(path, (0, 0))
    wait_until(lambda: path.stat().st_mtime > 0)
    assert not lock.is_lost
    rewrite(tmp_path, **OTHER)
    wait_until(lambda: lock.is_lost)
    os.utime(path, (0, 0))
    lock.release()
    assert path.stat().st_mtime == 0


def test_a_released_lock_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "RENEW_INTERVAL", 0.001)
    for _ in range(50):
        lock, _ = acquire(tmp_path)
        lock.release()
        assert not (tmp_path / LOCK).exists() and not lock.is_lost


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_job_that_waited_does_not_overwrite_the_other(store, tmp_path, monkeypatch, capsys):
    from mmldlm.train import main

    run = tmp_path / "run"

    def end_meanwhile(self, *args, **more):
        (run / "checkpoints" / "step_00000010").mkdir(parents=True)

    monkeypatch.setattr(RunLock, "acquire", end_meanwhile)
    assert main(train_words(store, tmp_path, "run", "engine.kind=single")) == 2
    said = capsys.readouterr().err
    assert "already holds checkpoints" in said and "training.resume=auto" in said
    assert "logging.run_name=run-2" in said


def test_a_lock_is_seen_by_what_it_says_and_not_while_it_is_torn(tmp_path):
    lock, other = RunLock(tmp_path), RunLock(tmp_path)
    lock.acquire(print)
    started = lock.started

    def complete() -> None:
        (tmp_path / LOCK).write_text(whole)

    whole = (tmp_path / LOCK).read_text()
    assert other.started is None and other.is_seen(started, complete, 0)
    (tmp_path / LOCK).write_text(whole[:20])
    assert not other.is_seen(started, lambda: None, 0) and other.is_seen(started, complete, 20)
    assert not other.is_seen("another time", lambda: None, 0)
    (tmp_path / LOCK).unlink()
    assert not other.is_seen(started, lambda: None, 0)
