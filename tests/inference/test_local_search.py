"""Local search: never worse, never over its budget, distinct, the same for any batch."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

from mmldlm.errors import MmldlmError
from mmldlm.inference import edits
from mmldlm.inference import local_search as module
from mmldlm.inference.judges import T2lJudge, best_of
from mmldlm.inference.local_search import LocalSearchSettings, local_search
from mmldlm.sampling.judge import cosines


@pytest.fixture(autouse=True, scope="module")
def few_edits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            edits.Editor, "most", {edits.SUBSTITUTE: 20, edits.INSERT: 8, edits.DELETE: 6}
        )
        yield


def search(pretrained, hidden, judge, **settings):
    options = {key: settings.pop(key) for key in ("seed", "batch_tokens") if key in settings}
    return local_search(
        pretrained,
        hidden[1],
        judge,
        settings=LocalSearchSettings(**settings),
        num_steps=3,
        **options,
    )


@pytest.fixture(scope="module")
def searched(pretrained, hidden, new_judge):
    judge = new_judge()
    return search(pretrained, hidden, judge, judge_calls=40), judge


def test_a_longer_search_is_never_worse_and_the_budget_is_never_exceeded(
    pretrained, hidden, new_judge, searched
):
    best = np.full(5, -np.inf)
    for calls in (1, 3, 10):
        found = search(pretrained, hidden, new_judge(), judge_calls=calls)
        assert (found.cosine >= best).all() and (found.calls <= calls).all()
        best = found.cosine
    assert (searched[0].cosine >= best).all() and (searched[0].calls <= 40).all()


def test_the_cosine_is_that_of_the_text(pretrained, hidden, searched, new_judge):
    found = searched[0]
    np.testing.assert_allclose(
        cosines(new_judge().embed(found.tokens), hidden[1].numpy()), found.cosine, atol=1e-6
    )


def test_the_search_helps(pretrained, hidden, searched, new_judge):
    start = search(pretrained, hidden, new_judge(), judge_calls=4).cosine
    assert searched[0].cosine.mean() >= start.mean() + 0.1


def test_log_ratios_of_edits_count_as_much_as_is_asked(pretrained, hidden, new_judge, searched):
    assert (searched[0].score == searched[0].cosine).all()
    best, gained = np.full(5, -np.inf), []
    for calls in (1, 12, 40):
        found = search(pretrained, hidden, new_judge(), judge_calls=calls, cosine_a_nat=0.01)
        assert (found.score >= best).all()
        best = found.score
        gained.append((found.score - found.cosine).mean() / 0.01)
    assert gained[0] == 0  # a written text has no edits
    assert gained[2] > 0 and found.tokens != searched[0].tokens
    assert found.cosine.mean() < searched[0].cosine.mean()


def test_no_text_is_judged_twice(searched, pretrained):
    found, judge = searched
    assert found.calls.sum() >= judge.num_calls == len(judge.asked) == found.cost.judge_calls


def test_where_edits_lead_no_further_new_texts_are_written(
    pretrained, hidden, new_judge, monkeypatch
):
    monkeypatch.setattr(
        edits.Editor, "most", {edits.SUBSTITUTE: 1, edits.INSERT: 1, edits.DELETE: 1}
    )
    found = search(pretrained, hidden, new_judge(), judge_calls=40)
    assert (found.calls == 40).all()
    written = best_of(pretrained, hidden[1], new_judge(), num_candidates=8, num_steps=3)
    assert (found.cosine >= written.cosine).all()


def test_members_of_a_beam_are_distinct(pretrained, hidden, judge, monkeypatch):
    seen = []
    take_round = module._take_editing_round
    monkeypatch.setattr(
        module, "_take_editing_round", lambda *given: (take_round(*given), seen.append(given[2]))
    )
    search(pretrained, hidden, judge, judge_calls=24, beam=3)
    beams = [beam for beams in seen for beam in beams]
    assert any(len(beam.members) == 3 for beam in beams)
    for beam in beams:
        assert len({member.text for member in beam.members}) == len(beam.members) <= 3
        assert [member.cosine for member in beam.members] == sorted(
            (m.cosine for m in beam.members), reverse=True
        )


def test_no_result_depends_on_the_batch_or_on_other_latents(
    pretrained, hidden, new_judge, searched, monkeypatch
):
    monkeypatch.setattr(module, "GROUP", 2)
    found = search(pretrained, hidden, new_judge(), judge_calls=40, batch_tokens=16)
    assert found.tokens == searched[0].tokens
    assert (
        search(pretrained, (None, hidden[1][:1]), new_judge(), judge_calls=40).tokens
        == found.tokens[:1]
    )


def test_references_are_not_among_the_arguments():
    assert set(inspect.signature(local_search).parameters) == {
        "pretrained",
        "latents",
        "judge",
        "settings",
        "editor_class",
        "seed",
        "progress",
        "options",
    }


def test_the_model_can_judge_itself(pretrained, hidden):
    found = search(pretrained, hidden, T2lJudge(pretrained), judge_calls=20)
    start = search(pretrained, hidden, T2lJudge(pretrained), judge_calls=4)
    assert (found.cosine >= start.cosine).all() and found.cosine.mean() > start.cosine.mean()
    assert found.cost.judge == "t2l" and found.cost.judge_flops > 0


def test_a_model_without_estimates_searches_by_likelihood(pretrained, hidden, new_judge):
    only_writes = dataclasses.replace(pretrained, mode_weights={"l2t": 1.0})
    found = search(only_writes, hidden, new_judge(), judge_calls=24)
    start = search(only_writes, hidden, new_judge(), judge_calls=4)
    assert (found.cosine >= start.cosine).all() and (found.cosine > start.cosine).any()


def test_nan_embeddings_end_the_search(pretrained, hidden, judge):
    judge.vectors[7:] = np.nan
    with pytest.raises(MmldlmError, match="NaN"):
        search(pretrained, hidden, judge)
