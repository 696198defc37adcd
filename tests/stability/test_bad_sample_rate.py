"""Lost data ends a run instead of passing for a loss of 0; one bad sample does not
(test_recovery.py).
"""

from __future__ import annotations

import json

import pytest

from mmldlm.config.schema import StabilityConfig
from mmldlm.stability import Guard
from mmldlm.stability.guard import BAD_SAMPLE_WINDOW, MIN_BATCHES, BadSampleRate
from tests.support.helpers import read_log, run_ranks, train_words


def test_a_share_is_judged_over_the_window_and_not_before_enough_of_it_is_known():
    share = BadSampleRate(0.5)
    for _ in range(MIN_BATCHES - 1):
        share.update(8, 8)
        assert share.check() is None
    share.update(8, 8)
    assert "160 of the 160 samples of the last 20 global batches" in share.check()
    for _ in range(BAD_SAMPLE_WINDOW):
        share.update(4, 8)
    assert share.check() is None, (
        "half is not more than half, and what left the window no longer counts"
    )
    share.update(5, 8)
    assert "401 of the 800 samples of the last 100 global batches" in share.check()
    assert "(50%, above stability.max_bad_sample_fraction=0.5)" in share.check()


def test_the_window_goes_through_a_checkpoint():
    guard, other = Guard(StabilityConfig()), Guard(StabilityConfig())
    for _ in range(MIN_BATCHES - 1):
        guard.bad_samples.update(8, 8)
    other.restore(json.loads(json.dumps(guard.state())))
    other.bad_samples.update(8, 8)
    assert other.bad_samples.check() is not None
    other.restore({})
    assert other.bad_samples.check() is None and not other.bad_samples.batches


@pytest.mark.parametrize(
    ("words", "steps", "said"),
    [
        ([], 20, "120 of the 160 samples of the last 20 global batches were bad (75%"),
        (
            ["stability.max_consecutive_skips=3", "stability.max_rollbacks=0"],
            8,
            "no usable sample in the step",
        ),
    ],
)
def test_zeros_for_latents_are_no_loss_of_zero(
    store, tmp_path, monkeypatch, capsys, words, steps, said
):
    from mmldlm.data.store import Store
    from mmldlm.train import main

    get, count = Store.get, [0]

    def lost(self, indices):
        rows = get(self, indices)
        if self.split == "train" and len(indices) == 8:  # not when the run opens its data
            count[0] += 1
            if count[0] > 5:
                rows.latents[:] = 0
        return rows

    monkeypatch.setattr(Store, "get", lost)
    common = ["engine.kind=single", "training.num_train_steps=60", "training.train_batch_size=8"]
    assert main(train_words(store, tmp_path, "run", *common, *words)) == 4
    told = capsys.readouterr().err
    assert said in told and "events.jsonl" in told
    log = read_log(tmp_path, "run")
    assert [record["skipped"] for record in log] == [False] * 5 + [True] * (steps - 5)
    assert [record["bad_samples"] for record in log] == [0] * 5 + [8] * (steps - 5)
    *_, stopped, end = read_log(tmp_path, "run", "events.jsonl")
    assert stopped["event"] == "stability_stop" and (end["event"], end["exit_code"]) == ("end", 4)


ONE_RANK_LOSES = """
import os, sys
from mmldlm.data.store import Store
from mmldlm.distributed.error_reporting import exit_without_teardown
from mmldlm.train import main
get = Store.get
def lost(self, indices):
    rows = get(self, indices)
    if os.environ["RANK"] == "1" and self.split == "train" and len(indices) == 4:
        rows.latents[:] = 0
    return rows
Store.get = lost
code = main(sys.argv[1:])
print("ended with", code, flush=True)
exit_without_teardown(code)
"""


def test_all_ranks_stop_when_one_of_them_reads_nothing_usable(store, tmp_path):
    script = tmp_path / "loses.py"
    script.write_text(ONE_RANK_LOSES)
    words = [
        "engine.kind=ddp",
        "training.num_train_steps=60",
        "training.train_batch_size=4",
        "stability.max_bad_sample_fraction=0.4",
    ]
    done = run_ranks(2, script, *train_words(store, tmp_path, "run", *words), timeout=120)
    assert done.stdout.count("ended with 4") == 2, done.stdout[-3000:]
    log = read_log(tmp_path, "run")
    # The other rank's samples are usable: its steps are applied, until the share is judged.
    assert [(r["bad_samples"], r["skipped"]) for r in log] == [(4, False)] * 20 and all(
        r["loss"] > 0 for r in log
    )
