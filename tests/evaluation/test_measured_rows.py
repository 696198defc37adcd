"""Indented rows belong to the row above them."""

from mmldlm.evaluation.gain_report import ROWS
from mmldlm.evaluation.report import measured_rows

TABLE = (
    ("a", "figure", 1),
    ("a1", "  floor", 1),
    ("b", "other", 1),
    ("b1", "  floor", 1),
    ("b2", "  gap", 1),
)


def test_a_row_goes_with_its_parent():
    assert [row[0] for row in measured_rows(TABLE, {"a", "a1", "b1", "b2"}.__contains__)] == [
        "a",
        "a1",
    ]
    assert [row[0] for row in measured_rows(TABLE, {"a1", "b", "b2"}.__contains__)] == ["b", "b2"]
    assert measured_rows(TABLE, lambda key: True) == list(TABLE)


def test_no_floor_of_texts_embedded_again_without_that_figure():
    """newcomer B4"""
    measured = {key for key, *_ in ROWS} - {"reencoded_cosine", "reencoded_cosine_shuffled"}
    found = [key for key, *_ in measured_rows(ROWS, measured.__contains__)]
    assert (
        "nearest_training_cosine" not in found and found[-1] == "norm_ratio" and "f1_gap" in found
    )
