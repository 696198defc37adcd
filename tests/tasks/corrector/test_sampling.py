"""Correction: never worse, the same for any batch, refused without a corrector."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
import torch

from mmldlm.errors import MmldlmError, UserError
from mmldlm.inference.edits import DELETE, INSERT, SUBSTITUTE
from mmldlm.inference.search import run_search
from mmldlm.inference.search_options import SearchOptions
from mmldlm.sampling.judge import SamplingCost, cosines
from mmldlm.tasks.corrector.config import CorrectorModelConfig
from mmldlm.tasks.corrector.model import CorrectorMMDiT, Hypotheses
from mmldlm.tasks.corrector.sampling import (
    CORRECTIONS,
    STARTS,
    CorrectingEditor,
    correct,
)
from mmldlm.tasks.corrector.task import CorrectorTask
from tests.support.forward import run_model


@pytest.fixture(scope="module")
def corrector(pretrained):
    """The checkpoint with a corrector whose weights are drawn: it reads hypotheses, and corrects
    by chance.
    """
    config = CorrectorModelConfig(**pretrained.model.config.model_dump())
    torch.manual_seed(0)
    model = CorrectorMMDiT(config)
    model.load_state_dict(pretrained.model.state_dict(), strict=False)
    for name in ("text", "product", "pooled"):
        torch.nn.init.normal_(getattr(model.hypothesis_encoder, f"to_{name}").weight, std=0.5)
    return dataclasses.replace(pretrained, model=model.eval(), task=CorrectorTask())


def run(corrector, hidden, judge, rounds, **options):
    return correct(corrector, hidden[1], judge, rounds=rounds, num_steps=3, **options)


def test_more_rounds_are_never_worse(corrector, hidden, new_judge):
    best = np.full(5, -np.inf)
    for rounds in (0, 1, 4):
        found = run(corrector, hidden, new_judge(), rounds)
        assert (found.score >= best).all()
        best = found.score
    start = run(corrector, hidden, new_judge(), 0)
    assert (best > start.score).any() and (found.score != found.cosine).any()
    np.testing.assert_allclose(
        cosines(new_judge().embed(found.tokens), hidden[1].numpy()), found.cosine, atol=1e-6
    )


def test_hypotheses_are_read(corrector, hidden, new_judge):
    config = corrector.model.config.model_copy(update={"corrector": "blind"})
    blind = dataclasses.replace(corrector, model=CorrectorMMDiT(config).eval())
    blind.model.load_state_dict(corrector.model.state_dict())
    judges = new_judge(), new_judge()
    for one, judge in zip((corrector, blind), judges):
        run(one, hidden, judge, 1)
    assert judges[0].asked != judges[1].asked and judges[0].asked[:5] == judges[1].asked[:5]


def test_no_result_depends_on_the_batch_or_on_other_latents(corrector, hidden, new_judge):
    found = run(corrector, hidden, new_judge(), 5)
    assert run(corrector, hidden, new_judge(), 5, batch_tokens=16).tokens == found.tokens
    assert run(corrector, (None, hidden[1][:1]), new_judge(), 5).tokens == found.tokens[:1]


def test_edits_are_what_the_model_makes_of_a_text_with_its_embedding_and_of_its_words(
    corrector, hidden
):
    model, (text, own), target = (
        corrector.model,
        (tuple(hidden[0][0]), hidden[1][3]),
        hidden[1][[2]],
    )
    editor = CorrectingEditor(corrector, target, SamplingCost(1))
    edits = editor.propose([text], [0], own[None].numpy())[0]
    config = model.config

    @torch.no_grad()
    def log_probs(tokens, t, **more):
        logits = run_model(
            model, tokens, model.scale_latents(target), torch.full((1,), t), **more
        ).text.logits[0]
        logits[:, [config.mask_token_id, config.pad_token_id, config.eos_token_id]] = -torch.inf
        return logits.log_softmax(-1)

    def beside(words):
        tokens = torch.tensor([[*words, config.eos_token_id]])
        read = Hypotheses(tokens, model.scale_latents(own[None]), torch.ones(1, dtype=torch.bool))
        return log_probs(torch.full_like(tokens, config.mask_token_id), 1.0, side_inputs=read)

    def among(place):
        tokens = torch.tensor([[*text, config.eos_token_id]])
        tokens[0, place] = config.mask_token_id
        return log_probs(
            tokens, float(corrector.text_diffusion.timestep_of(torch.tensor(1 / tokens.shape[1])))
        )[place]

    plain = beside(text)
    assert set(edits.kinds.tolist()) == {SUBSTITUTE, INSERT, DELETE}
    for row in range(len(edits)):
        kind, place, token = (
            int(edits.kinds[row]),
            int(edits.positions[row]),
            int(edits.tokens[row]),
        )
        if kind == INSERT:
            expected = beside((*text[:place], config.pad_token_id, *text[place:]))[place, token]
        else:
            both = (plain[place] + among(place)) / 2
            expected = (both[token] if kind == SUBSTITUTE else 0) - both[text[place]]
        assert edits.log_ratios[row] == pytest.approx(float(expected), abs=1e-4)


def test_costs_are_counted(corrector, hidden, new_judge):
    judge = new_judge()
    found = run(corrector, hidden, judge, 3)
    assert found.calls.sum() >= judge.num_calls == found.cost.judge_calls > 0
    assert STARTS < found.calls.max() <= STARTS + 3 * CORRECTIONS
    assert found.cost.denoiser_flops > 0 and found.cost.depth > 3


def test_references_are_not_among_the_arguments():
    assert set(inspect.signature(correct).parameters) == {
        "pretrained", "latents", "judge", "rounds", "seed", "progress", "options",
    }  # fmt: skip


def test_a_task_without_corrections_is_refused(pretrained, hidden, judge):
    for refused in (
        lambda: SearchOptions(correct=1).check_search(pretrained.task, ()),
        lambda: pretrained.task.correct_texts(pretrained, hidden[1], judge, rounds=1),
    ):
        with pytest.raises(UserError, match="mmldlm hypotheses") as error:
            refused()
        assert error.value.exit_code == 2
    SearchOptions(correct=1).check_search(CorrectorTask(), ())


def test_the_search_of_the_command_line_is_that_of_the_task(corrector, hidden, new_judge):
    found = run_search(
        SearchOptions(correct=1), corrector, hidden[1], new_judge(), seed=0, num_steps=3
    )
    assert found.tokens == run(corrector, hidden, new_judge(), 1).tokens


def test_nan_embeddings_end_the_correction(corrector, hidden, judge):
    judge.vectors[7:] = np.nan
    with pytest.raises(MmldlmError, match="NaN"):
        run(corrector, hidden, judge, 1)
