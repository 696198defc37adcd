"""Numbers in environment variables."""

from __future__ import annotations

import pytest

from mmldlm.errors import UserError
from mmldlm.utils.environment import check_rank_variables, int_from_env, platform_variables
from tests.trials.test_config_values import VARIABLES


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_that_is_no_number_is_named(variable, monkeypatch):
    """trials-3 BAD 23."""
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name}="):
        check_rank_variables()


def test_a_number_is_read(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", " 3 ")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("MASTER_PORT", "")
    check_rank_variables()
    assert (int_from_env("WORLD_SIZE", 1), int_from_env("MASTER_PORT", 5)) == (3, 5)


@pytest.mark.parametrize("local_rank, found", [("", True), (None, True), ("0", False)])
def test_an_empty_local_rank_starts_no_rank(local_rank, found, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert platform_variables() == ("RANK=1, WORLD_SIZE=2" if found else "")
