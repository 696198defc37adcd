import torch

from mmldlm.diffusion.timesteps import logit_normal, low_discrepancy, stretch


def test_every_stratum_holds_exactly_one():
    for count in (5, 96):
        u = low_discrepancy(torch.randperm(count), 0.8137, count)
        assert torch.equal(
            torch.sort((u * count - 0.8137 * count % 1).round().long() % count).values, torch.arange(count)
        )
        assert u.min() >= 0 and u.max() < 1


def test_stretch_stays_inside():
    t = stretch(torch.tensor([0.0, 0.5, 1 - 1e-12], dtype=torch.float64), 1e-3)
    assert t[0] == 1e-3 and t[2] < 1


def test_logit_normal_has_its_median_and_spread():
    u = low_discrepancy(torch.arange(20_000), 0.5 / 20_000, 20_000)
    t = logit_normal(u)
    z = torch.logit(t)
    assert abs(z.mean()) < 1e-3 and abs(z.std() - 1) < 1e-2
    assert torch.isfinite(logit_normal(torch.tensor([0.0, 1.0]))).all()
