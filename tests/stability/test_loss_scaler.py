"""fp16 on two real ranks of every engine: overflows are skipped alike, the scale adapts, the
losses agree.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmldlm.config.schema import StabilityConfig
from mmldlm.errors import UserError
from mmldlm.stability.guard import Guard, LossScaler
from mmldlm.tasks.registry import load_config
from tests.stability.fp16_ranks import ENGINES
from tests.support.helpers import read_log, run_ranks

SCRIPT = str(Path(__file__).with_name("fp16_ranks.py"))
RANKS = [engine for engine in ENGINES if engine != "single"]


@pytest.fixture(scope="module")
def runs(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp16")
    for world, engines in ((1, ["single"]), (2, RANKS)):
        done = run_ranks(world, SCRIPT, str(store), str(folder), *engines)
        assert done.returncode == 0, done.stdout[-3000:]
    return folder


@pytest.mark.parametrize("engine", RANKS)
def test_losses_and_norms_are_those_of_one_process(runs, engine):
    expected, found = read_log(runs, "single"), read_log(runs, engine)
    assert [record["step"] for record in found] == list(range(1, 9))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)
        assert not ours["skipped"]
    assert [record["loss_scale"] for record in found] == [1024.0] * 3 + [2048.0] * 3 + [4096.0] * 2
    look = read_log(runs, engine, "gradient_log.jsonl")[-1]
    assert 0 <= look["underflow_share"] < 0.5
    assert all(layer.get("nonfinite", 0) == 0 for layer in look["layers"].values())


@pytest.mark.parametrize("engine", ENGINES)
def test_overflows_are_skipped_and_move_the_scale(runs, engine):
    records, events = (
        read_log(runs, f"{engine}_large"),
        read_log(runs, f"{engine}_large", "events.jsonl"),
    )
    overflows = [event["step"] for event in events if event["event"] == "overflow"]
    assert overflows and overflows == [record["step"] for record in records if record["skipped"]]
    scales = [record["loss_scale"] for record in records]
    assert scales == [4194304.0 / 2**step for step in range(4)] and all(
        record["skipped"] for record in records
    )
    assert not any(event["event"] in ("skip", "rollback") for event in events)
    state = json.loads((runs / f"{engine}_large" / "latest" / "training_state.json").read_text())
    assert state["guard"]["loss_scale"] == [scales[-1] / 2, 0] and state["consecutive_skips"] == 0


def test_the_scale_goes_on_from_a_checkpoint_and_only_under_fp16():
    config = StabilityConfig(loss_scale=8.0, loss_scale_window=2)
    scale = LossScaler(config, "fp16")
    assert scale.on_overflow() == 4.0
    scale.on_success()
    again = LossScaler(config, "fp16")
    again.restore(scale.state())
    again.on_success()
    assert again.value == 8.0
    none = LossScaler(config, "bf16")
    none.restore(scale.state())
    none.on_success()
    assert none.value == 1.0 and none.state() == [] and not none.can_decrease


def test_an_overflow_at_the_smallest_scale_is_an_ordinary_skip():
    guard = Guard(StabilityConfig(loss_scale=2.0), "fp16")
    first, second = (guard.decide(1.0, 0, float("inf")) for _ in range(2))
    assert first.is_overflow and not second.is_overflow and not second.apply
    assert not guard.decide(float("nan"), 1, float("inf")).is_overflow


def test_a_loss_scale_without_fp16_is_refused():
    with pytest.raises(UserError, match="dtype=fp16"):
        load_config("tiny", None, ["stability.loss_scale=1024"])
