"""Text overlap of known cases."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.evaluation import metrics


def test_set_f1():
    found = metrics.token_f1([[1, 2, 2, 3], [4], [], [5, 6]], [[3, 2, 9], [5], [1], [6, 5, 5]])
    np.testing.assert_allclose(found, [2 * 2 / 6, 0, 0, 1])


def test_exact_match_depends_on_the_order():
    assert metrics.exact_match([[1, 2], [1, 2]], [[1, 2], [2, 1]]).tolist() == [True, False]


def test_piece_bleu_of_known_cases():
    reference = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]
    assert metrics.piece_bleu(reference, reference).value == pytest.approx(100)
    assert metrics.piece_bleu([[1, 1, 1, 1, 1], [9]], reference).value == 0
    # One word of twelve wrong in the middle: precisions 11/12, 9/11, 7/10, 5/9, no brevity.
    text = list(range(12))
    wrong = text.copy()
    wrong[5] = 99
    expected = 100 * np.prod([11 / 12, 9 / 11, 7 / 10, 5 / 9]) ** 0.25
    assert metrics.piece_bleu([wrong], [text]).value == pytest.approx(expected)
    # A text cut to half pays exp(1 - 2) for brevity and nothing else.
    assert metrics.piece_bleu([text[:6]], [text]).value == pytest.approx(100 * np.exp(-1))
    # Counts are clipped.
    assert metrics.piece_bleu([[1, 1, 1, 1, 1, 1]], [[1, 2, 3, 4, 5, 6]]).value == 0
