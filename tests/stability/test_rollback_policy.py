"""Rollback, bad samples and audits in real runs of one process (many ranks:
tests/integration/test_engines.py).
"""

from __future__ import annotations

import numpy as np
import torch

from tests.support.helpers import read_log, train_words


def events(folder, name: str, kind: str) -> list[dict]:
    return [event for event in read_log(folder, name, "events.jsonl") if event["event"] == kind]


def words(store, folder, name: str, *more: str) -> list[str]:
    common = [
        "engine.kind=single",
        "training.num_train_steps=12",
        "logging.save_freq=2",
        "logging.eval_freq=100",
    ]
    return train_words(store, folder, name, *common, *more)


def test_skips_in_a_row_roll_back_and_pass_the_batches_over(store, tmp_path, monkeypatch):
    from mmldlm.data import loader
    from mmldlm.train import main

    make = loader.MicroBatches.__getitem__

    def poisoned(self, item):
        batch = make(self, item)
        if self.plan.shuffle and 4 <= item < 7:
            batch.latents[:, 0] = float("nan")
        return batch

    monkeypatch.setattr(loader.MicroBatches, "__getitem__", poisoned)
    assert (
        main(
            words(
                store,
                tmp_path,
                "run",
                "stability.max_consecutive_skips=3",
                "optimizer.warmup_steps=0",
            )
        )
        == 0
    )
    (rollback,) = events(tmp_path, "run", "rollback")
    # None was saved at step 6, amid the skips.
    assert (rollback["from_step"], rollback["to_step"], rollback["passed_over"]) == (
        7,
        4,
        [[4, 7]],
    )
    assert [event["step"] for event in events(tmp_path, "run", "passed_over")] == [5, 6, 7]
    records = read_log(tmp_path, "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 8, 9, 10, 11, 12]
    assert not any(record["skipped"] or record["loss"] is None for record in records)
    assert records[4]["lr"] < 0.51 * records[3]["lr"]
    # The way back is saved at once, and the one that the passed-over steps held up right after
    # them.
    assert [event["step"] for event in events(tmp_path, "run", "save")] == [2, 4, 4, 8, 10, 12]


def test_the_first_bad_batch_is_excluded_where_others_lie_between():
    """Overflows and excluded batches do not count; the batch of the first skip was trained on
    again.
    """
    from mmldlm.config.schema import StabilityConfig
    from mmldlm.stability.guard import StepDecision
    from mmldlm.stability.rollback import needs_rollback
    from mmldlm.training.state import TrainingState

    applied = StepDecision(True)
    bad = StepDecision(False, "loss nan")
    overflow = StepDecision(False, "overflow", is_overflow=True)
    state = TrainingState(global_batch=8, num_samples=100)
    for decision in (applied, bad, applied, overflow, bad, overflow):
        state.advance(decision, 8)
    state.exclude_batch(8)
    state.advance(bad, 8)
    assert (state.step, state.consecutive_skips, state.first_skip) == (8, 2, 4)
    config = StabilityConfig(max_consecutive_skips=2)
    cause = needs_rollback(config, state.step, state.consecutive_skips, state.first_skip, {})
    assert cause is not None and cause.first_skip == 4
    state.advance(applied, 8)
    assert (state.consecutive_skips, state.first_skip) == (0, -1)


def test_a_corrupted_row_is_left_out_and_named(store, tmp_path, monkeypatch):
    from mmldlm.data.store import Store
    from mmldlm.train import main

    get, bad_row = Store.get, 17

    def corrupted(self, indices):
        rows = get(self, indices)
        for place, index in enumerate(indices):
            if index == bad_row and len(indices) <= 16:
                # Not yet when the run opens its data, which would refuse it.
                rows.latents[place, 3] = np.nan
        return rows

    monkeypatch.setattr(Store, "get", corrupted)
    more = ["data.max_train_samples=48", "training.num_train_steps=12"]  # two epochs
    assert main(words(store, tmp_path, "run", *more)) == 0
    (bad,) = events(tmp_path, "run", "bad_sample")
    assert sum(record["bad_samples"] for record in read_log(tmp_path, "run")) == 2
    assert bad["id"] == bad["row"] == bad_row and "1 non-finite" in bad["reason"]
    records = read_log(tmp_path, "run")
    assert not any(record["skipped"] for record in records) and all(
        np.isfinite(r["loss"]) for r in records
    )


def test_a_bad_weight_is_found_before_it_is_saved_and_the_run_returns(
    store, tmp_path, monkeypatch
):
    from mmldlm.engines import torch_engines as torch_engine
    from mmldlm.train import main

    apply, count = torch_engine.TorchEngine.step, [0]

    def flip(self, lr, grad_norm):
        apply(self, lr, grad_norm)
        count[0] += 1
        if count[0] == 5:
            with torch.no_grad():
                self.optimizer.state[self._parameters()[3]]["exp_avg_sq"].view(-1)[0] = float(
                    "inf"
                )

    monkeypatch.setattr(torch_engine.TorchEngine, "step", flip)
    assert main(words(store, tmp_path, "run", "stability.audit_freq=1")) == 0
    (rollback,) = events(tmp_path, "run", "rollback")
    assert (rollback["from_step"], rollback["to_step"]) == (5, 4)
    assert len(rollback["tensors"]) == 1 and next(iter(rollback["tensors"])).endswith(
        ".exp_avg_sq"
    )
    assert rollback["passed_over"] == []
