"""Constants that rooms below `checkpoints` must repeat are equal to those of
checkpoints/manifest.py.
"""

from mmldlm.checkpoints import manifest


def test_engines_use_the_same_names():
    import pytest

    pytest.importorskip("torch", reason="torch is not installed")
    from mmldlm.engines import deepspeed, fsdp

    assert deepspeed.TAG == manifest.ZERO_TAG
    assert fsdp.TRAINABLE == manifest.TRAINABLE_FILE


def test_every_target_has_one_writer():
    from mmldlm.checkpoints.formats.registry import FORMATS, writer_of

    targets = [target for candidate in FORMATS for target in candidate.targets]
    assert sorted(targets) == sorted(manifest.TARGETS)
    assert {writer_of(target).name for target in manifest.TARGETS} == {
        "deepspeed",
        "dcp",
        "model.pt",
    }
