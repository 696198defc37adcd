import numpy as np
import torch

from mmldlm.diffusion.timesteps import arcsine, logit_normal, low_discrepancy, stretch


def test_every_stratum_holds_exactly_one():
    for count in (5, 96):
        u = low_discrepancy(np.random.default_rng(0).permutation(count), 0.8137, count)
        strata = (u * count - 0.8137 * count % 1).round().astype(int) % count
        assert np.array_equal(np.sort(strata), np.arange(count))
        assert u.min() >= 0 and u.max() < 1


def test_stretch_stays_inside():
    t = stretch(torch.tensor([0.0, 0.5, 1 - 1e-12], dtype=torch.float64), 1e-3)
    assert t[0] == 1e-3 and t[2] < 1


def test_logit_normal_has_its_median_and_spread():
    u = low_discrepancy(np.arange(20_000), 0.5 / 20_000, 20_000)
    t = logit_normal(torch.from_numpy(u))
    z = torch.logit(t)
    assert abs(z.mean()) < 1e-3 and abs(z.std() - 1) < 1e-2
    assert torch.isfinite(logit_normal(torch.tensor([0.0, 1.0]))).all()


def test_arcsine_times_integrate_over_t():
    """The integral of 1 / sqrt(t) over (0, 1) is 2; a uniform t of the same margin misses a
    hundredth of it.
    """
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    t, weight = arcsine(u)
    assert 0 < t.min() and t.max() < 1 and abs(float(weight.mean()) - 1) < 1e-6
    assert abs(float((weight / t.sqrt()).mean()) - 2) < 1e-3
    ends, _ = arcsine(torch.tensor([0.0, 1.0]))
    assert 0 < ends[0] and ends[1] < 1
