"""Statistics of latents."""

from __future__ import annotations

import numpy as np

from mmldlm.data.writers import LatentStatistics


def test_statistics_do_not_depend_on_the_blocks():
    latents = np.random.default_rng(0).normal(3.0, 0.1, (100, 5)).astype(np.float32)
    whole, parts = LatentStatistics(5), LatentStatistics(5)
    whole.add(latents)
    for block in np.array_split(latents, 7):
        parts.add(block)
    np.testing.assert_allclose(whole.result()["std"], latents.astype(np.float64).std(0), rtol=1e-9)
    np.testing.assert_allclose(whole.result()["std"], parts.result()["std"], rtol=1e-9)
