"""The choice of edits: by the expected embedding, alone and together."""

from __future__ import annotations

import numpy as np

from mmldlm.sampling.search.combine import promising_texts
from mmldlm.sampling.search.edits import INSERT, SUBSTITUTE, Edits

TEXT = (1, 2, 3)


def edits(shifts, ratios=(0.0, 0.0, 0.0), places=(0, 1, 2)):
    count = len(places)
    given = None if shifts is None else np.array(shifts, dtype=np.float32)[:, None]
    return Edits(
        np.full(count, SUBSTITUTE), np.array(places), np.arange(10, 10 + count), np.array(ratios, float), given
    )


def promising(given, most=9, max_edits=3, max_tokens=9):
    start, target = np.array([[1.0, 0.0, 0.0]]), np.array([[1.0, 1.0, 1.0]])
    return promising_texts(TEXT, given, start, target, max_edits=max_edits, most=most, max_tokens=max_tokens)


def test_edits_that_help_together_are_combined_and_the_best_text_is_first():
    found = promising(edits([[0, 1, 0], [0, 0, 1], [0, -1, 0]]))
    assert found[0][1] == (10, 11, 3) and np.isclose(found[0][0], 1.0)
    assert [text for _, text in found][1:3] == [(10, 2, 3), (1, 11, 3)]
    assert all(text != TEXT for _, text in found) and len({text for _, text in found}) == len(found)


def test_edits_of_one_place_are_not_combined():
    assert promising(edits([[0, 1, 0], [0, 0, 1]], (0.0, 0.0), (1, 1)))[0][1] in {(1, 10, 3), (1, 11, 3)}


def test_no_text_has_more_edits_than_allowed():
    found = promising(edits([[0, 1, 0], [0, 0, 1], [0, 0.5, 0.5]]), max_edits=1)
    assert all(sum(a != b for a, b in zip(text, TEXT)) == 1 for _, text in found)


def test_no_text_is_longer_than_the_model_reads():
    both = edits([[0, 1, 0], [0, 0, 1]], (0.0, 0.0), (0, 2))
    both.kinds[:] = INSERT
    assert promising(both)[0][1] == (10, 1, 2, 11, 3)
    assert [text for _, text in promising(both, max_tokens=4)] == [(10, 1, 2, 3), (1, 2, 11, 3)]


def test_without_estimates_likely_edits_come_first():
    found = promising(edits(None, (-3.0, -1.0, -2.0)), most=2)
    assert [text for _, text in found] == [(1, 11, 3), (1, 2, 12)]
