"""A Slurm job that requeues itself. srun and scontrol are stand-ins: srun ends with the code that
a test names, scontrol says what it was asked for.
"""

from __future__ import annotations

import json

import pytest

from mmldlm.checkpoints.manifest import FORMAT, VERSION
from mmldlm.distributed.environment import slurm_port
from tests.launchers.test_refusals import SLURM, script, venv

__all__ = ["venv"]


@pytest.fixture
def slurm(venv, store, tmp_path):
    def run(*more, **environment):
        words = (f"data.latent_data_root={store}", "logging.run_name=r")
        words += (f"logging.save_dir={tmp_path}", *more)
        return script(venv, "slurm.sh", *words, CONFIG_NAME="tiny", **SLURM, **environment)

    for name, line in {
        "srun": 'for word; do last=$word; done; echo "last word $last"; exit "$SRUN_CODE"',
        "scontrol": 'if [ "$1" = show ]; then echo n1; else echo "asked scontrol to $*"; fi',
    }.items():
        (venv / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (venv / "bin" / name).chmod(0o755)
    return run


def test_an_interrupted_job_requeues_itself_and_continues(slurm, tmp_path):
    first = slurm(SRUN_CODE="5", REQUEUES="2")
    assert first.returncode == 5 and "asked scontrol to requeue 1" in first.stdout, first.stderr
    assert "restart 1 of at most 2" in first.stdout and "training.resume" not in first.stdout
    # What the interrupted ranks saved, which a new run would refuse.
    saved = tmp_path / "r" / "checkpoints" / "step_00000007"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    last = slurm(SRUN_CODE="5", REQUEUES="2", SLURM_RESTART_COUNT="2")
    assert last.returncode == 5 and "requeue" not in last.stdout
    assert "last word training.resume=auto" in last.stdout


def test_a_restart_before_the_first_save_starts_from_the_same_checkpoint(slurm, tmp_path):
    """training.resume=auto would find nothing, and train from scratch."""
    manifest = json.dumps({"format": FORMAT, "version": VERSION, "files": {}})
    other = tmp_path / "other" / "checkpoints" / "step_00000007"
    other.mkdir(parents=True)
    (other / "manifest.json").write_text(manifest)
    resume = f"training.resume={other}"
    restarted = slurm(resume, SRUN_CODE="1", SLURM_RESTART_COUNT="1")
    assert f"last word {resume}\n" in restarted.stdout, restarted.stderr
    saved = tmp_path / "r" / "checkpoints" / "step_00000008"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text(manifest)
    restarted = slurm(resume, SRUN_CODE="1", SLURM_RESTART_COUNT="1")
    assert "last word training.resume=auto\n" in restarted.stdout, restarted.stderr


def test_other_ends_and_jobs_without_the_wish_are_not_requeued(slurm):
    for code, wish in (("1", "9"), ("5", "0")):
        done = slurm(SRUN_CODE=code, REQUEUES=wish)
        assert done.returncode == int(code) and "requeue" not in done.stdout, done.stderr
    assert slurm(SRUN_CODE="5", REQUEUES="often").returncode == 2


def test_jobs_that_share_nodes_have_ports_of_their_own(slurm, venv, monkeypatch):
    (venv / "bin" / "srun").write_text('#!/bin/bash\necho "port $MASTER_PORT"\n')
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    of_another = slurm_port()
    monkeypatch.setenv("SLURM_JOB_ID", SLURM["SLURM_JOB_ID"])
    done = slurm()
    assert done.stdout.split()[-2:] == ["port", str(slurm_port())], done.stderr
    assert slurm_port() != of_another
    assert slurm(MASTER_PORT="29777").stdout.split()[-1] == "29777"


def test_a_job_of_thousands_of_nodes_finds_its_first(slurm, venv):
    """Of which scontrol is still writing names when the first has been read."""
    lines = 'if [ "$1" = show ]; then seq -f "node%05g" 20000; fi'
    (venv / "bin" / "scontrol").write_text(f"#!/bin/bash\n{lines}\n")
    (venv / "bin" / "srun").write_text('#!/bin/bash\necho "master $MASTER_ADDR"\n')
    done = slurm()
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["master", "node00001"]), done.stderr
