"""Weights that can be turned into shares, and others."""

import pytest

from mmldlm.config.section import check_weights


@pytest.mark.parametrize("weights", [{"a": 1.0}, {"a": 0.0, "b": 1e-300}, {"a": 4095, "b": 1}])
def test_valid_weights(weights):
    check_weights("key", weights)
    check_weights("key", {"a": 4095, "b": 1}, least_share=1 / 4096)


@pytest.mark.parametrize(
    "weights",
    [{}, {"a": 0.0}, {"a": 0, "b": 0.0}],
)
def test_other_weights_are_refused_with_their_key(weights):
    with pytest.raises(ValueError, match="training.key"):
        check_weights("training.key", weights)


def test_shares_below_the_least_are_refused():
    with pytest.raises(ValueError, match="1/4,096"):
        check_weights("key", {"a": 4096, "b": 1}, least_share=1 / 4096)
