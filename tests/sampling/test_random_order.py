"""Random orders: one token at a time is the limit of ancestral sampling, and even numbers are
filled.
"""

from __future__ import annotations

import torch

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.diffusion.masked import SCHEDULES
from mmldlm.sampling.text import sample_text


def write(toys, sampler, lengths, process="loglinear", **options):
    spy = toys.Spy()
    found = sample_text(
        toys.Noisy(max_seq_len=12),
        None,
        num_samples=len(lengths),
        lengths=torch.tensor(lengths),
        sampler=sampler,
        diffusion=MaskedDiffusion(0, process),
        sampler_options=options,
        recorder=spy,
        seed=3,
        batch_tokens=10**6,
    )
    return found, spy.seen


def test_one_token_at_a_time_is_ancestral_sampling_in_many_steps_draw_for_draw(toys):
    for process in SCHEDULES:
        limit, _ = write(toys, "ancestral", range(1, 13), process, num_steps=50_000)
        found, _ = write(toys, "scheduled", range(1, 13), process, num_steps=1000)
        assert found.tokens == limit.tokens and found.passes.tolist() == limit.passes.tolist()


def test_one_token_at_a_time_is_filled_in_uniform_order(toys):
    count, words = 1100, 5
    found, seen = write(toys, "scheduled", [words + 1] * count, num_steps=words + 1)
    assert found.passes.tolist() == [words] * count
    for one in seen:
        counts = torch.bincount(one.positions, minlength=words).double()
        # 4 degrees of freedom: 18.5 is the 0.1 % point.
        assert (
            float(counts.sum()) == count
            and float(((counts - count / words) ** 2 / (count / words)).sum()) < 18.5
        )


def test_every_pass_fills_as_many_and_the_eos_counts(toys):
    found, seen = write(toys, "scheduled", [12] * 50, num_steps=3)
    numbers = torch.stack([torch.bincount(one.rows, minlength=50) for one in seen], 1)
    assert found.passes.tolist() == [3] * 50
    # One of the numbers has the EOS, too: with each of the three passes in some text.
    missing = torch.tensor([4, 4, 4]) - numbers
    assert (
        bool((missing.sum(1) == 1).all())
        and bool((missing >= 0).all())
        and bool((missing.sum(0) > 3).all())
    )


def test_no_text_takes_more_passes_than_steps_or_words(toys):
    lengths = [length % 12 + 1 for length in range(40)]
    for steps in (1, 3, 8):
        for sampler in ("ancestral", "scheduled"):
            found, _ = write(toys, sampler, lengths, num_steps=steps)
            assert int(found.passes.max()) <= steps and bool(
                (found.passes <= found.lengths - 1).all()
            )
