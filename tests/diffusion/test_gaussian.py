import pickle

import pytest
import torch

from mmldlm.diffusion.decoupled import DecoupledProcess, bridge_eta
from mmldlm.diffusion.gaussian import PREDICTIONS, SCHEDULES, GaussianProcess
from mmldlm.tasks.translation.config import SCHEDULES_OF_PREDICTION

ALL_SCHEDULES = [*SCHEDULES, "decoupled"]


def process(schedule, *options):
    """The latent process of a schedule."""
    if schedule == "decoupled":
        return DecoupledProcess(*options)
    return GaussianProcess(schedule, *options)


# What a config may combine.
PAIRS = [
    (schedule, prediction)
    for prediction in (*PREDICTIONS, "x0_epsilon")
    for schedule in SCHEDULES_OF_PREDICTION.get(prediction, ALL_SCHEDULES)
]


def sample(size=64, dim=8, low=0.01, high=0.99):
    generator = torch.Generator().manual_seed(0)
    x0, noise = (
        torch.randn(size, dim, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    return (
        x0,
        noise,
        low + (high - low) * torch.rand(size, dtype=torch.float64, generator=generator),
    )


@pytest.mark.parametrize(("schedule", "prediction"), PAIRS)
def test_round_trips(schedule, prediction):
    diffusion = process(schedule, prediction)
    x0, noise, t = sample()
    z = diffusion.add_noise(x0, noise, t)
    back = diffusion.to_x0(diffusion.targets(x0, noise, t), z, t)
    tolerance = 1e-9 if (schedule, prediction) == ("linear", "epsilon") else 1e-11
    torch.testing.assert_close(
        back, x0, rtol=0, atol=tolerance * 100 if schedule == "linear" else tolerance
    )
    alpha, sigma = (value[:, None] for value in diffusion.alpha_sigma(t))
    torch.testing.assert_close((z - alpha * x0) / sigma, noise, rtol=0, atol=1e-9)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_ends_are_data_and_noise(schedule):
    diffusion = process(schedule)
    alpha, sigma = diffusion.alpha_sigma(torch.tensor([0.0, 1.0]))
    assert alpha[0] == pytest.approx(1, abs=1e-12) and sigma[0] == pytest.approx(0, abs=1e-9)
    assert alpha[1] < 7e-3 and sigma[1] == pytest.approx(1, abs=1e-4)
    grid_alpha, grid_sigma = diffusion.alpha_sigma(torch.linspace(0, 1, 101))
    assert (grid_alpha.diff() <= 1e-12).all() and (grid_sigma.diff() >= -1e-12).all()
    if schedule not in ("rectified_flow", "decoupled"):
        torch.testing.assert_close(grid_alpha**2 + grid_sigma**2, torch.ones(101).double())


def test_weights_are_equivalent_across_predictions():
    """eps-MSE = SNR x-MSE and v-MSE = (SNR + 1) x-MSE, so min-SNR weights the same x0 error alike
    in every space.
    """
    x0, noise, t = sample(low=0.05, high=0.95)
    errors = []
    for prediction in ("x0", "epsilon", "v"):
        diffusion = GaussianProcess("cosine", prediction, "min_snr")
        z = diffusion.add_noise(x0, noise, t)
        guess = x0 + 0.1
        alpha, sigma = (value[:, None] for value in diffusion.alpha_sigma(t))
        implied_noise = (z - alpha * guess) / sigma
        output = {
            "x0": guess,
            "epsilon": implied_noise,
            "v": alpha * implied_noise - sigma * guess,
        }[prediction]
        error = (output - diffusion.targets(x0, noise, t)).square().mean(1)
        errors.append(error * diffusion.loss_weights(t))
    torch.testing.assert_close(errors[0], errors[1])
    torch.testing.assert_close(errors[0], errors[2])


def integrate(diffusion, denoise, z, steps, eta=0.0):
    generator = torch.Generator().manual_seed(5)
    times = diffusion.sampling_grid(steps)
    for t, s in zip(times[:-1], times[1:], strict=True):
        here, there = t.expand(len(z)), s.expand(len(z))
        noise = torch.randn(z.shape, dtype=z.dtype, generator=generator)
        z = diffusion.step(denoise(z, here), z, here, there, eta=eta, noise=noise)
    return z


@pytest.mark.parametrize("schedule", ["cosine", "sigmoid", "rectified_flow", "decoupled"])
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_gaussian_data_with_the_optimal_field_keeps_its_variance(schedule, eta):
    """Data N(0, v): the posterior mean is a v z / (a^2 v + s^2); a correct sampler ends with
    variance v.
    """
    diffusion = process(schedule)
    v = 0.49

    def denoise(z, t):
        alpha, sigma = (value[:, None] for value in diffusion.alpha_sigma(t))
        return alpha * v * z / (alpha**2 * v + sigma**2)

    z = torch.randn(4000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # Ancestral steps put the posterior mean in x0's place, which costs variance of the order of a
    # step.
    out = integrate(diffusion, denoise, z, steps=1000 if eta else 100, eta=eta)
    assert out.var().item() == pytest.approx(v, rel=0.06)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("schedule", "eta"),
    [
        ("cosine", 0.0),
        ("cosine", 0.5),
        ("cosine", 1.0),
        ("decoupled", 1.0),
        ("decoupled", bridge_eta),
    ],
)
def test_one_step_keeps_the_marginal(schedule, eta):
    """With the true x0, a step from q(z_t | x0) lands in q(z_s | x0): mean a_s x0, variance s_s^2,
    for every eta.
    """
    diffusion = process(schedule)
    generator = torch.Generator().manual_seed(1)
    size = 200_000
    x0 = torch.full((size, 1), 1.7, dtype=torch.float64)
    t, s = torch.full((size,), 0.8).double(), torch.full((size,), 0.45).double()
    z = diffusion.add_noise(x0, torch.randn(size, 1, dtype=torch.float64, generator=generator), t)
    out = diffusion.step(
        x0, z, t, s, eta=eta, noise=torch.randn(size, 1, dtype=torch.float64, generator=generator)
    )
    alpha, sigma = diffusion.alpha_sigma(torch.tensor(0.45))
    assert out.mean().item() == pytest.approx(1.7 * alpha.item(), abs=5e-3)
    assert out.std().item() == pytest.approx(sigma.item(), abs=5e-3)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_a_single_data_point_is_found(schedule):
    diffusion = process(schedule)
    point = torch.full((16, 3), 2.5, dtype=torch.float64)
    out = integrate(
        diffusion, lambda z, t: point, torch.randn(16, 3, dtype=torch.float64), steps=7, eta=1.0
    )
    torch.testing.assert_close(out, point, rtol=0, atol=1e-6)


def test_zero_flow_leaves_the_noise():
    diffusion = GaussianProcess("rectified_flow", "flow")
    noise = torch.randn(10, 3, dtype=torch.float64)
    out = integrate(diffusion, lambda z, t: torch.zeros_like(z), noise, steps=9)
    torch.testing.assert_close(out, noise)


def test_copying_the_input_does_not_solve_t2l():
    """The earlier t2l was solved by copying: its target was its input. Here the best scaled copy
    of z leaves a large error."""
    diffusion = GaussianProcess("cosine", "x0")
    x0, noise, t = sample(size=20_000, dim=16, low=0.001, high=1.0)
    z = diffusion.add_noise(x0, noise, t)
    target = diffusion.targets(x0, noise, t)
    best = (z * target).sum() / (z * z).sum()
    assert ((best * z - target) ** 2).mean() > 0.3


# -- DPM-Solver++(2M) -----------------------------------------------------------------------------


def solve(diffusion, denoise, z, steps, method):
    """The last x0 estimate, as samplers return it."""
    previous, grid = None, diffusion.sampling_grid(steps)
    for t, s in zip(grid[:-2], grid[1:-1], strict=True):
        here, there = t.expand(len(z)), s.expand(len(z))
        x0 = denoise(z, here)
        if method == "ddim":
            z = diffusion.step(x0, z, here, there)
        else:
            z, previous = diffusion.multistep(x0, z, here, there, previous), (x0, here)
    return denoise(z, grid[-2].expand(len(z)))


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_2m_is_exact_where_the_estimate_is_constant(schedule, steps):
    point = torch.full((16, 3), 2.5, dtype=torch.float64)
    out = solve(
        process(schedule),
        lambda z, t: point,
        torch.randn(16, 3, dtype=torch.float64),
        steps,
        "2m",
    )
    assert torch.equal(out, point)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_the_first_step_of_2m_is_that_of_ddim(schedule):
    diffusion = process(schedule)
    x0, noise, t = sample(low=0.5, high=0.9)
    z, s = diffusion.add_noise(x0, noise, t), 0.7 * t
    guess = x0 + 0.3 * noise.sin()
    expected = diffusion.step(guess, z, t, s)
    torch.testing.assert_close(diffusion.multistep(guess, z, t, s), expected, rtol=0, atol=1e-12)
    # From pure noise lambda is -inf, so the step after it cannot extrapolate either.
    if schedule != "linear":
        after = diffusion.multistep(guess, z, t, s, (x0 - 1.0, torch.ones_like(t)))
        torch.testing.assert_close(after, expected, rtol=0, atol=1e-12)


def timestep_at(diffusion, log_snr):
    """The t with log(alpha / sigma) = log_snr [N], by bisection."""
    low, high = torch.full_like(log_snr, 1e-9), torch.full_like(log_snr, 1 - 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        alpha, sigma = diffusion.alpha_sigma(middle)
        above = (alpha / sigma).log() > log_snr
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_2m_is_of_second_order(schedule):
    """Gaussian data N(0, v), whose flow is known: z grows like sqrt(a^2 v + s^2).

    Steps even in log(a / s).
    """
    diffusion, v = process(schedule), 0.25

    def variance(t):
        alpha, sigma = (value[:, None] for value in diffusion.alpha_sigma(t))
        return alpha**2 * v + sigma**2

    def error(method, steps):
        z = start = torch.linspace(0.5, 1.5, 20, dtype=torch.float64)[:, None]
        grid, previous = (
            timestep_at(diffusion, torch.linspace(-3, 3, steps + 1, dtype=torch.float64)),
            None,
        )
        for t, s in zip(grid[:-1], grid[1:], strict=True):
            here, there = t.expand(20), s.expand(20)
            x0 = diffusion.alpha_sigma(here)[0][:, None] * v * z / variance(here)
            if method == "ddim":
                z = diffusion.multistep(x0, z, here, there)
            else:
                z, previous = diffusion.multistep(x0, z, here, there, previous), (x0, here)
        return float((z - start * (variance(grid[-1:]) / variance(grid[:1])).sqrt()).norm())

    assert 1.8 < error("ddim", 40) / error("ddim", 80) < 2.2
    assert 3.6 < error("2m", 40) / error("2m", 80) < 4.4


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_2m_needs_fewer_steps_from_pure_noise(schedule):
    diffusion, v = process(schedule), 0.25

    def denoise(z, t):
        alpha, sigma = (value[:, None] for value in diffusion.alpha_sigma(t))
        return alpha * v * z / (alpha**2 * v + sigma**2)

    z = torch.linspace(-2, 2, 50, dtype=torch.float64)[:, None]
    alpha, sigma = diffusion.alpha_sigma(diffusion.sampling_grid(1)[0])
    exact = z * v**0.5 / (alpha**2 * v + sigma**2).sqrt()
    coarse, fine = (
        float((solve(diffusion, denoise, z, steps, method) - exact).norm())
        for method, steps in (("2m", 40), ("ddim", 120))
    )
    assert coarse < fine


def test_the_floor_bounds_the_weights_of_velocity():
    """Default: as before, weights up to 1e6; JiT's 0.05: up to 400.

    Above the floor both are 1 / t^2.
    """
    t = torch.tensor([1e-4, 0.01, 0.05, 0.3, 1.0], dtype=torch.float64)
    assert torch.equal(
        GaussianProcess("rectified_flow", "x0", "velocity").loss_weights(t),
        1 / t.clamp_min(1e-3) ** 2,
    )
    weights = GaussianProcess(
        "rectified_flow", "x0", "velocity", velocity_floor=0.05
    ).loss_weights(t)
    torch.testing.assert_close(
        weights, torch.tensor([400, 400, 400, 1 / 0.09, 1.0], dtype=torch.float64)
    )
    flow = GaussianProcess("rectified_flow", "flow", "velocity", velocity_floor=0.05).loss_weights(
        t
    )
    torch.testing.assert_close(flow[2:], torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("kept", [GaussianProcess(), DecoupledProcess("x0_epsilon")])
def test_a_process_passes_between_processes(kept):
    """Batches carry their process from data workers."""
    t, x = torch.rand(3), torch.randn(3, 4)
    copy = pickle.loads(pickle.dumps(kept))
    assert torch.equal(copy.targets(x, -x, t), kept.targets(x, -x, t))
