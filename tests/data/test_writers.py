"""Statistics of latents."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.data.writers import LatentStatistics
from mmldlm.errors import UserError
from mmldlm.utils import resources


def test_statistics_do_not_depend_on_the_blocks():
    latents = np.random.default_rng(0).normal(3.0, 0.1, (100, 5)).astype(np.float32)
    whole, parts = LatentStatistics(5), LatentStatistics(5)
    whole.add(latents)
    for block in np.array_split(latents, 7):
        parts.add(block)
    np.testing.assert_allclose(whole.result()["std"], latents.astype(np.float64).std(0), rtol=1e-9)
    np.testing.assert_allclose(whole.result()["std"], parts.result()["std"], rtol=1e-9)


def test_a_covariance_that_no_memory_holds_is_refused(monkeypatch):
    monkeypatch.setattr(resources, "memory", lambda: resources.Memory(1 << 30, 1 << 30))
    LatentStatistics(4096)
    with pytest.raises(UserError, match="covariance of latents of 8,192 dimensions"):
        LatentStatistics(8192)
