"""ReMDM: without remasking it is ancestral sampling; cap and rescale keep the share of masks; loop
holds it.
"""

from __future__ import annotations

import pytest
import torch

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.diffusion.masked import SCHEDULES
from mmldlm.sampling.text.draw import DrawSettings
from mmldlm.sampling.text.loop import sample_text, start_decoding

STEPS, ROWS, LENGTH = 12, 500, 10


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_remasking_it_is_ancestral_sampling_draw_for_draw(toys, schedule):
    options = {
        "num_samples": 30,
        "lengths": torch.arange(30) % 12 + 1,
        "diffusion": MaskedDiffusion(0, schedule),
        "steps": 9,
        "seed": 2,
    }
    model = toys.Noisy(max_seq_len=12)
    plain = sample_text(model, None, sampler="ancestral", **options)
    for remask in ("cap", "rescale"):
        own = {"remask": remask, "remask_eta": 0.0}
        found = sample_text(model, None, sampler="remdm", sampler_options=own, **options)
        assert found.tokens == plain.tokens and found.passes.tolist() == plain.passes.tolist()
    other = {"remask": "cap", "remask_eta": 0.3}
    assert (
        sample_text(model, None, sampler="remdm", sampler_options=other, **options).tokens
        != plain.tokens
    )


def masks_after_each_step(toys, remask, eta, schedule="loglinear"):
    """[STEPS] masked words after each step, of ROWS x (LENGTH - 1), and how often a word was
    masked again.
    """
    model = toys.Noisy(max_seq_len=12)
    strategy = start_decoding(
        "remdm",
        model,
        torch.full((ROWS,), LENGTH),
        range(ROWS),
        diffusion=MaskedDiffusion(0, schedule),
        draw=DrawSettings(),
        seed=1,
        options={"num_steps": STEPS, "remask": remask, "remask_eta": eta},
        shared_schedule=True,
    )
    masks, again = [], 0
    for _ in range(STEPS):
        before = strategy.state.undecided.clone()
        positions = strategy.positions()
        strategy.take_pass(positions, torch.zeros(len(positions), 8))
        masks.append(int(strategy.state.undecided.sum()))
        again += int((strategy.state.undecided & ~before).sum())
    return masks, again, strategy


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("remask, eta", [("cap", 0.2), ("rescale", 0.5)])
def test_cap_and_rescale_mask_as_many_as_the_schedule_says(toys, remask, eta, schedule):
    masks, again, strategy = masks_after_each_step(toys, remask, eta, schedule)
    words, process = ROWS * (LENGTH - 1), strategy.diffusion
    assert again > 200 and masks[-1] == 0
    for k, count in enumerate(masks[:-1]):
        times = torch.tensor([1.0, 1 - (k + 1) / STEPS])
        share = float(process.stay_masked(*times))
        assert abs(count - words * share) < 4.5 * (words * share * (1 - share)) ** 0.5, k


def test_the_loop_holds_a_tenth_masked_in_its_middle_phase(toys):
    masks, again, strategy = masks_after_each_step(toys, "loop", 0.05)
    words = ROWS * (LENGTH - 1)
    assert masks[-1] == 0 and again > 200
    middle = [count / words for k, count in enumerate(masks) if 0.1 < 1 - (k + 1) / STEPS < 0.5]
    assert len(middle) >= 3 and all(abs(share - 0.1) < 0.025 for share in middle)
    assert bool((strategy.state.tokens[:, LENGTH - 1] == toys.EOS).all())
