"""`mmldlm launch --elastic` on real hosts: one is lost, the others go on; it returns, and is taken
back at the next checkpoint. All along the losses are those of a run that nothing disturbed.
"""

from __future__ import annotations

import json

import pytest

from tests.support.helpers import LONG, ROOT, read_log, run_ranks, train_words
from tests.support.launch_faults import Screen, ranks_on, start, steps_of, wait_for

pytestmark = pytest.mark.long


@pytest.mark.parametrize("hosts", [2, pytest.param(3, marks=LONG)])
def test_a_lost_host_is_taken_back_at_the_next_checkpoint(cluster, store, tmp_path, hosts):
    """Of three hosts the last returns without the store at first, which keeps it out."""
    lost, accum = cluster[f"n{hosts}"], 6 // hosts
    words = ["training.num_train_steps=100000", "logging.eval_freq=100000"]
    # A low rate: the rounding of other sums over ranks would grow at a higher one.
    words += ["logging.save_freq=5", "optimizer.schedule=constant", "optimizer.lr=1e-5"]
    with cluster["n1"].process("sleep", "1000") as stranger:
        process = start(
            cluster, store, tmp_path, "--retries", "1", "--elastic", "--level", "1", *words,
            f"training.grad_accum_steps={accum}", hosts=hosts,
        )  # fmt: skip
        screen = Screen(process)
        run = tmp_path / "runs" / "run"
        wait_for(lambda: list(run.glob("checkpoints/step_*5/manifest.json")) != [], process)
        with cluster.cable_pulled(lost):
            without = f"continuing without n{hosts}: {hosts - 1} rank"
            wait_for(lambda: without in screen.text, process)
            assert f"n{hosts} is lost" in screen.text
            if hosts == 3:
                lost.sh("mount", "-t", "tmpfs", "none", store)
            at_loss = steps_of(tmp_path)
        if hosts == 3:
            wait_for(lambda: "n3 answers again, but DATA002 failed" in screen.text, process)
            assert ranks_on(lost) == []
            lost.sh("umount", store)
        wait_for(lambda: f"continuing with n{hosts}: {hosts} ranks" in screen.text, process)
        at_return = steps_of(tmp_path)
        wait_for(lambda: steps_of(tmp_path) >= at_return + 3, process)
        cluster["n1"].sh("pkill", "-INT", "-f", "python -m mmldlm.launch --hostfile")
        assert process.wait(120) == 5, screen.text[-3000:]
        assert stranger.poll() is None
    assert [ranks_on(cluster[f"n{number}"]) for number in range(1, hosts + 1)] == [[]] * hosts
    said = [path.read_text() for path in (run / "logs").glob("launch_*/launcher.log")]
    assert said and all("deepspeed.launcher.launch" in text for text in said)
    manifest = json.loads((run / "latest" / "manifest.json").read_text())
    assert manifest["world_size"] == hosts

    records = read_log(tmp_path / "runs", "run")
    last = len(records)
    assert [record["step"] for record in records] == list(range(1, last + 1))
    assert at_loss < at_return < last
    undisturbed = train_words(
        store, tmp_path, "undisturbed", "engine.kind=single", "training.train_batch_size=24",
        *words, f"training.num_train_steps={last}", "logging.save_freq=100000",
    )  # fmt: skip
    assert run_ranks(1, ROOT / "mmldlm" / "train.py", *undisturbed).returncode == 0
    expected = [record["loss"] for record in read_log(tmp_path, "undisturbed")]
    assert [record["loss"] for record in records] == pytest.approx(expected, rel=1e-5)
