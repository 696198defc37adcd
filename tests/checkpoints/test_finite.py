"""The quick look at many float32: it may never take a bad number for a good one."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.checkpoints import finite


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 33, 64, 4095, 4097, 131_072])
def test_every_bad_number_is_seen(count):
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    data = memoryview(values.view(np.uint8))
    assert finite.are_finite(data) or finite._find_dot() is None
    for place in {0, 1, count // 2, count - 2, count - 1} & set(range(count)):
        kept = values[place]
        for bits in (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF):
            values.view(np.uint32)[place] = bits
            assert not finite.are_finite(data)
        values[place] = kept


def test_without_openblas_nothing_is_proven(monkeypatch):
    finite._find_dot.cache_clear()
    monkeypatch.setattr(finite, "_LIBRARIES", (("no such library", "f"),))
    assert not finite.are_finite(memoryview(bytearray(16)))
    finite._find_dot.cache_clear()


def test_a_blas_that_sees_no_nan_is_not_used():
    assert not finite._is_right(lambda count, *rest: count / 4)
