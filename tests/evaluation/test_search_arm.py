"""`mmldlm evaluate --search`: the arm beside the model's own texts, and the judges that it
refuses.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mmldlm.commands.evaluate import _check_arguments, _gain_settings, add_arguments
from mmldlm.errors import UserError
from mmldlm.evaluation.gain import evaluate
from mmldlm.evaluation.settings import GainSettings
from mmldlm.inference.judges import T2lJudge
from mmldlm.tasks.registry import find_task


def settings(**search):
    return GainSettings(num_samples=8, num_steps=3, control_samples=2, num_draws=1, **search)


def test_the_search_is_reported_beside_the_models_texts(pretrained, store, capsys):
    report = evaluate(pretrained, store, settings(search="local", encoder_calls=10, judge="t2l"))
    arm, change = report.arms["search"], report.differences["search_minus_model"]
    assert change["judge_cosine"].value > 0 and arm["judge_cosine"].value <= 1
    assert arm["judge_cosine"].value - report.arms["model"]["judge_cosine"].value == pytest.approx(
        change["judge_cosine"].value
    )
    assert {"word_f1", "exact_match", "length_exact"} <= arm.keys()
    cost = report.as_dict()["conditions"]["search"]
    assert (
        cost["judge"] == "t2l"
        and cost["most_judge_calls"] <= 10
        and "the model's own t2l" in cost["what"]
    )
    assert cost["gflops"] > report.conditions["gflops_per_text"] > 0
    assert all(example["searched"] for example in report.examples)
    report.show()
    shown = " ".join(capsys.readouterr().out.split())
    assert "Search: local search, at most 10 calls of the model's own t2l" in shown
    assert "Texts of the search" in shown and "found by the search" in shown


def test_the_other_figures_do_not_depend_on_a_search(pretrained, store):
    plain = evaluate(pretrained, store, settings())
    beside = evaluate(pretrained, store, settings(search="best_of", num_candidates=2, judge="t2l"))
    assert (
        plain.arms["model"].items() <= beside.arms["model"].items() and "search" not in plain.arms
    )


def test_a_missing_encoder_is_found_before_anything_is_measured(pretrained, store):
    with pytest.raises(UserError, match="add --judge t2l"):
        evaluate(
            pretrained,
            store,
            settings(search="local"),
            log=lambda line: pytest.fail("refused too late"),
        )
    with pytest.raises(UserError, match="trained in mode l2t"):
        evaluate(
            replace(pretrained, mode_weights={"t2l": 1.0}),
            store,
            settings(search="local", judge="t2l"),
        )


def test_unusable_requests_are_refused():
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def check(given, *words):
        _check_arguments(parser.parse_args(["--checkpoint", "c", *words]), given)

    with pytest.raises(UserError, match="options that --suite stsb reads"):
        check({"search": "best_of"}, "--suite", "stsb", "--sts-file", "f")
    with pytest.raises(UserError, match="--judge with --search"):
        check({"judge": "t2l"}, "--data", "s")
    with pytest.raises(UserError, match="--search best_of for task=ar"):
        model = {"task": find_task("ar"), "reads_latents": True, "supports": lambda mode: True}
        _gain_settings({"search": "local"}, SimpleNamespace(**model))


@pytest.mark.parametrize(
    "reads, mode, given, unread",
    [
        (False, "unconditional", {"sampler": "ancestral", "guidance": 3.0}, "--sampler"),
        (False, "unconditional", {"guidance": 3.0}, "--guidance"),
        (True, "t2l", {"num_steps": 3, "presence_penalty": 1.0}, "--num-steps"),
    ],
)
def test_what_no_text_is_written_with_is_refused(reads, mode, given, unread):
    model = {"task": find_task("translation"), "reads_latents": reads, "supports": mode.__eq__}
    with pytest.raises(UserError, match="in the modes of this model") as caught:
        _gain_settings(given, SimpleNamespace(**model))
    assert unread in str(caught.value)


def test_a_sampler_beside_a_search_is_refused_as_in_sample(pretrained):
    """Its own default penalty had become that of the search's candidates."""
    with pytest.raises(UserError, match="--sampler with --search best_of, which"):
        _gain_settings({"search": "best_of", "sampler": "ancestral"}, pretrained)
    assert _gain_settings({"sampler": "ancestral"}, pretrained).presence_penalty == 0


def test_the_judge_is_asked_no_more_than_it_says(pretrained, store, monkeypatch):
    asked = []
    embed = T2lJudge._embed
    monkeypatch.setattr(
        T2lJudge, "_embed", lambda judge, texts: (asked.append(len(texts)), embed(judge, texts))[1]
    )
    report = evaluate(pretrained, store, settings(search="best_of", num_candidates=3, judge="t2l"))
    # The last call: the model's texts.
    assert sum(asked[:-1]) == round(8 * report.conditions["search"]["judge_calls"])


def test_texts_without_an_embedding_score_0(pretrained, store, monkeypatch):
    """As where they are embedded again, and not the -1 that ranks them last."""
    monkeypatch.setattr(T2lJudge, "strings", lambda judge, texts: [""] * len(texts))
    report = evaluate(pretrained, store, settings(search="best_of", num_candidates=2, judge="t2l"))
    assert report.arms["search"]["judge_cosine"].value == 0
    assert report.arms["model"]["judge_cosine"].value == 0
