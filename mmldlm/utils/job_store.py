"""The key-value store of a launch, with keys of their own for every attempt, and the wait for its
ranks.

torchrun keeps one store for all attempts of `--max-restarts`, and gives it to the ranks as it is.
A rank that is quicker than rank 0 would read the addresses and marks that the dead attempt left in
it.
"""

from __future__ import annotations

import functools
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from mmldlm.errors import EXIT_FAILED, MmldlmError
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.formatting import count_noun, describe_os_error, first_line, join_some
from mmldlm.utils.network import port_owner

if TYPE_CHECKING:
    from torch.distributed import Store

_PREFIX = "mmldlm/attempt"
_POLL = 0.02  # seconds
_RETRY = 0.25  # seconds between two attempts to reach rank 0
_FIRST_NOTICE = 15.0  # seconds of waiting after which a line says for whom


class RanksNotConnected(MmldlmError):
    """The ranks did not find one another at the start; nothing was done.

    Attributes:
        found: What was found, in words.
        missing: Ranks that this one has waited for in vain; empty: not known.
    """

    exit_code = EXIT_FAILED

    def __init__(self, found: str, fix: str | None = None, missing: Sequence[int] = ()):
        self.found, self.missing = found, tuple(missing)
        expected = (
            f"all {int_from_env('WORLD_SIZE', 1)} ranks to connect through"
            f" MASTER_ADDR:MASTER_PORT, {_address()}"
        )
        fix = fix or (
            "look for a rank that did not start; check that rank 0's machine has that address"
            " and that the port is open between the nodes (mmldlm preflight checks both)"
        )
        super().__init__(f"expected {expected}\n  found: {found}\n  fix:   {fix}")


class Missing(NamedTuple):
    """Who has not come: in words, for example "rank 0 at 10.0.0.1:29500", and the ranks."""

    words: str
    ranks: tuple[int, ...]


class _Wait:
    """A wait for other ranks: its end, and lines that say for whom.

    Args:
        timeout: Seconds from now to the end.
        notify: Function that prints a line.
    """

    def __init__(self, timeout: float, notify: Callable[[str], None]):
        self._started, self._timeout, self._notify = time.monotonic(), timeout, notify
        self._next_notice = _FIRST_NOTICE

    @property
    def seconds_left(self) -> float:
        return self._started + self._timeout - time.monotonic()

    def go_on(self, describe: Callable[[], Missing]) -> None:
        """Say now and then for whom this rank waits.

        Args:
            describe: Returns who is missing.

        Raises:
            RanksNotConnected: the time is up.
        """
        elapsed = time.monotonic() - self._started
        if elapsed >= self._timeout:
            missing = describe()
            # The limit, not the time: ranks recognize one another's error by its text.
            found = f"{missing.words} after {self._timeout:g} s"
            raise RanksNotConnected(found, missing=missing.ranks)
        if elapsed >= self._next_notice:
            self._next_notice *= 2
            self._notify(
                f"waiting for {describe().words} after {elapsed:.0f} s; the limit is"
                f" {self._timeout:.0f} s"
            )


def connect_job_store(timeout: float, notify: Callable[[str], None]) -> tuple[Store, int, int]:
    """Return the store of this attempt, the rank and the world size, from RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT.

    Collective over all ranks.

    Args:
        timeout: Seconds to wait for rank 0 and for the other ranks; also of a later wait for a
            key.
        notify: Function that prints a line about a long wait.

    Raises:
        RanksNotConnected: not all ranks came in time, or the port is taken.
    """
    import torch.distributed as dist

    rank, world_size = int_from_env("RANK", 0), int_from_env("WORLD_SIZE", 1)
    # One process of a node speaks for all of its ranks.
    wait = _Wait(timeout, notify if int_from_env("LOCAL_RANK", 0) == 0 else lambda line: None)
    # torchrun's agent on the first node keeps the store for all ranks.
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_server:
        _wait_for_server(wait)
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int_from_env("MASTER_PORT", 0),
            is_master=is_server,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
        attempt = _invite(store, world_size, wait) if rank == 0 else _join(store, rank, wait)
    except (RuntimeError, OSError, ValueError) as error:  # DistError is a RuntimeError
        raise _explain(error) from error
    return dist.PrefixStore(f"{_PREFIX}/{attempt}", store), rank, world_size


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _wait_for_server(wait: _Wait) -> None:
    """Wait until rank 0's address accepts connections.

    torch would print a trace for every failed attempt.
    """
    address = os.environ["MASTER_ADDR"], int_from_env("MASTER_PORT", 0)
    while True:
        try:
            socket.create_connection(
                address, timeout=max(min(wait.seconds_left, 5.0), 0.1)
            ).close()
            return
        except OSError as error:
            reason = describe_os_error(error)
        wait.go_on(functools.partial(Missing, f"rank 0 at {_address()}: {reason}", (0,)))
        time.sleep(_RETRY)


def _explain(error: Exception) -> RanksNotConnected:
    reason = first_line(error)
    if "EADDRINUSE" not in reason and "address already in use" not in reason.lower():
        return RanksNotConnected(reason)
    owner = port_owner(int_from_env("MASTER_PORT", 0))
    holder = (
        "a process that this user cannot see"
        if owner is None
        else f"pid {owner['pid']}: {owner['command']}"
    )
    return RanksNotConnected(
        f"the port is taken by {holder}",
        "set MASTER_PORT to a free one, the same for all ranks, or end that process",
    )


def _join(store: Store, rank: int, wait: _Wait) -> str:
    """Ask for the attempt's name under a name of this process, which no earlier rank 0 can have
    answered.
    """
    own = uuid.uuid4().hex
    store.set(f"{_PREFIX}/asked/{store.add(f'{_PREFIX}/asked', 1)}", own)
    answer = f"{_PREFIX}/answer/{own}"
    _wait_for_key(store, answer, wait)
    attempt = store.get(answer).decode()
    store.set(f"{_PREFIX}/{attempt}/host/{rank}", socket.gethostname())
    store.add(f"{_PREFIX}/{attempt}/joined", 1)
    return attempt


def _wait_for_key(store: Store, key: str, wait: _Wait) -> None:
    from torch.distributed import DistStoreError

    while True:
        try:
            store.wait([key], timedelta(seconds=max(min(wait.seconds_left, _FIRST_NOTICE), 0.1)))
            return
        except DistStoreError:  # not yet
            wait.go_on(lambda: Missing(f"rank 0, which has not answered at {_address()},", (0,)))


def _invite(store: Store, world_size: int, wait: _Wait) -> str:
    """Answer every question, those of dead ranks too, until all ranks of this attempt have joined
    it.
    """
    attempt, unanswered, num_asked = uuid.uuid4().hex, set[int](), 0
    while (num_joined := store.add(f"{_PREFIX}/{attempt}/joined", 0)) < world_size - 1:
        wait.go_on(
            functools.partial(_describe_missing, store, attempt, world_size, num_joined + 1)
        )
        total = store.add(f"{_PREFIX}/asked", 0)
        unanswered |= set(range(num_asked + 1, total + 1))
        num_asked = total
        for number in list(unanswered):
            if store.check([f"{_PREFIX}/asked/{number}"]):
                own = store.get(f"{_PREFIX}/asked/{number}").decode()
                store.set(f"{_PREFIX}/answer/{own}", attempt)
                unanswered.discard(number)
        time.sleep(_POLL)
    return attempt


def _describe_missing(store: Store, attempt: str, world_size: int, num_joined: int) -> Missing:
    """Describe the ranks that have not come, and the hosts of those that have."""
    hosts, missing = {socket.gethostname(): None}, []
    for rank in range(1, world_size):
        key = f"{_PREFIX}/{attempt}/host/{rank}"
        if store.check([key]):
            hosts[store.get(key).decode()] = None
        else:
            missing.append(rank)
    words = (
        f"{world_size - num_joined} of {count_noun(world_size, 'rank')} at {_address()}"
        f" (missing: rank {join_some(missing, 8)}; the others are on {join_some(hosts, 8)})"
    )
    return Missing(words, tuple(missing))
