"""What a resumed run takes over from its checkpoints."""

from __future__ import annotations

from typing import Annotated

import pytest

from mmldlm.config.resume_compat import diff_configs
from mmldlm.config.schema import Config, DataConfig
from mmldlm.config.section import FilePath, IsPath, OnResume
from mmldlm.tasks.registry import load_config
from mmldlm.tasks.translation.parameter_plan import decided_freeze


def decided(folder, *words, preset="mmdit_stable"):
    words = [f"logging.save_dir={folder}", "logging.run_name=run", *words]
    return decided_freeze(load_config(preset, None, words))


def checkpoint(folder, step, text):
    path = folder / "run" / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(text)
    return path


@pytest.mark.parametrize(
    "preset", ["mmdit", "mmdit_300m", "mmdit_1b", "mmdit_stable", "quickstart", "small", "tiny"]
)
def test_a_random_projection_is_never_frozen_unasked(tmp_path, preset):
    assert (
        decided(
            tmp_path, "training.loss_type=l2t", "training.loss_type_weights=null", preset=preset
        )
        == "none"
    )


def test_trained_weights_are_frozen_by_mode_and_what_is_asked_for_is_done(tmp_path):
    assert decided(tmp_path, "training.init_from=X") == "by_mode"
    assert decided(tmp_path, "training.init_from=X", "training.freeze=none") == "none"
    assert decided(tmp_path, "training.freeze=by_mode") == "by_mode"


def test_a_resumed_run_keeps_what_it_began_with(tmp_path):
    assert decided(tmp_path, "training.resume=auto") == "none", "there is nothing to resume"
    old = checkpoint(tmp_path, 5, "training:\n  freeze: mode\n")
    assert decided(tmp_path, "training.resume=auto") == "by_mode", (
        "its source need not be named again"
    )
    assert decided(tmp_path, f"training.resume={old}") == "by_mode"
    checkpoint(tmp_path, 10, "training: {freeze: none}\n")
    assert decided(tmp_path, "training.resume=auto", "training.init_from=X") == "none", (
        "the newest one counts"
    )
    checkpoint(tmp_path, 15, "training: [")
    checkpoint(tmp_path, 20, "\n")
    assert decided(tmp_path, "training.resume=auto", "training.init_from=X") == "none", (
        "damaged ones say nothing"
    )
    assert decided(tmp_path) == "none", "a fresh run of that name"


class OwnData(DataConfig):
    table: Annotated[FilePath, OnResume.FIXED] = None
    shards: Annotated[dict[str, float] | None, IsPath()] = None
    note: str | None = None


class OwnConfig(Config):
    data: OwnData = OwnData()


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("{tmp}/f/t.csv", "f/t.csv"),
        ("{tmp}/f/t.csv", "./f//t.csv"),
        ("{tmp}/f/t.csv", "f/../f/t.csv"),
        ("{tmp}/f/t.csv", "link/t.csv"),
        ("{tmp}/f/t.csv", "{tmp}//f/t.csv/"),
        ("{tmp}/f/t.csv", "~/f/t.csv"),
        ("{tmp}/f/t.csv", "$HOME/f/t.csv"),
        ("~/f/t.csv", "${{HOME}}/link/t.csv"),
        ("link/t.csv", "f/t.csv"),
    ],
)
def test_the_same_file_in_another_spelling_is_the_same(tmp_path, monkeypatch, then, now):
    """newcomer B2: neither refused where the path is FIXED, nor noted as a change where it is
    reported.
    """
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "t.csv").touch()
    (tmp_path / "link").symlink_to("f")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    then, now = then.format(tmp=tmp_path), now.format(tmp=tmp_path)
    old = checkpoint(tmp_path, 5, f"data: {{table: {then!r}, shards: {{{then!r}: 0.5}}}}\n")
    diff = diff_configs(old, OwnConfig(data={"table": now, "shards": {now: 0.5}}))
    assert (diff.errors, diff.warnings) == ([], [])
    diff = diff_configs(old, OwnConfig(data={"table": f"{now}2", "shards": {now: 0.6}}))
    assert len(diff.errors) == 1 and len(diff.warnings) == 1


def test_a_number_that_an_earlier_release_wrote_for_a_text_is_no_change(tmp_path):
    """public-reports C 1 own-config."""
    old = checkpoint(tmp_path, 5, "data: {note: 12e4567}\n")
    diff = diff_configs(old, OwnConfig(data={"note": "12e4567"}))
    assert (diff.errors, diff.warnings) == ([], [])
