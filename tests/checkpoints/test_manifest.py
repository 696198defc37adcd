"""The manifest of a checkpoint; and constants that rooms below `checkpoints` must repeat are equal
to its own.
"""

import json

import pytest

from mmldlm.checkpoints import manifest


def test_engines_use_the_same_names():
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
        "safetensors",
    }


@pytest.mark.parametrize("key", ["bytes", "crc32", "tail_crc32"])
@pytest.mark.parametrize("value", [None, -1, 1.5, True, "1", 1 << 63])
def test_a_file_without_size_or_checksum_is_damage(tmp_path, key, value):
    (tmp_path / "a").write_bytes(b"x")
    entry = manifest.describe_file(tmp_path / "a")
    content = {"format": manifest.FORMAT, "version": manifest.VERSION, "files": {"a": entry}}
    path = tmp_path / manifest.MANIFEST
    path.write_text(json.dumps(content), encoding="utf-8")
    assert manifest.verify(tmp_path) == []
    entry[key] = value
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="is damaged: a without bytes, crc32, tail_crc32"):
        manifest.read_manifest(tmp_path)


@pytest.mark.parametrize(
    "name, is_state",
    [("config.yaml", False), ("pca_basis.npy", False), ("codebook.npy", False), ("a.pt", True)],
)
def test_a_damaged_file_without_training_state_costs_no_checkpoint(tmp_path, name, is_state):
    (tmp_path / name).write_bytes(b"x")
    files = {name: manifest.describe_file(tmp_path / name)}
    content = {"format": manifest.FORMAT, "version": manifest.VERSION, "files": files}
    (tmp_path / manifest.MANIFEST).write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / name).write_bytes(b"y")
    found = manifest.examine(tmp_path)
    assert bool(found.damaged) is is_state and bool(found.descriptions) is not is_state
