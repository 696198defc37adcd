"""What a resumed run takes over from its checkpoints."""

from __future__ import annotations

import pytest

from mmldlm.config.load import load_config
from mmldlm.tasks.translation.freezing import decided_freeze


def decided(folder, *words, preset="mmdit_stable"):
    words = [f"logging.save_dir={folder}", "logging.run_name=run", *words]
    return decided_freeze(load_config(preset, None, words))


def checkpoint(folder, step, text):
    path = folder / "run" / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(text)
    return path


@pytest.mark.parametrize("preset", ["mmdit", "mmdit_300m", "mmdit_1b", "mmdit_stable", "quickstart", "small", "tiny"])
def test_a_random_projection_is_never_frozen_unasked(tmp_path, preset):
    assert decided(tmp_path, "training.loss_type=l2t", "training.loss_type_weights=null", preset=preset) == "none"


def test_trained_weights_are_frozen_by_mode_and_what_is_asked_for_is_done(tmp_path):
    assert decided(tmp_path, "training.init_from=X") == "by_mode"
    assert decided(tmp_path, "training.init_from=X", "training.freeze=none") == "none"
    assert decided(tmp_path, "training.freeze=by_mode") == "by_mode"


def test_a_resumed_run_keeps_what_it_began_with(tmp_path):
    assert decided(tmp_path, "training.resume=auto") == "none", "there is nothing to resume"
    old = checkpoint(tmp_path, 5, "training:\n  freeze: mode\n")
    assert decided(tmp_path, "training.resume=auto") == "by_mode", "its source need not be named again"
    assert decided(tmp_path, f"training.resume={old}") == "by_mode"
    checkpoint(tmp_path, 10, "training: {freeze: none}\n")
    assert decided(tmp_path, "training.resume=auto", "training.init_from=X") == "none", "the newest one counts"
    checkpoint(tmp_path, 15, "training: [")
    checkpoint(tmp_path, 20, "\n")
    assert decided(tmp_path, "training.resume=auto", "training.init_from=X") == "none", "damaged ones say nothing"
    assert decided(tmp_path) == "none", "a fresh run of that name"
