"""Best of N: candidates of their own numbers, chosen by the judge alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mmldlm.errors import MmldlmError
from mmldlm.inference.judges import best_of, candidate, write_candidate
from mmldlm.sampling.decoding import most_probable_lengths
from mmldlm.sampling.judge import cosines
from mmldlm.tasks.registry import find_task


def search(pretrained, hidden, judge, count=7, **options):
    return best_of(pretrained, hidden[1], judge, num_candidates=count, num_steps=3, **options)


def test_the_nearest_candidate_is_kept(pretrained, hidden, judge, new_judge):
    found, targets = search(pretrained, hidden, judge), hidden[1].numpy()
    lengths, written = most_probable_lengths(pretrained.model, hidden[1], 3)[0], []
    for k in range(7):
        texts = write_candidate(pretrained, hidden[1], k, lengths, 0, {"num_steps": 3}).tokens
        written.append(cosines(new_judge().embed(texts), targets))
    np.testing.assert_allclose(found.cosine, np.max(written, axis=0), atol=1e-6)
    np.testing.assert_allclose(
        cosines(new_judge().embed(found.tokens), targets), found.cosine, atol=1e-6
    )


def test_more_candidates_are_never_worse_and_cost_no_more_calls_than_candidates(
    pretrained, hidden, new_judge
):
    best = np.full(5, -np.inf)
    for count in (1, 2, 5, 9):
        found = search(pretrained, hidden, new_judge(), count)
        assert (found.cosine >= best).all() and (found.calls <= count).all()
        best = found.cosine


def test_one_candidate_is_the_text_of_plain_sampling(pretrained, hidden, judge):
    found, task = search(pretrained, hidden, judge, 1, seed=3), pretrained.task
    plain = task.write_texts(
        pretrained, hidden[1], sampler=task.samplers["l2t"][0], num_steps=3, seed=3
    )
    assert found.tokens == plain.tokens


def test_a_nucleus_is_that_of_the_candidates_that_are_drawn(pretrained, hidden, new_judge):
    one, same = (search(pretrained, hidden, new_judge(), 1, top_p=p).tokens for p in (1.0, 0.3))
    assert one == same
    wide, narrow = (search(pretrained, hidden, new_judge(), 7, top_p=p) for p in (1.0, 0.3))
    assert wide.tokens != narrow.tokens


def test_no_result_depends_on_the_batch_or_on_other_latents(pretrained, hidden, new_judge):
    together = search(pretrained, hidden, new_judge())
    small = search(pretrained, hidden, new_judge(), batch_tokens=16)
    assert small.tokens == together.tokens
    first = search(pretrained, (None, hidden[1][:2]), new_judge())
    assert first.tokens == together.tokens[:2]


def test_a_task_that_chooses_lengths_itself_draws_its_candidates():
    plans = [candidate(find_task("ar"), k) for k in range(6)]
    assert plans[0].sampler == "greedy" and {plan.sampler for plan in plans[1:]} == {"ancestral"}
    assert all(plan.length_rank is None for plan in plans) and plans[1].temperature == 0.5
    masked = [candidate(find_task("mdlm"), k) for k in range(6)]
    assert [plan.length_rank for plan in masked] == [None, 0, 1, 2, 0, 1]


def test_the_cost_is_that_of_all_candidates(pretrained, hidden, judge):
    found = search(pretrained, hidden, judge, 3)
    cost = found.cost.per_text()
    assert cost["denoiser_rows"] == pytest.approx(3 * 3, rel=0.5) and cost["judge"] == "bag"
    assert found.cost.judge_calls == judge.num_calls <= found.calls.sum()
    assert found.cost.depth == 3 + 1 and found.cost.denoiser_flops > 0


def test_nan_embeddings_end_the_search(pretrained, hidden, judge):
    judge.vectors[:] = np.nan
    with pytest.raises(MmldlmError, match="NaN"):
        search(pretrained, hidden, judge)


def test_nan_weights_end_the_search(pretrained, hidden, judge):
    model = pretrained.model
    broken = type(model)(model.config).eval()
    broken.load_state_dict(model.state_dict())
    torch.nn.init.constant_(broken.text_head.bias, torch.nan)
    with pytest.raises(MmldlmError, match="NaN"):
        search(dataclasses.replace(pretrained, model=broken), hidden, judge)
