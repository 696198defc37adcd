"""The share of unknown tokens: a warning above 1 %, an error above 20 % of the training texts."""

import numpy as np
import pytest

from mmldlm.data.unknown_tokens import check_unknown_share, check_unknown_to_encoder, count_unknown
from mmldlm.errors import UserError


def test_shares():
    assert check_unknown_share(10, 1000, "train") is None
    assert "[UNK]" in check_unknown_share(11, 1000, "train")
    with pytest.raises(UserError, match="UNK"):
        check_unknown_share(201, 1000, "train")
    # A corpus of its own, a tokenizer of another.
    assert "[UNK]" in check_unknown_share(900, 1000, "validation")


def test_shares_of_an_encoder():
    assert check_unknown_to_encoder(10, 1000, "enc") is None and "enc" in check_unknown_to_encoder(
        11, 1000, "enc"
    )
    with pytest.raises(UserError, match="UNK"):
        check_unknown_to_encoder(901, 1000, "enc")


def test_counts():
    assert count_unknown([[1, 2, 1], np.array([1])], 1) == 3 and count_unknown([[1]], None) == 0
    assert count_unknown([], 1) == 0 and count_unknown([np.empty(0, np.int64)], 1) == 0
