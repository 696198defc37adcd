"""Ranks of an attempt agree on its keys, whatever earlier attempts left in the store."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import pytest
import torch

from mmldlm.utils import job_store


@pytest.fixture
def store():
    kept = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kept.set_timeout(timedelta(seconds=20))
    return kept


def client(store):
    found = torch.distributed.TCPStore(
        "127.0.0.1", store.port, is_master=False, wait_for_workers=False
    )
    found.set_timeout(timedelta(seconds=20))
    return found


def wait(timeout: float = 20.0, lines: list[str] | None = None):
    return job_store._Wait(timeout, [].append if lines is None else lines.append)


def attempt(store, world_size: int, delay_of_rank_0: float = 0.0) -> list[str]:
    """Names that the ranks of one attempt agree on."""
    names: list[str] = [""] * world_size

    def run(rank: int) -> None:
        names[rank] = (
            job_store._invite(client(store), world_size, wait())
            if rank == 0
            else job_store._join(client(store), rank, wait())
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, world_size)]
    for thread in threads:
        thread.start()
    if delay_of_rank_0:  # the others are quicker, as after a restart
        threads[0].join(delay_of_rank_0)
    run(0)
    for thread in threads:
        thread.join(20)
    return names


def test_every_attempt_has_its_own_name(store):
    first, second = attempt(store, 3), attempt(store, 3, delay_of_rank_0=0.3)
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0] != ""


@pytest.mark.parametrize(
    "died", ["before its question", "after its question", "after the answer", "after joining"]
)
def test_a_dead_attempt_leaves_nothing_that_the_next_one_takes(store, died):
    prefix = job_store._PREFIX
    number = store.add(f"{prefix}/asked", 1)  # a rank of an attempt whose rank 0 died, too
    if died != "before its question":
        store.set(f"{prefix}/asked/{number}", "dead")
    if died in ("after the answer", "after joining"):
        store.set(f"{prefix}/answer/dead", "old")
    if died == "after joining":
        store.add(f"{prefix}/old/joined", 1)
    names = attempt(store, 2, delay_of_rank_0=0.2)
    assert names[0] == names[1] != "old"


def test_a_rank_that_never_comes_is_named(store, monkeypatch):
    monkeypatch.setattr(job_store, "_FIRST_NOTICE", 0.1)
    lines: list[str] = []
    joined = threading.Thread(target=job_store._join, args=(client(store), 1, wait()))
    joined.start()
    missing = "1 of 3 ranks at .*missing: rank 2; the others are on "
    with pytest.raises(job_store.RanksNotConnected, match=missing) as error:
        job_store._invite(client(store), 3, wait(0.5, lines))
    assert error.value.missing == (2,)
    joined.join(20)
    assert len(lines) >= 2 and all(line.startswith("waiting for ") for line in lines)


def test_a_rank_0_that_never_answers_is_named(store):
    with pytest.raises(
        job_store.RanksNotConnected, match="rank 0, which has not answered"
    ) as error:
        job_store._join(client(store), 1, wait(0.3))
    assert error.value.missing == (0,)


def test_the_holder_of_a_port_is_named(monkeypatch):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        monkeypatch.setenv("MASTER_PORT", str(holder.getsockname()[1]))
        error = job_store._explain(RuntimeError("EADDRINUSE"))
    assert f"taken by pid {os.getpid()}: " in str(error) and "MASTER_PORT to a free" in str(error)
