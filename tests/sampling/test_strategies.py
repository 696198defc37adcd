"""One table of invariants over all strategies: exact laws, bounds on passes, and what must never
happen.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.diffusion.masked import SCHEDULES
from mmldlm.errors import MmldlmError, UserError
from mmldlm.sampling.settings import (
    BY_CERTAINTY,
    BY_CHANCE,
    MASKED_SAMPLERS,
    STRATEGY_OPTIONS,
    DrawSettings,
)
from mmldlm.sampling.strategies import STRATEGIES
from mmldlm.sampling.text import Denoiser, sample_text, start_decoding

NAMES = list(STRATEGIES)
# Options with which a sampler fills one token a pass, and all tokens at once.
SINGLE = {
    "confidence": {"num_steps": 12},
    "threshold": {"threshold": 1.01},
    "ancestral": {"num_steps": 400},
    "scheduled": {"num_steps": 12},
}
AT_ONCE = {
    **dict.fromkeys(("confidence", "ancestral", "scheduled"), {"num_steps": 1}),
    "threshold": {"threshold": 0.0},
}


def write(model, sampler, **options):
    shared = {"diffusion": MaskedDiffusion(model.config.mask_token_id), "temperature": 1.0}
    return sample_text(model, None, sampler=sampler, **{**shared, **options})


def test_the_names_without_torch_are_those_of_the_strategies():
    assert {*BY_CERTAINTY, *BY_CHANCE} == set(STRATEGIES)
    assert {name: kind.settings_class for name, kind in STRATEGIES.items()} == MASKED_SAMPLERS
    assert {
        key for strategy in STRATEGIES.values() for key in strategy.option_names()
    } == STRATEGY_OPTIONS


@pytest.mark.parametrize("sampler", NAMES)
def test_one_token_a_pass_of_a_perfect_denoiser_has_the_exact_law(toys, sampler):
    model, count = toys.Enumerable(), 1000
    options = {"num_samples": count, "lengths": torch.full((count,), 4), "batch_tokens": 16000}
    found = write(model, sampler, sampler_options=SINGLE[sampler], **options)
    assert model.chi_square(found.tokens) < 54
    if sampler != "ancestral":
        assert found.passes.tolist() == [3] * count


@pytest.mark.parametrize("sampler", list(AT_ONCE))
def test_all_at_once_is_exact_where_tokens_are_independent_and_only_there(toys, sampler):
    count = 1000
    options = {"num_samples": count, "lengths": torch.full((count,), 4), "batch_tokens": 16000}
    for independent in (True, False):
        model = toys.Enumerable(independent)
        found = write(model, sampler, sampler_options=AT_ONCE[sampler], **options)
        assert found.passes.tolist() == [1] * count
        assert (model.chi_square(found.tokens) < 54) == independent


@pytest.mark.parametrize("sampler", BY_CERTAINTY)
def test_likelihoods_of_a_deterministic_order_sum_to_one(toys, sampler):
    """Teacher-forced: product over passes of p(token | what stands), also with defaults, spacing
    and distinct.
    """
    model, diffusion = toys.Noisy(max_seq_len=4), MaskedDiffusion(toys.MASK)
    truth = torch.tensor([[*text, toys.EOS] for text in itertools.product(range(3, 8), repeat=3)])
    for options in (SINGLE[sampler], AT_ONCE[sampler], {}, {"spacing": 2}, {"distinct": True}):
        strategy = start_decoding(
            sampler,
            model,
            torch.full((125,), 4),
            range(125),
            diffusion=diffusion,
            draw=DrawSettings(),
            seed=0,
            options=options,
        )
        denoiser, total = Denoiser(model, None), torch.zeros(125, dtype=torch.float64)
        while len(positions := strategy.positions()):
            logits = denoiser(strategy.state, strategy.timesteps(), positions)
            strategy.prepare(positions, logits)
            chosen = strategy.choose(positions, logits)
            at, tokens = positions[chosen], truth.flatten()[positions[chosen]]
            own = logits[chosen].double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            total.index_add_(0, at // 4, own)
            strategy.commit(at, tokens)
        assert float(total.exp().sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("sampler", NAMES)
def test_a_certain_model_gets_back_its_text_at_once_where_passes_adapt(toys, sampler):
    texts = [[3, 4, 5], [7], [6, 6, 3, 4, 7, 5, 3], [5, 4], []]
    latents = torch.zeros(5, 4)
    latents[:, 0] = torch.arange(5)
    found = sample_text(
        toys.Perfect(texts), latents, diffusion=MaskedDiffusion(toys.MASK), sampler=sampler
    )
    assert found.tokens == texts
    if sampler == "threshold":
        assert found.passes.tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("sampler", NAMES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_model_sees_only_pairs_of_state_and_time_of_training(toys, sampler, schedule):
    """The noiser masks k of L tokens, EOS counted, and gives the time of k / L
    (masking=fixed_count).
    """
    model, diffusion = toys.Noisy(max_seq_len=12), MaskedDiffusion(toys.MASK, schedule)
    lengths = torch.tensor([1, 2, 5, 12, 12])
    found = write(model, sampler, num_samples=5, lengths=lengths, diffusion=diffusion)
    assert len(model.asked) >= int(found.passes.max()) > 0
    for tokens, t, real in model.asked:
        masked = ((tokens == toys.MASK) & real).sum(1)
        assert bool((masked >= 1).all()) and not bool((tokens == toys.MASK)[~real].any())
        torch.testing.assert_close(t, diffusion.timestep_of(masked / real.sum(1)).float())


@pytest.mark.parametrize("sampler", NAMES)
def test_passes_and_log_probabilities_are_reported_and_each_position_is_written_once(
    toys, sampler
):
    model, spy, indices = toys.Noisy(max_seq_len=12), toys.Spy(), (7, 3, 5, 0)
    lengths = torch.tensor([4, 9, 1, 12])
    options = {"num_samples": 4, "lengths": lengths, "indices": indices, "presence_penalty": 1.0}
    found = write(model, sampler, with_log_probabilities=True, recorder=spy, **options)
    plain = write(model, sampler, **options)
    assert found.tokens == plain.tokens and found.passes.tolist() == plain.passes.tolist()
    assert found.passes[2] == 0 and found.num_rows == int(found.passes.sum())
    assert bool((found.passes <= lengths - 1).all())
    filled = {index: {} for index in indices}
    for one in spy.seen:
        for row, position, log_probabilities in zip(
            one.rows.tolist(), one.positions.tolist(), one.log_probabilities.tolist()
        ):
            assert one.before[row, position] == toys.MASK
            place, token = filled[one.samples[row]], int(one.after[row, position])
            assert position not in place
            place[position] = token, log_probabilities[token]
    for index, text, values in zip(indices, found.tokens, found.log_probabilities):
        assert [filled[index][place][0] for place in range(len(text))] == text
        assert [filled[index][place][1] for place in range(len(text))] == pytest.approx(
            values.tolist()
        )


@pytest.mark.parametrize("sampler", NAMES)
def test_batches_change_nothing_and_seeds_do(toys, sampler):
    model = toys.Noisy(max_seq_len=12)
    big, small, other = (
        write(model, sampler, num_samples=12, batch_tokens=size, seed=seed)
        for size, seed in ((10_000, 4), (1, 4), (10_000, 5))
    )
    assert big.tokens == small.tokens and big.passes.tolist() == small.passes.tolist()
    assert big.tokens != other.tokens


@pytest.mark.parametrize("sampler", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_special_tokens_are_not_drawn_and_nan_is_an_error(toys, sampler, temperature):
    class Wrong(toys.Toy):
        value = 100.0

        def logits(self, tokens, latents, t, real):
            out = torch.zeros(*tokens.shape, 8)
            out[..., :3] = self.value
            return out if self.value == 100 else out.fill_(self.value)

    model = Wrong()
    found = write(model, sampler, num_samples=20, temperature=temperature)
    assert {token for text in found.tokens for token in text} <= set(range(3, 8))
    assert [len(text) + 1 for text in found.tokens] == found.lengths.tolist()
    model.value = float("nan")
    with pytest.raises(MmldlmError, match="NaN"):
        write(model, sampler, num_samples=20, temperature=temperature)


@pytest.mark.parametrize("sampler", NAMES)
def test_drafts_are_filled_and_kept(toys, sampler):
    drafts = torch.tensor([[3, 0, 4, 2, 1], [0, 0, 0, 0, 2], [5, 6, 7, 3, 2]])
    found = write(
        toys.Noisy(max_seq_len=12),
        sampler,
        num_samples=3,
        lengths=torch.tensor([4, 5, 5]),
        drafts=drafts,
    )
    assert found.tokens[0][::2] == [3, 4] and found.tokens[2] == [5, 6, 7, 3]
    assert all(toys.MASK not in text for text in found.tokens)
    assert found.passes[2] == 0 and found.passes[0] == 1


def test_guidance_does_not_choose_positions(toys):
    """Given, the model is surer of the left; guided, of the right.

    Guided tokens are written from the left.
    """

    class Two(toys.Toy):
        def logits(self, tokens, latents, t, real):
            out = torch.zeros(*tokens.shape, 8)
            out[:, 0, 3], out[:, 1, 3] = (2.0, 1.0) if latents is not None else (2.0, -5.0)
            return out

    spy = toys.Spy()
    for guidance in (1.0, 3.0):
        sample_text(
            Two(),
            torch.zeros(1, 4),
            lengths=torch.tensor([3]),
            diffusion=MaskedDiffusion(0),
            steps=2,
            guidance=guidance,
            recorder=spy,
        )
    assert [one.positions.tolist() for one in spy.seen] == [[0], [1]] * 2


@pytest.mark.parametrize(
    "sampler, options, named",
    [
        ("confidence", {"threshold": 0.9}, "threshold"),
        ("threshold", {"num_steps": 4}, "num_steps"),
        ("ancestral", {"spacing": 2}, "spacing"),
        ("scheduled", {"distinct": True}, "distinct"),
        ("threshold", {"threshold": -1.0}, "--threshold of at least 0"),
        ("threshold", {"threshold": float("nan")}, "--threshold"),
        ("confidence", {"num_steps": 0}, "--num-steps"),
        ("threshold", {"spacing": 0}, "--spacing"),
    ],
)
def test_options_that_a_sampler_does_not_read_or_cannot_use_are_refused(
    toys, sampler, options, named
):
    with pytest.raises(UserError, match=named):
        write(toys.Noisy(max_seq_len=12), sampler, num_samples=1, sampler_options=options)
