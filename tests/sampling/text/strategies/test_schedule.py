"""Schedules of tokens per pass: scaling, files, refusals."""

from __future__ import annotations

import json

import pytest
import torch

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.errors import UserError
from mmldlm.sampling.text.loop import sample_text
from mmldlm.sampling.text.strategies.schedule import filled_after, read_schedule
from tests.trials.test_config_values import SCHEDULES


def test_numbers_are_scaled_to_the_text_and_end_at_all_of_it():
    counts = torch.tensor([8, 15, 1, 0, 30])
    filled = filled_after([1, 2, 4, 8], counts, counts + 1)
    assert filled[1].tolist() == [1, 3, 7, 15] and filled[4].tolist() == [2, 6, 14, 30]
    assert filled[:, -1].tolist() == counts.tolist()
    assert bool((filled.diff(dim=1) >= 0).all())


def test_a_mapping_gives_the_nearest_length_its_numbers():
    by_length = {4: [4], 9: [3, 6], 11: [1, 1, 9]}
    filled = filled_after(by_length, torch.tensor([4, 9, 10, 40]), torch.tensor([4, 9, 10, 40]))
    assert filled[0].tolist() == [4, 4, 4] and filled[1].tolist() == [3, 9, 9]
    assert filled[2].tolist() == [3, 10, 10] and filled[3].tolist() == [4, 7, 40]


def test_lists_and_files_are_read(tmp_path):
    assert read_schedule("1,2,4") == [1, 2, 4]
    for name, values in (("a", [2, 3]), ("b", {"4": [1, 3], "9": [9]})):
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    assert read_schedule(str(tmp_path / "a.json")) == [2, 3]
    assert read_schedule(str(tmp_path / "b.json")) == {4: [1, 3], 9: [9]}


@pytest.mark.parametrize(
    "text", ["[]", "{}", "[0, 0]", "[-1, 2]", '{"a": [1]}', '["x"]', "3", "{"]
)
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match="--schedule 1,2,4,8"):
        read_schedule(str(tmp_path / "x.json"))


@pytest.mark.parametrize("word", ["1,x", "", "0,0", "nan,1", "missing.json", "-1,3"])
def test_other_words_are_refused(word):
    with pytest.raises(UserError, match="--schedule 1,2,4,8"):
        read_schedule(word)


def test_confidence_fills_by_a_schedule(toys):
    lengths = torch.tensor([9, 12])
    found = sample_text(
        toys.Noisy(max_seq_len=12),
        None,
        num_samples=2,
        lengths=lengths,
        diffusion=MaskedDiffusion(0),
        sampler_options={"schedule": [1, 1, 6]},
    )
    assert found.passes.tolist() == [3, 3]


@pytest.mark.parametrize("content", SCHEDULES)
def test_a_file_that_cannot_be_used_is_refused(content, tmp_path):
    """trials-3 BAD 20."""
    path = tmp_path / "s.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="s.json"):
        read_schedule(str(path), 1)
