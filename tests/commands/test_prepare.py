"""The options of `mmldlm prepare` on the command line."""

from __future__ import annotations

import argparse
import os
import sys

import pytest

from mmldlm import cli
from mmldlm.commands import prepare
from mmldlm.errors import UserError


@pytest.mark.parametrize("in_process", [False, True])
def test_the_ranks_get_the_words_of_the_command(monkeypatch, in_process):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))
    monkeypatch.delenv("RANK", raising=False)
    words = ["a b.jsonl", "--output-dir", "out", "--num-procs", "2", "--prefix=a: "]
    monkeypatch.setattr(sys, "argv", ["own.py"] if in_process else ["mmldlm", "prepare", *words])
    assert cli.main(["prepare", *words] if in_process else None) == 0
    assert started[0][-len(words) :] == words and "mmldlm.data.prepare" in started[0]


def test_mm_ldlms_flags_are_understood():
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    words = (
        "--datasets openwebtext --latent-model e5 --batch-size 256 --max-samples 10000000"
        " --output-dir DIR".split()
    )
    found = prepare.to_options(parser.parse_intermixed_args(words))
    assert (found.datasets, found.encoder, found.batch_size, found.max_samples) == (
        ["openwebtext"],
        "e5",
        256,
        10**7,
    )


def _parse(*words):
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.to_options(parser.parse_intermixed_args([*words, "--output-dir", "out"]))


@pytest.mark.parametrize(
    "words",
    [
        ("glyphs", "--encoder", "e5"),
        ("glyphs", "--overlong", "drop"),
        ("x.txt", "--latents", "pixels"),
        ("x.txt", "--image-size", "16"),
        ("glyphs", "--min-tokens", "3"),
    ],
)
def test_an_option_of_the_other_kind_of_corpus_is_an_error(words):
    with pytest.raises(UserError, match=words[1]):
        _parse(*words)
