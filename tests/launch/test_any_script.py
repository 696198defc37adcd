"""`mmldlm preflight -- SCRIPT` and `mmldlm launch -- SCRIPT`: scripts that know nothing of
mmldlm.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.support.helpers import ROOT

SCRIPT = """
import json, os, pathlib, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
attempt = len(list(folder.glob(f"{rank}_*.json")))
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
told = {"arguments": sys.argv[2:], **{name: os.environ[name] for name in names}}
(folder / f"{rank}_{attempt}.json").write_text(json.dumps(told))
print(f"rank {rank} says hello")
if "--die" in sys.argv and attempt < int(sys.argv[-1]):
    # Rank 0 must have left its file, by which it counts the attempts, before it is ended.
    while rank == 0 or not (folder / f"0_{attempt}.json").exists():
        time.sleep(0.1)
    sys.exit("a fault of its own")
"""


def mmldlm(folder, verb, *words):
    command = [sys.executable, "-m", "mmldlm.cli", verb, "--nproc", "2", *map(str, words)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=200
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.py").write_text(SCRIPT)
    (tmp_path / "told").mkdir()
    return tmp_path


def test_ranks_get_their_arguments_as_they_were_given(folder):
    given = ["--text", 'it\'s $HOME; `x` "é"', "--lr=1e-4", "key=value", "--", "-m"]
    words = ["--launcher", "torchrun", "--level", "1", "--", "run.py", "told", *given]
    done = mmldlm(folder, "launch", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads((folder / "told" / f"{rank}_0.json").read_text()) for rank in (0, 1)]
    assert [one["arguments"] for one in told] == [given, given]
    assert [one["RANK"] for one in told] == ["0", "1"] and told[0]["WORLD_SIZE"] == "2"
    assert "rank 0 says hello" in done.stdout and "rank 1 says hello" not in done.stdout
    (log,) = (folder / "mmldlm_logs").glob("launch_*/*_rank1.log")
    assert "rank 1 says hello" in log.read_text()
    assert "done; logs of all ranks: mmldlm_logs/launch_" in done.stderr


def test_the_rank_that_failed_first_is_named_and_the_launch_repeated(folder):
    words = ["--launcher", "torchrun", "--level", "0", "--retries", "1", "--log-dir", "logs"]
    done = mmldlm(folder, "launch", *words, "--", "run.py", "told", "--die", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("rank 1 on localhost ended first, with status 1") == 1
    assert "    a fault of its own" in done.stderr and "attempt 2 of 2 in 10 s" in done.stdout
    assert len(list((folder / "logs").iterdir())) == 2


@pytest.mark.parametrize(
    ("verb", "words", "found"),
    [
        ("launch", ["--config-name", "tiny", "--", "run.py"], "--config-name"),
        ("preflight", ["model.n_blocks=2", "--", "run.py"], "key=value"),
        ("launch", ["--"], "behind --"),
        ("preflight", ["--level", "4", "--", "run.py"], "--level 3"),
    ],
)
def test_what_belongs_to_a_run_of_mmldlm_is_refused(folder, verb, words, found):
    done = mmldlm(folder, verb, *words)
    assert done.returncode == 2 and found in done.stderr and done.stdout == ""


def test_preflight_finds_what_the_script_lacks(folder):
    (folder / "run.py").write_text("import nosuchpackage\n")
    words = ["--level", "1", "--only", "SCR001", "--", "run.py"]
    done = mmldlm(folder, "preflight", *words)
    assert done.returncode == 1 and "no package nosuchpackage" in done.stdout
    assert mmldlm(folder, "launch", *words).returncode == 1
    assert not (folder / "mmldlm_logs").exists()


def test_a_port_that_is_taken_is_named_before_a_rank_starts(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["--level", "0", "--master_port", port, "--launcher", "torchrun"]
        done = mmldlm(folder, "launch", *words, "--", "run.py", "told")
    assert done.returncode == 1 and f"port {port} is not available" in done.stderr
    assert f"(process {os.getpid()}: " in done.stderr and not list((folder / "told").iterdir())


@pytest.mark.parametrize("script", ["trainer.py", "accelerate_loop.py"])
def test_scripts_of_other_libraries_train(tmp_path, script):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    path = ROOT / "examples" / "any_script" / script
    words = ["--launcher", "torchrun", "--level", "0", "--", path, "--steps", 3]
    done = mmldlm(tmp_path, "launch", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("step 3: loss" if script == "accelerate_loop.py" else "train_loss") in done.stdout
