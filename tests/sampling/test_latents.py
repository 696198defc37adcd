"""Samplers of latents: known fields, single points, determinism."""

from __future__ import annotations

import pytest
import torch

from mmldlm.diffusion import DecoupledProcess, GaussianProcess, MaskedDiffusion
from mmldlm.errors import MmldlmError, UserError
from mmldlm.sampling.joint import sample_joint
from mmldlm.sampling.latents import LatentSolver, pad_texts, sample_latents, steps_given_text
from mmldlm.utils.counter_rng import Stream, normals

PAIRS = [
    ("cosine", "x0"),
    ("cosine", "v"),
    ("cosine", "epsilon"),
    ("linear", "x0"),
    ("linear", "epsilon"),
    ("linear", "v"),
    ("sigmoid", "x0"),
    ("sigmoid", "v"),
    ("rectified_flow", "flow"),
    ("rectified_flow", "x0"),
    ("decoupled", "x0"),
    ("decoupled", "epsilon"),
    ("decoupled", "x0_epsilon"),
]


def process(path, prediction):
    """The latent process of a path."""
    if path == "decoupled":
        return DecoupledProcess(prediction)
    return GaussianProcess(path, prediction)


def field_model(toys, diffusion, x0_of, **shape):
    """A network whose output, in the space of the prediction, stands for the x0 estimate x0_of(z,
    alpha, sigma).
    """

    class Field(toys.Toy):
        def prediction(self, tokens, z, t):
            alpha, sigma = (value[:, None] for value in diffusion.alpha_sigma(t))
            x0 = x0_of(z.double(), alpha, sigma)
            noise = (z.double() - alpha * x0) / sigma
            return diffusion.targets(x0, noise, t).float()

    return Field(**shape)


def test_one_step_suffices_where_x0_is_defined_at_pure_noise():
    assert (
        steps_given_text(GaussianProcess("cosine", "x0"))
        == steps_given_text(GaussianProcess("cosine", "v"))
        == 1
    )
    assert steps_given_text(GaussianProcess("cosine", "epsilon")) == 10


METHODS = [("ddim", 0.0), ("ddim", 1.0), ("dpm++2m", 0.0)]


@pytest.mark.parametrize(
    "path,prediction,method,eta",
    [(*pair, *method) for pair in PAIRS for method in METHODS]
    + [(*pair, "ddim", "bridge") for pair in PAIRS if pair[0] == "decoupled"],
)
def test_single_data_point_comes_out(toys, path, prediction, method, eta):
    diffusion = process(path, prediction)
    point = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    model = field_model(toys, diffusion, lambda z, a, s: point.expand_as(z), mean=2.0, std=3.0)
    found = sample_latents(
        model, None, num_samples=5, diffusion=diffusion, steps=6, method=method, eta=eta
    )
    torch.testing.assert_close(found.double(), (point * 3 + 2).expand(5, 4), rtol=0, atol=2e-3)


def variance(toys, path, prediction, steps, **options):
    diffusion = process(path, prediction)
    # Optimal field of N(0, 1) data.
    model = field_model(toys, diffusion, lambda z, a, s: a * z / (a**2 + s**2), latent_dim=200)
    found = sample_latents(
        model, None, num_samples=100, diffusion=diffusion, steps=steps, **options
    )
    noise = normals(0, Stream.LATENT, range(100), (1 + (steps if options.get("eta") else 0), 200))[
        :, 0
    ]
    return float(found.double().var() / noise.double().var())


@pytest.mark.parametrize(
    "path,prediction", [("cosine", "x0"), ("cosine", "v"), ("rectified_flow", "flow")]
)
def test_gaussian_data_keeps_its_variance_and_the_error_is_first_order(toys, path, prediction):
    coarse, fine = (variance(toys, path, prediction, steps) - 1 for steps in (50, 100))
    assert abs(coarse) < 0.06
    assert 1.6 < coarse / fine < 2.4


def test_heun_is_second_order_on_the_straight_path(toys):
    errors = [
        abs(variance(toys, "rectified_flow", "flow", steps, method="heun") - 1)
        for steps in (10, 20)
    ]
    euler = abs(variance(toys, "rectified_flow", "flow", 20) - 1)
    assert errors[1] < euler / 3
    assert errors[0] / errors[1] > 2.5
    assert abs(variance(toys, "rectified_flow", "flow", 50, method="heun") - 1) < 0.02


def test_ancestral_noise_keeps_the_variance_too(toys):
    assert abs(variance(toys, "cosine", "x0", 100, eta=1.0) - 1) < 0.1


@pytest.mark.parametrize("method", ["ddim", "heun"])
def test_flow_network_of_zeros_returns_the_noise(toys, method):
    diffusion = GaussianProcess("rectified_flow", "flow")
    found = sample_latents(
        toys.Toy(), None, num_samples=6, diffusion=diffusion, steps=9, method=method, seed=3
    )
    torch.testing.assert_close(
        found, normals(3, Stream.LATENT, range(6), (1, 4))[:, 0], rtol=0, atol=1e-5
    )


def test_same_seed_same_latents_whatever_the_batch(toys):
    diffusion = GaussianProcess("cosine", "x0")

    class Reads(toys.Toy):
        def prediction(self, tokens, z, t):
            return 0.5 * z + (tokens * (tokens > 2)).sum(1, keepdim=True) * 0.1

    texts = [[3] * (1 + i % 5) for i in range(17)]
    options = {"diffusion": diffusion, "steps": 4, "eta": 0.5}
    big = sample_latents(Reads(), texts, batch_tokens=10_000, **options)
    small = sample_latents(Reads(), texts, batch_tokens=1, **options)
    torch.testing.assert_close(big, small, rtol=0, atol=1e-6)
    assert not torch.equal(big, sample_latents(Reads(), texts, seed=1, **options))


def test_guidance_extrapolates_from_the_null_text(toys):
    class Two(toys.Toy):
        def prediction(self, tokens, z, t):
            return torch.full_like(z, 1.0 if tokens is not None else 0.25)

    found = sample_latents(Two(), [[3]], diffusion=GaussianProcess(), steps=3, guidance=3.0)
    torch.testing.assert_close(found, torch.full((1, 4), 0.25 + 3 * 0.75))


def test_renormalised_and_unit_latents(toys):
    diffusion = GaussianProcess("cosine", "x0")
    seen = []

    class Half(toys.Toy):
        def prediction(self, tokens, z, t):
            seen.append(z.clone())
            return torch.full_like(z, 0.3)

    model = Half(mean=0.1, std=0.5)
    plain = sample_latents(
        model, None, num_samples=2, diffusion=diffusion, steps=3, renormalize=True
    )
    # The last estimate is returned as it is.
    torch.testing.assert_close(plain, torch.full((2, 4), 0.25))
    on_sphere = (torch.full((4,), 0.5) - 0.1) / 0.5  # raw (0.5, 0.5, 0.5, 0.5) has norm 1
    start = normals(0, Stream.LATENT, range(2), (1, 4))[:, 0]
    alpha, sigma = (
        float(value) for value in diffusion.alpha_sigma(torch.tensor([2 / 3], dtype=torch.float64))
    )
    # The state after one step, whose samples a batch may hold in another order.
    state = seen[1][seen[1][:, 0].argsort()]
    expected = alpha * on_sphere + sigma * start
    torch.testing.assert_close(state, expected[expected[:, 0].argsort()], rtol=0, atol=1e-5)
    unit = sample_latents(
        model, None, num_samples=2, diffusion=diffusion, steps=3, renormalize=True, unit=True
    )
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(2))


def test_nan_is_an_error_and_nothing_is_put_in_its_place(toys):
    class Broken(toys.Toy):
        def prediction(self, tokens, z, t):
            return z * float("nan")

    class Words(Broken):
        def logits(self, tokens, latents, t, real):
            return torch.zeros(*tokens.shape, self.config.vocab_size)

    with pytest.raises(MmldlmError, match="NaN"):
        sample_latents(Broken(), None, num_samples=2, diffusion=GaussianProcess(), steps=3)
    processes = {
        "text_diffusion": MaskedDiffusion(Broken().config.mask_token_id),
        "latent_diffusion": GaussianProcess(),
    }
    with pytest.raises(MmldlmError, match="infinite latents"):
        sample_joint(Words(), 2, steps=3, **processes)


def test_heun_belongs_to_rectified_flow(toys):
    with pytest.raises(ValueError, match="heun"):
        sample_latents(
            toys.Toy(), None, num_samples=1, diffusion=GaussianProcess("cosine"), method="heun"
        )


def test_2m_keeps_the_unit_sphere_and_is_closer_than_ddim(toys):
    """Every estimate that a step uses is on the sphere; on Gaussian data 2M needs fewer steps."""
    coarse, first = (
        abs(variance(toys, "cosine", "x0", 20, method=method) - 1)
        for method in ("dpm++2m", "ddim")
    )
    assert coarse < first / 3
    norms = []

    class Watched(toys.Toy):
        def scale_latents(self, raw):
            norms.extend(raw.norm(dim=-1).tolist())
            return super().scale_latents(raw)

        def prediction(self, tokens, z, t):
            return 0.3 + 0.1 * z

    sample_latents(
        Watched(),
        None,
        num_samples=2,
        diffusion=GaussianProcess(),
        steps=5,
        method="dpm++2m",
        renormalize=True,
    )
    assert len(norms) == 8 and norms == pytest.approx([1.0] * 8)


def test_methods_refuse_noise_that_they_do_not_take(toys):
    for process, method, eta, match in (
        (GaussianProcess(), "dpm++2m", 0.5, "takes no noise"),
        (GaussianProcess("rectified_flow", "flow"), "heun", 1.0, "takes no noise"),
        (GaussianProcess(), "ddim", "bridge", "schedule=decoupled"),
    ):
        with pytest.raises(UserError, match=match):
            sample_latents(
                toys.Toy(), None, num_samples=1, diffusion=process, steps=2, method=method, eta=eta
            )


def test_texts_are_closed_with_eos_and_padded(toys):
    tokens, real = pad_texts([[5, 6, 7], [4]], toys.EOS, toys.PAD)
    assert tokens.tolist() == [[5, 6, 7, toys.EOS], [4, toys.EOS, toys.PAD, toys.PAD]]
    assert real.tolist() == [[True] * 4, [True, True, False, False]]


class Several:
    """Shape of a toy model of three latents a sample."""

    @staticmethod
    def of(toy):
        toy.config.num_latents, toy.config.rows_per_latent = 3, 1
        return toy


@pytest.mark.parametrize("method", ["ddim", "dpm++2m", "heun"])
def test_several_latents_are_solved_as_each_by_itself(toys, method):
    """[B, N, D] goes through every solver; where latents do not see each other, each goes as if it
    were alone.
    """
    diffusion = GaussianProcess("rectified_flow", "x0")

    class Shrinks(toys.Toy):
        def prediction(self, tokens, z, t):
            return 0.5 * z / (1 + t.to(z).reshape(-1, *(1,) * (z.dim() - 1)))

    options = {"diffusion": diffusion, "steps": 4, "method": method}
    found = sample_latents(Several.of(Shrinks()), None, num_samples=5, batch_tokens=8, **options)
    assert found.shape == (5, 3, 4)
    solver, z = (
        LatentSolver(diffusion, 4, method),
        normals(0, Stream.LATENT, range(5), (1, 3, 4))[:, 0].flatten(0, 1),
    )
    alone = Shrinks()
    for k in range(4):
        z = solver.step(k, z, lambda z, t: alone.prediction(None, z, torch.full((len(z),), t)))
    torch.testing.assert_close(found.flatten(0, 1), z)


def test_guidance_in_an_interval_leaves_the_other_steps_alone(toys):
    seen = []

    class Two(toys.Toy):
        def prediction(self, tokens, z, t):
            seen.append((tokens is not None, float(t[0])))
            return torch.full_like(z, 1.0 if tokens is not None else 0.25)

    options = {"diffusion": GaussianProcess(), "steps": 4, "guidance": 3.0}
    part = sample_latents(Two(), [[3]], guidance_interval=(0.4, 0.8), **options)
    # Of t = 1, .75, .5, .25.
    assert [t for given, t in seen if not given] == [0.75, 0.5] and len(seen) == 6
    torch.testing.assert_close(part, torch.ones(1, 4))  # the last estimate has none
    whole = sample_latents(Two(), [[3]], guidance_interval=(0, 1), **options)
    assert torch.equal(whole, sample_latents(Two(), [[3]], **options))


# Of two steps, at 1 and 0.5.
@pytest.mark.parametrize(
    "guidance,interval",
    [(1.0, (0.0, 0.9)), (2.0, (0.9, 0.1)), (2.0, (0.5, 1.5)), (2.0, (0.6, 0.9))],
)
def test_an_interval_without_guidance_is_an_error(toys, guidance, interval):
    with pytest.raises(UserError, match="--guidance-interval"):
        sample_latents(
            toys.Toy(),
            [[3]],
            diffusion=GaussianProcess(),
            steps=2,
            guidance=guidance,
            guidance_interval=interval,
        )


@pytest.mark.parametrize("method", ["ddim", "dpm++2m", "heun"])
def test_estimates_are_clamped_to_the_range_of_the_data(toys, method):
    """In the encoder's space, at every step, and in the samples themselves."""
    states = []

    class Far(toys.Toy):
        def prediction(self, tokens, z, t):
            states.append((float(t[0]), z.clone()))
            return torch.full_like(z, 9.0)  # raw: 0.1 + 0.5 * 9

    diffusion = GaussianProcess("rectified_flow", "x0")
    options = {"diffusion": diffusion, "steps": 3, "method": method, "num_samples": 2}
    found = sample_latents(Far(mean=0.1, std=0.5), None, clamp=1.0, **options)
    torch.testing.assert_close(found, torch.ones(2, 4))
    start = normals(0, Stream.LATENT, range(2), (1, 4))[:, 0]
    for (
        t,
        z,
    ) in states:
        # On the straight path the state is t * noise + (1 - t) * the clamped estimate of 1.8.
        expected = (1 - t) * torch.full((2, 4), 1.8) + t * start
        torch.testing.assert_close(z.sort(0).values, expected.sort(0).values, rtol=0, atol=1e-5)
    free = sample_latents(Far(mean=0.1, std=0.5), None, **options)
    torch.testing.assert_close(free, torch.full((2, 4), 4.6))
