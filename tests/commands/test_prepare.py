"""The options of `mmldlm prepare` on the command line."""

from __future__ import annotations

import argparse

import pytest

from mmldlm.commands import prepare
from mmldlm.data.prepare import options
from mmldlm.data.prepare.options import ImageOptions, PrepareOptions
from mmldlm.errors import UserError


def test_options_survive_the_way_to_the_ranks():
    given = PrepareOptions(
        "out",
        "a b.jsonl",
        latent_dim=64,
        normalize=False,
        keep_duplicates=True,
        prefix="a: ",
        max_quarantined=0.5,
    )
    other = PrepareOptions(
        "out", datasets=["openwebtext", "lm1b"], encoder="e5", batch_size=256, normalize=True
    )
    for wanted in (given, other):
        parser = argparse.ArgumentParser()
        prepare.add_arguments(parser)
        assert (
            prepare.to_options(parser.parse_intermixed_args(options.to_arguments(wanted)))
            == wanted
        )


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


def test_options_of_images_survive_the_way_to_the_ranks():
    wanted = ImageOptions(
        "out", "glyphs", latents="pca:64", faces=3, image_size=32, max_quarantined=0.2, seed=3
    )
    assert _parse(*options.to_arguments(wanted)) == wanted


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
