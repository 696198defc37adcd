"""RUN/last_best: chosen by a figure of the manifests, kept by retention, read like `latest`."""

from __future__ import annotations

import os

import pytest

from mmldlm.checkpoints import commit
from mmldlm.checkpoints.locate import locate_checkpoint, read_link
from mmldlm.checkpoints.retention import (
    figure_of,
    is_higher_better,
    prune,
    set_aside_after,
    update_best,
)
from mmldlm.errors import UserError


def save(run, step, **figures):
    """Commit a checkpoint of one file, with these figures of an evaluation if there are any."""
    pending = commit.begin(run, step)
    (pending.path / "weights").write_text(str(step))
    return pending.commit(**({"evaluation": figures} if figures else {}))


def best_of(run):
    link = read_link(run, "last_best")
    return None if link is None else link.name


@pytest.mark.parametrize(
    ("figure", "expected"), [("l2t_nelbo", "step_00000002"), ("l2t_accuracy", "step_00000003")]
)
def test_the_best_is_followed_and_never_pruned(tmp_path, figure, expected):
    figures = {1: (3.0, 0.1), 2: (2.0, 0.1), 3: (2.5, 0.4), 4: (2.0, 0.4), 5: None, 6: None}
    for step, values in figures.items():
        named = {} if values is None else dict(zip(("l2t_nelbo", "l2t_accuracy"), values))
        update_best(tmp_path, figure, [save(tmp_path, step, **named)])
        prune(tmp_path, keep_last=1)
    # Of equal ones the first; those without an evaluation never.
    assert best_of(tmp_path) == expected and os.path.islink(tmp_path / "last_best")
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [expected, "step_00000006"]
    assert locate_checkpoint(tmp_path / "last_best").name == expected
    assert locate_checkpoint(tmp_path).name == "step_00000006"


def test_a_best_that_a_rollback_abandons_makes_way_for_the_next(tmp_path):
    paths = [save(tmp_path, step, nelbo=value) for step, value in ((1, 3.0), (2, 2.0), (3, 1.0))]
    update_best(tmp_path, "nelbo", paths)
    assert best_of(tmp_path) == "step_00000003"
    set_aside_after(tmp_path, 2)
    assert best_of(tmp_path) is None
    assert update_best(tmp_path, "nelbo", paths[:2]) == paths[1]
    assert best_of(tmp_path) == "step_00000002"


def test_without_symlinks_a_text_file_names_it(tmp_path, monkeypatch):
    path = save(tmp_path, 1, nelbo=float("nan"))
    assert figure_of(path, "nelbo") is None and update_best(tmp_path, "nelbo", [path]) is None
    path = save(tmp_path, 2, nelbo=1)
    monkeypatch.setattr(os, "symlink", lambda *_, **__: (_ for _ in ()).throw(OSError("no")))
    update_best(tmp_path, "nelbo", [path])
    assert (tmp_path / "last_best").is_file() and locate_checkpoint(tmp_path / "last_best") == path
    (tmp_path / "last_best").write_text("checkpoints/step_00000009\n")
    with pytest.raises(UserError, match="`last_best` that names"):
        locate_checkpoint(tmp_path / "last_best")


def test_names_say_which_end_is_best():
    names = ("l2t_token_accuracy", "t2l_latent_cosine", "l2t_gain_null", "l2t_nelbo", "again_mse")
    assert [is_higher_better(name) for name in names] == [True, True, True, False, False]
