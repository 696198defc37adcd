"""Values of training_state.json: checked wherever a run continues from them."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

import pytest

from mmldlm.checkpoints.training_state import _SavedState, read_training_state
from mmldlm.training.state import TrainingState
from tests.trials.test_run_records import WRONG_STATES


def write(folder, **values):
    guard = {
        "loss": [1.5, 2],
        "norm": [3.0],
        "loss_scale": [65536.0, 3],
        "bad_share": [[0, 8], [1, 8]],
    }
    state = TrainingState(8, 100, step=6, applied_steps=5, passed_over=[[2, 4]], guard=guard)
    path = folder / "step_00000006"
    path.mkdir(exist_ok=True)
    content = asdict(state) | {"host": "a"} | values
    (path / "training_state.json").write_text(
        json.dumps({k: v for k, v in content.items() if v is not ...})
    )
    return path


def test_what_a_run_saves_is_read(tmp_path):
    path = write(tmp_path)
    assert read_training_state(path) == json.loads((path / "training_state.json").read_text())
    assert set(_SavedState.model_fields) == {field.name for field in fields(TrainingState)}
    assert (
        read_training_state(
            write(tmp_path, plan=..., guard=..., rolled_back_to=..., data=..., other=5)
        )["step"]
        == 6
    )


@pytest.mark.parametrize("kind", WRONG_STATES)
def test_wrong_values_are_named_with_file_and_key(kind, tmp_path):
    """trials-3 BAD 26."""
    path = write(tmp_path, **WRONG_STATES[kind])
    with pytest.raises(
        ValueError, match=f"training_state.json is damaged: .*{next(iter(WRONG_STATES[kind]))}"
    ):
        read_training_state(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"null"])
def test_other_files_are_damaged(content, tmp_path):
    path = write(tmp_path)
    (path / "training_state.json").write_bytes(content)
    with pytest.raises(ValueError, match="training_state.json is damaged"):
        read_training_state(path)
