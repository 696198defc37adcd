"""The options of `mmldlm prepare` on the command line."""

from __future__ import annotations

import argparse

from mmldlm.commands import prepare
from mmldlm.data.prepare import options
from mmldlm.data.prepare.options import PrepareOptions


def test_options_survive_the_way_to_the_ranks():
    given = PrepareOptions(
        "out", "a b.jsonl", latent_dim=64, normalize=False, keep_duplicates=True, prefix="a: ", max_quarantined=0.5
    )
    other = PrepareOptions("out", datasets=["openwebtext", "lm1b"], encoder="e5", batch_size=256, normalize=True)
    for wanted in (given, other):
        parser = argparse.ArgumentParser()
        prepare.add_arguments(parser)
        assert prepare.to_options(parser.parse_intermixed_args(options.to_arguments(wanted))) == wanted


def test_mm_ldlms_flags_are_understood():
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    words = "--datasets openwebtext --latent-model e5 --batch-size 256 --max-samples 10000000 --output-dir DIR".split()
    found = prepare.to_options(parser.parse_intermixed_args(words))
    assert (found.datasets, found.encoder, found.batch_size, found.max_samples) == (["openwebtext"], "e5", 256, 10**7)
