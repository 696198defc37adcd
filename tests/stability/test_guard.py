"""The rule over losses and norms, and its window."""

from __future__ import annotations

import math

import pytest

from mmldlm.config.schema import StabilityConfig
from mmldlm.stability import Guard
from mmldlm.stability.guard import SpikeWindow


def filled(action: str, count: int = 64) -> Guard:
    guard = Guard(StabilityConfig(spike_action=action, spike_window=64, spike_sigma=4.0))
    for step in range(count):
        assert guard.decide(2.0 + 0.1 * (step % 5), 0, 1.0 + 0.05 * (step % 3)).apply
    return guard


@pytest.mark.parametrize(
    ("loss", "num_bad", "norm"),
    [
        (2.0, 1, 1.0),
        (math.nan, 0, 1.0),
        (math.inf, 0, 1.0),
        (2.0, 0, math.nan),
        (2.0, 0, math.inf),
    ],
)
@pytest.mark.parametrize("action", ["skip", "log", "off"])
def test_what_is_not_finite_is_never_applied_and_never_enters_the_window(
    action, loss, num_bad, norm
):
    guard = filled(action)
    before = guard.state()
    verdict = guard.decide(loss, num_bad, norm)
    assert not verdict.apply and "non-finite" in verdict.reason
    assert guard.state() == before


def test_a_spike_is_skipped_said_or_let_pass():
    for action, applied, said in (
        ("skip", False, True),
        ("log", True, True),
        ("off", True, False),
    ):
        guard = filled(action)
        verdict = guard.decide(2000.0, 0, 1.0)
        assert (verdict.apply, bool(verdict.reason)) == (applied, said)
        # What was skipped must not widen the window: the next spike is judged as before.
        assert (2000.0 in guard.state()["loss"]) == (action != "skip")
    assert filled("skip").decide(2.1, 0, 500.0).reason.startswith("spike: gradient norm")


def test_no_spike_before_the_window_is_half_full():
    guard = filled("skip", count=31)
    assert guard.decide(1e6, 0, 1.0).apply


def test_the_window_goes_through_a_checkpoint():
    guard, other = (
        filled("skip"),
        Guard(StabilityConfig(spike_action="skip", spike_window=64, spike_sigma=4.0)),
    )
    other.restore(guard.state())
    assert other.decide(2000.0, 0, 1.0) == guard.decide(2000.0, 0, 1.0)
    other.restore({})
    assert other.decide(2000.0, 0, 1.0).apply


def test_the_limit_is_mean_plus_sigma_standard_deviations():
    window = SpikeWindow(8, 3.0)
    for value in (1.0, 2.0, 3.0, 4.0, math.nan, math.inf):
        window.update(value)
    assert window.threshold() == pytest.approx(2.5 + 3.0 * math.sqrt(1.25))
