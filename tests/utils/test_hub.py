"""Which words are names on the hub."""

from __future__ import annotations

import pytest

from mmldlm.errors import UserError
from mmldlm.utils.hub import is_hub_name, model_path


def test_a_path_that_exists_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("me/model") and is_hub_name("My-org/a.b_c")
    # RUN/latest of a run without a checkpoint is a path, too.
    (tmp_path / "me").mkdir()
    assert not is_hub_name("me/model")
    (tmp_path / "me" / "model").mkdir()
    assert model_path("me/model") == (tmp_path / "me" / "model").relative_to(tmp_path)
    with pytest.raises(UserError, match="leave revision out"):
        model_path("me/model", revision="v1")


@pytest.mark.parametrize(
    "path", ["model", "/me/model", "./me", "../me", "~/me", "me/model/step", "me/", "a b/c", ""]
)
def test_other_paths_are_no_names(path):
    assert not is_hub_name(path)
    assert str(model_path(path)) in (path, path.rstrip("/"), "me", ".")
