"""--search of `mmldlm sample`: what fits together, what a task has, and the files it leaves."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from mmldlm.commands.sample import add_arguments, main
from mmldlm.errors import UserError
from mmldlm.inference.search_options import SearchOptions
from mmldlm.tasks.registry import find_task


def run(*words) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_intermixed_args([str(word) for word in words]))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"judge": "t2l"}, "--judge with --search best_of or local"),
        ({"num_candidates": 4}, "--num-candidates with --search best_of"),
        ({"search": "local", "num_candidates": 4}, "--num-candidates with --search best_of"),
        ({"search": "best_of", "encoder_calls": 4}, "--encoder-calls with --search local"),
        ({"search": "local", "encoder_calls": 0}, "--encoder-calls of at least 1"),
    ],
)
def test_options_that_do_not_fit_are_errors(given, expected):
    with pytest.raises(UserError, match=expected) as error:
        SearchOptions(**given)
    assert error.value.exit_code == 2


def test_a_task_takes_the_searches_that_it_has():
    SearchOptions("local").check_search(find_task("mdlm"), ["num_steps"])
    SearchOptions("best_of").check_search(find_task("ar"), [])
    with pytest.raises(UserError, match="--search best_of for task=ar"):
        SearchOptions("local").check_search(find_task("ar"), [])
    with pytest.raises(UserError, match="--sampler, --temperature with --search best_of"):
        SearchOptions("best_of").check_search(find_task("ar"), ["temperature", "sampler"])


@pytest.fixture
def shared(checkpoint, tmp_path):
    vectors = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    return (
        "l2t", "--checkpoint", checkpoint, "--latent-file", tmp_path / "x.npy", "--num-steps", 2,
        "--output-dir", tmp_path / "out",
    )  # fmt: skip


def test_a_search_writes_its_cosines_and_its_cost(shared, tmp_path, capsys):
    assert run(*shared, "--search", "local", "--encoder-calls", 12, "--judge", "t2l") == 0
    assert "cosine by the judge" in " ".join(capsys.readouterr().out.split())
    records = [
        json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    ]
    assert [record["latent"] for record in records] == [0, 1, 2]
    assert all(
        record["judge_calls"] <= 12 and -1 <= record["judge_cosine"] <= 1 for record in records
    )
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    cost = settings["cost_per_sample"]
    assert settings["judge"] == cost["judge"] == "t2l" and cost["depth"] > 2 and cost["gflops"] > 0
    before = [record["judge_cosine"] for record in records]
    assert (
        run(*shared, "--overwrite", "--search", "best_of", "--num-candidates", 1, "--judge", "t2l")
        == 0
    )
    records = [
        json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    ]
    assert all(record["judge_cosine"] <= value for record, value in zip(records, before))


def test_a_search_is_refused_without_its_encoder_and_for_several_texts_of_an_embedding(shared):
    with pytest.raises(UserError, match="add --judge t2l"):
        run(*shared, "--search", "local")
    with pytest.raises(UserError, match="--num-samples of at most the 3 embeddings"):
        run(*shared, "--search", "best_of", "--judge", "t2l", "--num-samples", 4)
    with pytest.raises(UserError, match="chooses its samplers itself"):
        run(*shared, "--search", "best_of", "--temperature", 1)
    with pytest.raises(UserError, match="options of `sample unconditional`"):
        run("unconditional", *shared[1:3], *shared[-2:], "--search", "best_of")
