"""The lock of a run folder when a second job with several ranks asks for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from mmldlm.utils.run_files import LOCK
from tests.support.helpers import ROOT, environment, read_log, run_ranks, train_words

RANK = """
import sys
from mmldlm.training import run_folder
from mmldlm.distributed.error_reporting import exit_without_teardown
from mmldlm.train import main
run_folder.EXIT_GRACE = 0.5
code = main(sys.argv[1:])
print("ended with", code, flush=True)
exit_without_teardown(code)
"""


EACH_ITS_OWN_FOLDER = """
import os, sys
from pathlib import Path
folder = Path(f"node{os.environ['RANK']}")
folder.mkdir()
os.chdir(folder)
from mmldlm.training import run_folder
from mmldlm.distributed.error_reporting import exit_without_teardown
from mmldlm.train import main
run_folder.VISIBLE_SECONDS = 0.5
code = main(sys.argv[1:])
print("ended with", code, flush=True)
exit_without_teardown(code)
"""


def test_nodes_that_share_no_folder_are_refused_before_the_first_step(store, tmp_path):
    (tmp_path / "rank.py").write_text(EACH_ITS_OWN_FOLDER.replace('"node', f'"{tmp_path}/node'))
    words = train_words(store, "runs", "run", "training.num_train_steps=2")
    done = run_ranks(2, tmp_path / "rank.py", *words, "engine.kind=ddp", timeout=120)
    assert done.stdout.count("ended with 2") == 2, done.stdout[-3000:]
    assert "rank 1 on " in done.stdout and "node1/runs/run here is another one" in done.stdout
    assert "a folder that all nodes share" in done.stdout
    assert not (tmp_path / "node0" / "runs" / "run" / "training_log.jsonl").exists()


def test_a_second_job_is_refused_and_a_killed_one_resumed(store, tmp_path, monkeypatch, capsys):
    from mmldlm.train import main

    words = train_words(
        store, tmp_path, "run", "training.num_train_steps=100000", "logging.save_freq=100000"
    )
    script = [sys.executable, str(ROOT / "mmldlm" / "train.py")]
    first = subprocess.Popen(
        [*script, *words, "engine.kind=single"], env=environment(), stdout=subprocess.DEVNULL
    )
    log = tmp_path / "run" / "training_log.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not (log.exists() and log.read_text().count("\n") > 2):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        (tmp_path / "rank.py").write_text(RANK)
        second = run_ranks(2, tmp_path / "rank.py", *words, "engine.kind=ddp", timeout=120)
        assert second.stdout.count("ended with 2") == 2, second.stdout[-3000:]
        assert (
            f"process {first.pid} on " in second.stdout and "training.resume=auto" in second.stdout
        )
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (tmp_path / "run" / LOCK).exists()
    more = ["engine.kind=single", "training.num_train_steps=2", "training.resume=auto"]
    assert main([*words, *more]) == 0
    assert "that process has exited" in capsys.readouterr().err
    assert [record["step"] for record in read_log(tmp_path, "run")] == [1, 2]
    assert not (tmp_path / "run" / LOCK).exists()
