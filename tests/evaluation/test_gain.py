"""The conditioning gain: NELBO of known denoisers, untrained controls, and the report."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmldlm.commands.evaluate import add_arguments, main
from mmldlm.data.store import Store
from mmldlm.diffusion import MaskedDiffusion
from mmldlm.diffusion.masked import SCHEDULES
from mmldlm.errors import MmldlmError, UserError
from mmldlm.evaluation.directions import latent_estimates, measure_l2t
from mmldlm.evaluation.gain import evaluate, untrained_control
from mmldlm.evaluation.nelbo import measure
from mmldlm.evaluation.sentences import choose_sentences
from mmldlm.evaluation.settings import GainSettings
from mmldlm.evaluation.statistics import derangement, ratio
from mmldlm.models.base import ModelOutput
from mmldlm.models.token_scores import TokenScores
from mmldlm.tasks.text_task import masked_text_scores


class Known(torch.nn.Module):
    """Scores each target by a given rule: nll(latents [B, D] or None) -> [B]."""

    def __init__(self, make, nll):
        super().__init__()
        self.config = SimpleNamespace(
            max_seq_len=64,
            eos_token_id=make.EOS,
            pad_token_id=make.PAD,
            mask_token_id=make.MASK,
            latent_dim=make.DIM,
        )
        self.nll = nll

    def scale_latents(self, raw):
        return raw

    def forward(self, text, latents, query):
        (batch, width), positions = text.tokens.shape, query.positions
        assert bool((text.tokens.flatten()[positions] == self.config.mask_token_id).all())
        assert bool(text.attention_mask.flatten()[positions].all())
        nll = self.nll(None if latents is None else latents.values, batch)[positions // width]
        scores = TokenScores(nll=nll, correct=nll < 1e-6)
        return ModelOutput(scores, length_logits=torch.zeros(batch, 64))


def texts_of(count=400, longest=30):
    rng = np.random.default_rng(0)
    return [rng.integers(4, 32, size=rng.integers(3, longest)).tolist() for _ in range(count)]


def run_measure(make, nll, texts, schedule="loglinear", draws=4, seed=0, **options):
    latents = torch.arange(len(texts)).float()[:, None].repeat(1, make.DIM)
    model = Known(make, nll)
    score = partial(masked_text_scores, model, diffusion=MaskedDiffusion(make.MASK, schedule))
    partner = derangement(len(texts), 0)
    return measure(model, texts, latents, partner, score=score, draws=draws, seed=seed, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uniform_denoiser_scores_log_of_the_vocabulary_under_every_schedule(make, schedule):
    texts = texts_of()
    value = math.log(make.VOCAB - 1)
    found = run_measure(make, lambda latents, batch: torch.full((batch,), value), texts, schedule)
    for name in ("matched", "shuffled", "null"):
        estimate = ratio(found.nelbo[name], found.num_tokens)
        assert abs(estimate.value - value) < 5 * estimate.se + 2e-3 * value
    # The same masks, so no difference at all.
    assert (found.nelbo["matched"] == found.nelbo["null"]).all()
    assert found.length_nll["matched"] == pytest.approx(np.full(len(texts), math.log(64)))


def test_perfect_denoiser_scores_zero_and_the_right_latent_is_told_from_others(make):
    texts = texts_of(60)

    def nll(latents, batch):
        return torch.full((batch,), 3.0) if latents is None else latents[:, 0] % 2

    found = run_measure(make, nll, texts)
    index = np.arange(60)
    assert (found.nelbo["matched"][index % 2 == 0] == 0).all() and (
        found.nelbo["matched"][index % 2 == 1] > 0
    ).all()
    assert (found.correct["matched"] == np.where(index % 2 == 0, found.masked, 0)).all()
    partner = derangement(60, 0)
    assert ((found.nelbo["shuffled"] == 0) == (partner % 2 == 0)).all()
    assert (found.num_tokens == [len(text) + 1 for text in texts]).all()


def test_nelbo_does_not_depend_on_the_batch(make):
    texts = texts_of(50)

    def nll(latents, batch):
        return torch.full((batch,), 2.0) if latents is None else 1 + latents[:, 0] % 3

    big, small = (run_measure(make, nll, texts, batch_tokens=size) for size in (10_000, 1))
    np.testing.assert_allclose(big.nelbo["matched"], small.nelbo["matched"], rtol=1e-6)


def test_nan_likelihood_is_an_error(make):
    with pytest.raises(MmldlmError, match="NaN"):
        run_measure(make, lambda latents, batch: torch.full((batch,), float("nan")), texts_of(5))


def test_a_fresh_model_ignores_its_latent_and_random_gates_do_not(pretrained, store):
    few = GainSettings(num_samples=40, num_steps=3, num_draws=4)
    sentences = choose_sentences(store, pretrained.model, 40, 0)
    fresh = untrained_control(pretrained.model, 0, random_gates=False)
    found = measure_l2t(pretrained, fresh, sentences, few, lambda line: None).estimates
    assert found["gain_null"].value == 0 and found["gain_null"].se == 0
    assert found["gain_null"].in_standard_errors == 0
    assert found["latent_sensitivity"].value == 0
    gates = untrained_control(pretrained.model, 0, random_gates=True)
    found = measure_l2t(pretrained, gates, sentences, few, lambda line: None).estimates
    assert found["latent_sensitivity"].value > 0.01
    assert found["gain_shuffled"].se > 0 and found["gain_shuffled"].in_standard_errors < 4


def test_fresh_models_leave_the_global_generator_alone(pretrained):
    state = torch.get_rng_state()
    one, two = (untrained_control(pretrained.model, seed=3, random_gates=True) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values())
    )


def test_whole_evaluation_and_its_report(pretrained, store, tmp_path, capsys):
    lines = []
    settings = GainSettings(num_steps=4, latent_steps=3, num_draws=2, control_samples=20)
    report = evaluate(pretrained, store, settings, lines.append)
    again = evaluate(pretrained, store, settings, lines.append)
    assert report.claims == again.claims
    assert any("NELBO of 40 texts" in line for line in lines)
    assert {claim["id"] for claim in report.claims} == {
        "l2t_gain_null_nats",
        "l2t_f1_gap_points",
        "t2l_recall_at_1",
        "untrained_gain_in_standard_errors",
    }
    by_id = {claim["id"]: claim for claim in report.claims}
    assert not by_id["l2t_gain_null_nats"]["holds"]
    control = by_id["untrained_gain_in_standard_errors"]
    assert control["value"] == 0 and control["holds"]
    report.write(tmp_path / "out" / "report.json")
    text = (tmp_path / "out" / "report.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    values = json.loads(text)
    assert set(values) == {"conditions", "claims", "details"}
    assert (
        values["conditions"]["passes_per_text"]
        == values["details"]["model"]["passes"]["value"]
        <= 4
    )
    assert values["conditions"]["num_sentences"] == 40 and len(values["details"]["examples"]) == 10
    assert values["details"]["floors"]["mean_embedding_recall_at_1"]["value"] <= 1 / 40
    assert set(values["details"]["model"]["gain_null"]) == {"value", "se", "unit", "n"}
    report.show()
    shown = capsys.readouterr().out
    assert "gain: none - right" in shown and "written from its embedding" in shown


def test_the_batch_size_reaches_every_pass_and_changes_no_figure(pretrained, store, monkeypatch):
    widest = []
    forward = type(pretrained.model).forward

    def watched(self, text, *rest, **more):
        widest.append(0 if text is None else text.tokens.numel())
        return forward(self, text, *rest, **more)

    monkeypatch.setattr(type(pretrained.model), "forward", watched)
    found = []
    for size in (None, 2):
        widest.clear()
        settings = GainSettings(
            num_samples=20, num_steps=2, latent_steps=2, control_samples=4, batch_size=size
        )
        found.append(evaluate(pretrained, store, settings, lambda line: None).arms["model"])
        assert (max(widest) <= 2 * pretrained.model.config.max_seq_len) == (size is not None)
    for name, estimate in found[0].items():
        assert found[1][name].value == pytest.approx(estimate.value, abs=1e-4), name


def test_only_trained_directions_are_evaluated(pretrained, store):
    pretrained.mode_weights = {"unconditional": 0, "l2t": 0, "t2l": 1}
    report = evaluate(
        pretrained, store, GainSettings(latent_steps=2, control_samples=5), lambda line: None
    )
    assert {claim["id"] for claim in report.claims} == {"t2l_recall_at_1"}
    assert any("l2t" in note for note in report.conditions["notes"])
    report.show()


def test_a_model_trained_in_neither_direction_is_refused_before_the_work(pretrained, store):
    pretrained.mode_weights = {"unconditional": 1.0, "l2t": 0, "t2l": 0}
    with pytest.raises(UserError, match="(?s)mode l2t.*trained only in unconditional"):
        evaluate(pretrained, store, log=lambda line: pytest.fail("refused too late"))


def test_controls_scale_latents_as_the_model_does(pretrained):
    config = pretrained.latent_config.model_copy(
        update={"l2_normalize": True, "scaling": "sqrt_d"}
    )
    arm = replace(pretrained, latent_config=config)
    fresh = untrained_control(arm.model, 0, random_gates=False)
    raw = 3 * torch.randn(4, arm.model.config.latent_dim)
    for model in (arm.model, fresh):
        torch.testing.assert_close(model.scale_latents(raw), model.scale_latents(2 * raw))


def test_stores_that_do_not_fit_are_refused(pretrained, make, tmp_path, store):
    with pytest.raises(UserError, match="41 requested, 40 in"):
        choose_sentences(store, pretrained.model, 41, 0)
    long = Store(make.store(tmp_path / "long", 5, longest=30), "validation")
    with pytest.raises(UserError, match="max_seq_len"):
        choose_sentences(long, pretrained.model, None, 0)
    other = make.model(eos_token_id=3)
    with pytest.raises(UserError, match="eos_token_id"):
        choose_sentences(store, other, None, 0)
    with pytest.raises(UserError, match="vocab|tokens"):
        choose_sentences(store, make.model(vocab_size=31), None, 0)


@pytest.mark.parametrize(
    "words,named",
    [
        (["--suite", "stsb"], "--sts-file"),
        ([], "--data"),
        (["--suite", "stsb", "--sts-file", "absent.csv"], "STS Benchmark"),
        (["--data", "absent"], "store"),
    ],
)
def test_unusable_requests_are_refused(words, named):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(UserError, match=named):
        main(parser.parse_intermixed_args(["--checkpoint", "absent", *words]))


@pytest.mark.parametrize(
    "words", [["--num-draws", "0"], ["--batch-size", "0"], ["--num-samples", "1"]]
)
def test_numbers_out_of_bounds_are_refused(words, capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit) as done:
        parser.parse_intermixed_args(["--checkpoint", "absent", "--data", "x", *words])
    assert (
        done.value.code == 2
        and f"argument {words[0]}: '{words[1]}': a whole number" in capsys.readouterr().err
    )


def test_another_sampler(pretrained, store):
    reports = {}
    for name, more in (("plain", {}), ("adaptive", {"sampler": "threshold"})):
        settings = GainSettings(
            4, num_steps=1, latent_steps=1, num_draws=1, control_samples=2, **more
        )
        reports[name] = evaluate(pretrained, store, settings, lambda line: None).conditions
    plain, adaptive = reports.values()
    assert (
        adaptive["text_sampler"] == "threshold"
        and adaptive["text_steps"] is None
        and plain["text_steps"] == 1
    )


@pytest.mark.parametrize(
    "words,named",
    [
        (["--sampler", "greedy"], "--sampler confidence"),
        (["--sampler", "threshold", "--num-steps", "3"], "--num-steps"),
        (["--sampler", "confidence", "--suite", "stsb", "--sts-file", "F"], "--sampler"),
    ],
)
def test_samplers_that_do_not_fit_are_refused(words, named, pretrained, store, monkeypatch):
    monkeypatch.setattr("mmldlm.inference.load.load_pretrained", lambda *_, **__: pretrained)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(UserError, match=named):
        main(
            parser.parse_intermixed_args(["--checkpoint", "x", "--data", str(store.root), *words])
        )


def test_the_former_spelling_of_suite_names_the_new_one(capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit) as done:
        parser.parse_args(["--checkpoint", "x", "--eval-dataset", "gain"])
    assert done.value.code == 2
    assert "--eval-dataset was renamed: use --suite conditioning_gain" in capsys.readouterr().err


def test_several_latents_a_text_are_measured_together(pretrained, make, tmp_path):
    """Cosines are means over a text's latents, retrieval is by their mean; another number of
    latents is refused.
    """
    store = Store(make.store(tmp_path / "store", 12, latents_per_text=3), "validation")
    pretrained.model = make.model(num_latents=3)
    settings = GainSettings(num_steps=2, latent_steps=2, control_samples=4)
    report = evaluate(pretrained, store, settings, lambda line: None)
    assert set(report.arms["model"]) >= {
        "gain_null",
        "f1_right",
        "cosine",
        "recall_at_1",
        "norm_ratio",
    }
    with pytest.raises(UserError, match="3 latents of 6 dimensions"):
        evaluate(replace(pretrained, model=make.model()), store, settings, lambda line: None)
    sentences = choose_sentences(store, pretrained.model, None, 0)
    found = latent_estimates(sentences.latents, sentences, sentences.latents)
    assert found["cosine"].value == pytest.approx(1) and found["recall_at_1"].value == 1
    half = sentences.latents.copy()
    half[:, 0] *= -1
    assert latent_estimates(half, sentences, sentences.latents)["cosine"].value == pytest.approx(
        1 / 3, abs=1e-6
    )


def test_each_measurement_says_how_far_it_is(pretrained, store):
    stages = {}

    def say(line):
        calls = stages.setdefault(line, [])
        return lambda done, total: calls.append((done, total))

    evaluate(
        pretrained,
        store,
        GainSettings(4, num_steps=2, latent_steps=2, num_draws=1, control_samples=2),
        say,
    )
    # NELBO, texts and embeddings, of the model and two controls; figures of strings.
    assert len(stages) == 10
    assert all(calls and calls[-1][0] == calls[-1][1] > 0 for calls in stages.values())
