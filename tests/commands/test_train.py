"""How many ranks `mmldlm train` starts on this machine, and `mmldlm preflight` checks."""

from __future__ import annotations

import argparse
import contextlib
import os

import pytest
import torch

from mmldlm import cli
from mmldlm.commands import config_options, preflight, train
from mmldlm.errors import UserError
from mmldlm.preflight import runner
from mmldlm.preflight.checks.dry_run import dry_run_arguments


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["engine.kind=ddp"], 4),
        (["engine.kind=ddp", "--nproc", "2"], 2),
        (["engine.kind=single"], 1),
        (["engine.kind=single", "--nproc", "2"], 2),  # which check_run refuses
    ],
)
def test_the_default_is_a_rank_for_every_gpu_that_the_engine_can_use(monkeypatch, words, expected):
    started: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(train, "hidden_gpu_note", lambda: None)
    monkeypatch.setattr(train, "check_run", lambda config, nproc: started.append(nproc))
    monkeypatch.setattr(os, "execv", lambda program, command: None)
    cli.main(["train", "--config-name", "tiny", *words])
    assert started == [expected]


@pytest.mark.parametrize(("kind", "expected"), [("ddp", 4), ("single", 1)])
def test_preflight_counts_as_train_does(monkeypatch, kind, expected):
    parser = argparse.ArgumentParser()
    preflight.add_arguments(parser)
    words = ["--level", "0", "--config-name", "tiny", f"engine.kind={kind}"]
    context = runner.create_context(parser.parse_args(words))
    monkeypatch.setattr(runner, "collect_head", lambda context: None)
    monkeypatch.setattr(runner.config, "data_probe", lambda context: contextlib.nullcontext())
    monkeypatch.setattr(type(context), "head_value", lambda *names: {"gpus": ["A", "B", "C", "D"]})
    runner.collect_facts(context)
    assert [node.slots for node in context.nodes] == [expected]


def test_preflight_takes_its_ranks_from_one_place():
    parser = argparse.ArgumentParser()
    preflight.add_arguments(parser)
    words = ["--hostfile", "hostfiles/two_nodes", "--nproc", "4", "--config-name", "tiny"]
    with pytest.raises(UserError, match="leave out --nproc"):
        runner.create_context(parser.parse_args(words))


@pytest.mark.parametrize(
    ("word", "num_validated"),
    [
        # Its steps end before those of the profile begin.
        ("training.profile=[100,105]", 64),
        # Of several stores all samples are used.
        ("data.mixture={/a: 1, /b: 1}", "auto"),
    ],
)
def test_the_dry_run_of_a_run_is_a_valid_config(word, num_validated):
    parser = argparse.ArgumentParser()
    preflight.add_arguments(parser)
    words = ["--config-name", "tiny", word, "training.num_train_steps=1000"]
    context = runner.create_context(parser.parse_args(words))
    dry = dry_run_arguments(context, "dry", ["training.num_train_steps=2"])
    parser = argparse.ArgumentParser()
    config_options.add_arguments(parser)
    config = config_options.parse_config(parser.parse_args(dry))
    assert config.training.profile is None
    assert config.data.max_validation_samples == num_validated
