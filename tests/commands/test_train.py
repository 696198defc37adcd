"""How many ranks `mmldlm train` starts on this machine, and `mmldlm preflight` checks."""

from __future__ import annotations

import argparse
import contextlib
import os

import pytest
import torch

from mmldlm import cli
from mmldlm.commands import preflight, train
from mmldlm.preflight import runner


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
