"""Facts of a context."""

from __future__ import annotations

from mmldlm.preflight.context import majority


def test_majority_prefers_the_first_node_of_a_tie():
    assert majority({"a": 1, "b": 2}) == 1 and majority({"a": 1, "b": 2, "c": 2}) == 2
