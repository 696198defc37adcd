"""Correlations, and files of the STS Benchmark."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.errors import UserError
from mmldlm.evaluation.metrics import sts_benchmark


def test_correlations_of_known_vectors():
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert sts_benchmark.spearman(x, np.exp(x)) == pytest.approx(1) and sts_benchmark.pearson(x, -x) == pytest.approx(
        -1
    )
    assert sts_benchmark.average_ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert sts_benchmark.spearman(x, np.ones(5)) == 0.0


def test_sts_files_are_read_or_refused(tmp_path):
    path = tmp_path / "sts.csv"
    rows = (("5.000", 'A "man" runs.', "A man runs."), ("0.0", "One.", "Two words."), ("2", "a", "b"))
    path.write_text("\n".join("\t".join(("genre", "file", "year", "id", *row)) for row in rows))
    pairs = sts_benchmark.read_pairs(str(path))
    assert pairs.first[0] == 'A "man" runs.' and pairs.scores.tolist() == [5, 0, 2]
    assert sts_benchmark.bag_similarities(pairs, weighted=False)[0] == pytest.approx(1)
    path.write_text("a\tb\n")
    for bad in (path, tmp_path / "absent.csv"):
        with pytest.raises(UserError, match="STS Benchmark"):
            sts_benchmark.read_pairs(str(bad))
