"""Config of GIDD: what it does not read is an error, and what its weights mean."""

from __future__ import annotations

import pytest

from mmldlm.errors import UserError
from mmldlm.tasks.registry import load_config


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.causal=true", "causal"),
        ("model.extra_input_tokens=3", "extra_input_tokens"),
        ("text_diffusion.uniform_share=1", "uniform_share"),
        ("text_diffusion.gamma=2.5", "gamma"),
        ("text_diffusion.eps=0.1", "eps"),
        ("loss.text_candidates=5", "text_candidates"),
        ("training.condition_dropout=0.1", "condition_dropout"),
        ("loss.text_weighting=uniform", "text_weighting"),
    ],
)
def test_keys_that_the_task_does_not_read_are_errors(word, message):
    with pytest.raises(UserError, match=message) as error:
        load_config("gidd", None, [word])
    assert error.value.exit_code == 2


def test_the_largest_weight_is_that_of_the_weighting():
    assert load_config("gidd", None, []).loss.largest_weight == 2.0
    assert load_config("gidd", None, ["loss.text_weighting=clip"]).loss.largest_weight == 1.0
    words = ["loss.text_weighting=clip", "loss.text_weight_clip=5"]
    assert load_config("gidd", None, words).loss.largest_weight == 5.0
    with pytest.raises(UserError, match="text_weight_clip"):
        load_config("gidd", None, ["loss.text_weighting=elbo", "loss.text_weight_clip=5"])
