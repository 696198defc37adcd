"""Edits: applied as they say, likely by the model's own probabilities, with the shifts that it
estimates.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mmldlm.errors import MmldlmError
from mmldlm.inference import edits as edits_module
from mmldlm.inference.edits import DELETE, INSERT, SUBSTITUTE, Editor, Edits
from mmldlm.inference.judges import estimate_embeddings
from mmldlm.sampling.judge import SamplingCost
from tests.support.forward import run_model


def made(shifts=None, ratios=(0.0, 0.0, 0.0, 0.0)) -> Edits:
    kinds, places, tokens = (SUBSTITUTE, INSERT, DELETE, INSERT), (0, 2, 3, 5), (9, 8, -1, 7)
    return Edits(np.array(kinds), np.array(places), np.array(tokens), np.array(ratios), shifts)


def test_edits_are_applied_at_their_places():
    found = [made().apply((1, 2, 3, 4, 5), row) for row in range(4)]
    assert found == [(9, 2, 3, 4, 5), (1, 2, 8, 3, 4, 5), (1, 2, 3, 5), (1, 2, 3, 4, 5, 7)]


def test_a_score_is_the_log_ratio_and_the_cosine_that_is_expected():
    text, target = np.array([[1.0, 0.0]]), np.array([[1.0, 1.0]])
    shifts = np.array([[0, 1], [0, 0], [0, -1], [-1, 2]], dtype=np.float32)[:, None]
    scores = made(shifts, (-3.0, 0.0, 2.0, 1.0)).scores(text, target)
    nats, half = edits_module.COSINE_NATS, 0.5**0.5
    np.testing.assert_allclose(scores, [-3 + nats, nats * half, 2, 1 + nats * half], rtol=1e-6)
    # Without estimates likely edits come first.
    np.testing.assert_allclose(made().scores(text, target), nats * half, rtol=1e-6)


@pytest.fixture
def editor(pretrained, hidden):
    return Editor(pretrained, hidden[1], SamplingCost(5))


def test_ratios_are_the_models_own_and_texts_are_distinct(editor, pretrained, hidden):
    text, owner = tuple(hidden[0][2]), 2
    edits = editor.propose([text], [owner])[0]
    changed = [edits.apply(text, row) for row in range(len(edits))]
    assert len(set(changed)) == len(changed) and text not in changed
    assert {len(one) - len(text) for one in changed} == {-1, 0, 1}
    model, row = pretrained.model, int(np.flatnonzero(edits.kinds == SUBSTITUTE)[3])
    place = int(edits.positions[row])
    ids = torch.tensor([[*text, model.config.eos_token_id]])
    ids[0, place] = model.config.mask_token_id
    t = pretrained.text_diffusion.timestep_of(torch.tensor([1 / ids.shape[1]])).float()
    logits = run_model(model, ids, model.scale_latents(hidden[1][[owner]]), t).text.logits[
        0, place
    ]
    expected = (logits[edits.tokens[row]] - logits[text[place]]).item()
    assert edits.log_ratios[row] == pytest.approx(expected, abs=1e-4)
    assert not set(edits.tokens.tolist()) & {0, 1, 2}  # no [MASK], [PAD] or EOS


def test_shifts_are_differences_of_the_models_estimates(editor, pretrained, hidden):
    texts = [tuple(hidden[0][0]), tuple(hidden[0][1][:2])]
    for text, edits in zip(texts, editor.propose(texts, [0, 1])):
        one = edits.apply(text, 4)
        before, after = estimate_embeddings(pretrained, [text, one])
        np.testing.assert_allclose(edits.shifts[4, 0], after - before, atol=1e-5)


def test_texts_beside_a_text_change_nothing(editor, hidden):
    texts = [tuple(text[: 2 + i]) for i, text in enumerate(hidden[0])]
    together = editor.propose(texts, range(5))
    for owner, (text, edits) in enumerate(zip(texts, together)):
        alone = editor.propose([text], [owner])[0]
        assert (alone.kinds == edits.kinds).all() and (alone.tokens == edits.tokens).all()
        np.testing.assert_allclose(alone.shifts, edits.shifts, atol=1e-5)


def test_cost_is_counted(pretrained, hidden):
    cost = SamplingCost(5)
    edits = Editor(pretrained, hidden[1], cost).propose([(4, 5, 6)], [0])[0]
    assert cost.denoiser_rows == 3 + 4 + 1 + len(edits)
    lengths = [4] * 3 + [5] * 4
    expected = sum(
        pretrained.task.pass_flops(pretrained.model.config, length, 1) for length in lengths
    )
    changed = [4 + {SUBSTITUTE: 0, INSERT: 1, DELETE: -1}[kind] for kind in edits.kinds.tolist()]
    expected += sum(
        pretrained.task.pass_flops(pretrained.model.config, length, 0) for length in [4, *changed]
    )
    assert cost.denoiser_flops == pytest.approx(expected)


def test_the_longest_and_the_shortest_text_stay_in_bounds(editor, pretrained):
    most = pretrained.model.config.max_seq_len - 1
    longest, shortest = editor.propose([(5,) * most, (5,)], [0, 1])
    assert INSERT not in longest.kinds and DELETE in longest.kinds
    assert DELETE not in shortest.kinds and INSERT in shortest.kinds


def test_a_model_that_estimates_no_embeddings_proposes_without_shifts(pretrained, hidden):
    only_writes = dataclasses.replace(pretrained, mode_weights={"l2t": 1.0})
    edits = Editor(only_writes, hidden[1], SamplingCost(5)).propose([(4, 5, 6)], [0])[0]
    assert edits.shifts is None and len(edits)


def test_nan_logits_are_an_error(pretrained, hidden):
    latents = hidden[1].clone()
    latents[1] = torch.nan
    with pytest.raises(MmldlmError, match="NaN"):
        Editor(pretrained, latents, SamplingCost(5)).propose([(4, 5), (6, 7)], [0, 1])
