"""Detection of checkpoint formats by the names of files."""

from __future__ import annotations

import pytest

from mmldlm.checkpoints.formats.registry import FORMATS, detect
from mmldlm.errors import UserError


@pytest.mark.parametrize(
    "files, name, opened",
    [
        (["mp_rank_00_model_states.pt"], "deepspeed", "."),
        (["zero/zero_pp_rank_0_mp_rank_00_model_states.pt"], "deepspeed", "zero"),
        (["engine/zero/mp_rank_00_model_states.pt"], "deepspeed", "engine/zero"),
        (["universal/mp_rank_00_model_states.pt"], "deepspeed", "universal"),
        # Other programs' files may end so, too.
        (["random_states.pt", "model.safetensors"], "safetensors", "."),
        (["._mp_rank_00_model_states.pt", "model.safetensors"], "safetensors", "."),
        ([".metadata"], "dcp", "."),
        (["dcp/.metadata"], "dcp", "dcp"),
        (["pytorch_model_fsdp_0/.metadata", "model.pt"], "dcp", "pytorch_model_fsdp_0"),
        (["model.pt", "model.safetensors"], "model.pt", "."),
        (["model.safetensors"], "safetensors", "."),
        (["model.safetensors.index.json"], "safetensors", "."),
    ],
)
def test_folders(tmp_path, files, name, opened):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    found = detect(tmp_path)
    assert found is not None and (found.format.name, found.path) == (name, tmp_path / opened)


@pytest.mark.parametrize(
    "file, name",
    [
        (".metadata", "dcp"),
        ("weights.safetensors", "safetensors"),
        ("model.safetensors.index.json", "safetensors"),
        ("anything.bin", "model.pt"),
    ],
)
def test_files(tmp_path, file, name):
    (tmp_path / file).write_bytes(b"")
    found = detect(tmp_path / file)
    assert found is not None and found.format.name == name


def test_nothing_is_detected_in_other_folders(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    assert detect(tmp_path) is None and detect(tmp_path / "absent") is None


def test_a_latest_without_its_tag_is_an_error(tmp_path):
    (tmp_path / "latest").write_text("step10")
    with pytest.raises(UserError, match="step10"):
        detect(tmp_path)


def test_a_universal_folder_has_a_latest_of_its_own(tmp_path):
    """ds_to_universal writes `latest_universal` beside a tag of any name, and no `latest`."""
    (tmp_path / "step10_universal").mkdir()
    (tmp_path / "step10_universal" / "mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "latest_universal").write_text("step10_universal")
    found = detect(tmp_path)
    assert found is not None and found.path == tmp_path / "step10_universal"


def test_only_safetensors_cannot_be_resumed(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(b"")
    assert [candidate.name for candidate in FORMATS if not candidate.can_resume(tmp_path)] == [
        "safetensors"
    ]
