"""Text overlap of known cases."""

from __future__ import annotations

import numpy as np

from mmldlm.evaluation import metrics


def test_set_f1():
    found = metrics.token_f1([[1, 2, 2, 3], [4], [], [5, 6]], [[3, 2, 9], [5], [1], [6, 5, 5]])
    np.testing.assert_allclose(found, [2 * 2 / 6, 0, 0, 1])


def test_exact_match_depends_on_the_order():
    assert metrics.exact_match([[1, 2], [1, 2]], [[1, 2], [2, 1]]).tolist() == [True, False]
