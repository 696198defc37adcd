"""Decoupled diffusion (RadioDiff): path, bridge, weights, and where its NaNs came from."""

from __future__ import annotations

import math

import pytest
import torch

from mmldlm.diffusion.decoupled import (
    DecoupledProcess,
    bridge_eta,
    loss_weights,
    timestep_of_cosine,
)
from mmldlm.diffusion.gaussian import GaussianProcess

PREDICTIONS = ("x0", "epsilon", "x0_epsilon")
WEIGHTINGS = ("unit", "min_snr", "ddm", "ddm_inverse")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_path_and_signal_to_noise():
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    alpha, sigma = DecoupledProcess().alpha_sigma(t)
    torch.testing.assert_close(alpha, 1 - t, rtol=0, atol=0)
    torch.testing.assert_close(sigma**2, t)
    total = alpha**2 + sigma**2
    torch.testing.assert_close(total, 1 - t + t**2)
    assert float(total.min()) == pytest.approx(0.75) and float(total.max()) == 1.0
    torch.testing.assert_close((alpha / sigma)[1:] ** 2, ((1 - t) ** 2 / t)[1:])


def test_its_own_step_is_ddim_with_the_bridge_as_noise():
    """Mean z - h C - (h / sqrt(t)) noise with C = -x0 and variance s (t - s) / t, against DDIM's
    a' x0 + ... .
    """
    diffusion = DecoupledProcess()
    x0, noise, fresh = normal(2000, 3), normal(2000, 3, seed=1), normal(2000, 3, seed=2)
    t = 1e-4 + (1 - 1e-4) * torch.rand(
        2000, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    s = t * torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    z = diffusion.add_noise(x0, noise, t)
    h, root = (t - s)[:, None], t.sqrt()[:, None]
    bridge = (s * (t - s) / t)[:, None].sqrt()
    own = z + h * x0 - (h / root) * noise + bridge * fresh
    found = diffusion.step(x0, z, t, s, eta=bridge_eta, noise=fresh)
    torch.testing.assert_close(found, own, rtol=0, atol=1e-10)
    assert float(
        bridge_eta(torch.tensor(0.7).double(), torch.tensor(0.4).double())
    ) == pytest.approx(0.7071, abs=1e-4)
    assert ((bridge_eta(t, s) > 0) & (bridge_eta(t, s) <= 1)).all()
    # What z_t leaves of its noise, and what is added, make up that of s.
    torch.testing.assert_close(s**2 / t + s * (t - s) / t, s)


def test_ddim_is_that_of_the_cosine_path_at_equal_signal_to_noise():
    decoupled, cosine = DecoupledProcess(), GaussianProcess("cosine")
    u = torch.linspace(1, 0, 9, dtype=torch.float64)
    grid = timestep_of_cosine(u)
    assert grid[0] == 1 and grid[-1] == 0
    a, s = decoupled.alpha_sigma(grid[1:-1])
    b, r = cosine.alpha_sigma(u[1:-1])
    torch.testing.assert_close(a / s, b / r, rtol=1e-12, atol=0)

    def denoise(process, z, t):
        """A network that reads z / sqrt(a^2 + s^2) and the signal-to-noise ratio: the same for
        every path.
        """
        alpha, sigma = (value[:, None] for value in process.alpha_sigma(t))
        level = torch.atan2(alpha, sigma)
        return torch.tanh(z / torch.hypot(alpha, sigma) * (1 + level)) * level.cos()

    results = []
    for process, times in ((decoupled, grid), (cosine, u)):
        z = normal(50, 4)
        for t, s in zip(times[:-1], times[1:], strict=True):
            here, there = t.expand(50), s.expand(50)
            z = process.step(denoise(process, z, here), z, here, there)
        results.append(z)
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


@pytest.mark.parametrize("eta", [0.0, 1.0, bridge_eta])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("steps", [1, 6])
def test_one_data_point_comes_back(prediction, steps, eta):
    diffusion = DecoupledProcess(prediction)
    point, z = torch.full((16, 3), 2.5, dtype=torch.float64), normal(16, 3)
    grid = diffusion.sampling_grid(steps)
    for t, s in zip(grid[:-1], grid[1:], strict=True):
        here, there = t.expand(16), s.expand(16)
        alpha, sigma = (value[:, None] for value in diffusion.alpha_sigma(here))
        output = diffusion.targets(point, (z - alpha * point) / sigma, here)
        z = diffusion.step(output, z, here, there, eta=eta, noise=normal(16, 3, seed=5))
    torch.testing.assert_close(z, point, rtol=0, atol=1e-9)


def test_the_last_step_takes_no_noise():
    diffusion = DecoupledProcess("x0_epsilon")
    z, output, t = normal(8, 3), normal(8, 6, seed=1), torch.full((8,), 0.3, dtype=torch.float64)
    for eta in (0.0, 1.0, bridge_eta):
        found = diffusion.step(
            output, z, t, torch.zeros_like(t), eta=eta, noise=normal(8, 3, seed=2)
        )
        torch.testing.assert_close(found, diffusion.to_x0(output, z, t), rtol=0, atol=1e-12)


def test_two_predictions_combine_and_agree_at_a_point():
    """x0 = z + t x0_hat - sqrt(t) noise_hat; its error is t e_x - sqrt(t) e_noise, so a small t
    trusts z.
    """
    diffusion = DecoupledProcess("x0_epsilon")
    x0, noise = normal(64, 3), normal(64, 3, seed=1)
    t = torch.linspace(1e-4, 1, 64, dtype=torch.float64)
    z, truth = diffusion.add_noise(x0, noise, t), diffusion.targets(x0, noise, t)
    assert diffusion.num_predictions == 2 and truth.shape == (64, 6)
    torch.testing.assert_close(diffusion.to_x0(truth, z, t), x0, rtol=0, atol=1e-12)
    errors = normal(64, 6, seed=2)
    of_x0, of_noise = errors.chunk(2, -1)
    expected = x0 + t[:, None] * of_x0 - t.sqrt()[:, None] * of_noise
    torch.testing.assert_close(diffusion.to_x0(truth + errors, z, t), expected, rtol=0, atol=1e-12)


def test_weights():
    t = torch.tensor([1e-4, 0.25, 1.0], dtype=torch.float64)
    found = loss_weights(t, "ddm", 100.0)
    torch.testing.assert_close(found[:, 0], 2 * torch.exp(1 - t))
    torch.testing.assert_close(found[:, 1], torch.exp(t.sqrt()))
    # The cap changes the weights beyond it and no other.
    grid = torch.linspace(1e-4, 1 - 1e-4, 999, dtype=torch.float64)
    exact = torch.stack([1 / grid, 1 / (1 - grid)], -1)
    capped = loss_weights(grid, "ddm_inverse", 100.0)
    torch.testing.assert_close(capped, exact.clamp_max(100.0))
    assert (capped == 100.0).any() and torch.equal(
        loss_weights(t, "ddm_inverse", 100.0)[2], torch.tensor([1.0, 100.0])
    )
    one = DecoupledProcess("x0", "ddm").loss_weights(t)
    two = DecoupledProcess("x0_epsilon", "ddm").loss_weights(t)
    assert torch.equal(two[:, 0], one)
    assert torch.equal(two[:, 1], DecoupledProcess("epsilon", "ddm").loss_weights(t))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_losses_gradients_and_steps_are_finite_at_both_ends(prediction, weighting, dtype):
    """The published NaNs: weights of 1 / t in fp16, roots of rounded negatives, grids by repeated
    subtraction.
    """
    diffusion = DecoupledProcess(prediction, weighting)
    t = torch.tensor([1e-6, 1e-4, 1e-3, 0.5, 1 - 1e-6, 1.0], dtype=torch.float64)
    weights = diffusion.loss_weights(t).view(6, -1).float()
    assert torch.isfinite(weights).all() and weights.min() >= 0 and weights.max() <= 100.0
    x0, noise = normal(6, 4), normal(6, 4, seed=1)
    z, target = diffusion.add_noise(x0, noise, t).float(), diffusion.targets(x0, noise, t).float()
    output = normal(6, 4 * diffusion.num_predictions, seed=2).to(dtype).requires_grad_()
    error = (output.float() - target).square().unflatten(1, (-1, 4)).mean(-1)
    loss = (error * weights).sum() / 6
    scale = 1024.0 if dtype == torch.float16 else 1.0
    (loss * scale).backward()
    assert math.isfinite(loss.item()) and torch.isfinite(output.grad).all()
    for s in (t * (1 - 1e-7), t / 2, torch.zeros_like(t)):
        for eta in (0.0, 1.0, bridge_eta):
            step = diffusion.step(output.detach().float(), z, t, s, eta=eta, noise=noise.float())
            assert torch.isfinite(step).all()


def test_no_grid_leaves_the_unit_interval():
    for steps in (1, 7, 1000):
        grid = DecoupledProcess().sampling_grid(steps)
        assert grid[0] == 1 and grid[-1] == 0 and (grid.diff() < 0).all()
