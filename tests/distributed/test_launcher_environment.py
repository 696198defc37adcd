"""Ranks that srun and others start without RANK."""

from __future__ import annotations

import os

import pytest

from mmldlm.distributed.environment import (
    check_rank_environment,
    first_host,
    set_rank_environment,
)
from mmldlm.errors import UserError

OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}


@pytest.fixture
def variables(monkeypatch):
    for name in [
        *OWN,
        *(name for name in os.environ if name.startswith(("SLURM_", "PMI", "OMPI_"))),
    ]:
        monkeypatch.delenv(name, raising=False)

    def set_all(values: dict[str, str]) -> dict[str, str]:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        for name in OWN:  # so that monkeypatch removes what the code sets
            monkeypatch.setenv(name, values.get(name, ""))
            if name not in values:
                del os.environ[name]
        set_rank_environment()
        return {name: os.environ[name] for name in OWN if name in os.environ}

    return set_all


def test_tasks_of_srun_are_ranks(variables):
    found = variables(STEP)
    port = int(found.pop("MASTER_PORT"))
    assert (
        found == {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu07"}
        and 20000 <= port < 32000
    )


@pytest.mark.parametrize(
    ("listed", "node", "count"),
    [("4(x2)", "1", "4"), ("5,3", "1", "3"), ("2(x3),8", "3", "8"), ("4", "1", None)],
)
def test_the_tasks_of_this_node_are_counted(variables, listed, node, count):
    """Each would otherwise take as many CPUs as its own number leaves."""
    found = variables({**STEP, "SLURM_STEP_TASKS_PER_NODE": listed, "SLURM_NODEID": node})
    assert found.get("LOCAL_WORLD_SIZE") == count


def test_an_address_that_is_set_stays(variables):
    assert variables({**STEP, "MASTER_ADDR": "a", "MASTER_PORT": "1"})["MASTER_ADDR"] == "a"


@pytest.mark.parametrize(
    "values",
    [
        {**STEP, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"},  # the batch script
        {
            name: value
            for name, value in {**STEP, "SLURM_PROCID": "0"}.items()
            if name != "SLURM_STEP_ID"
        },
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {
            **STEP,
            "SLURM_NTASKS": "1",
            "SLURM_PROCID": "0",
            "PMI_RANK": "0",
            "PMI_SIZE": "1",
            "PMIX_RANK": "0",
        },
        {},
    ],
    ids=[
        "one task",
        "batch script",
        "batch script without a step",
        "srun -n 1 in a job of 8",
        "srun -n 1 with PMI",
        "no Slurm",
    ],
)
def test_one_process_trains_alone(variables, values):
    assert variables(values) == {}


def test_another_launcher_within_the_job_decides(variables):
    found = variables({**STEP, "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"})
    assert found == {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1"),
        ("n[007-012,20],m1", "n007"),
        ("a-b.c[3,5]x,d", "a-b.c3x"),
        ("r[1-2]n[08-9]", "r1n08"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_a_single_process_checks_out(monkeypatch):
    for name in OWN:
        monkeypatch.delenv(name, raising=False)
    check_rank_environment()
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(UserError, match="WORLD_SIZE"):
        check_rank_environment()
