"""The key-value store of a launch, with keys of their own for every attempt.

torchrun keeps one store for all attempts of `--max-restarts`, and gives it to the ranks as it is.
A rank that is quicker than rank 0 would read the addresses and marks that the dead attempt left in
it.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_PREFIX = "mmldlm/attempt"
_POLL = 0.02  # seconds


def connect_job_store(timeout: float) -> tuple[Store, int, int]:
    """Return the store of this attempt, the rank and the world size, from RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT.

    Collective over all ranks.

    Args:
        timeout: Seconds to wait for rank 0 and for the other ranks; also of a later wait for a
            key.

    Raises:
        torch.distributed.DistError: not all ranks came in time.
    """
    import torch.distributed as dist

    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    store.set_timeout(timedelta(seconds=timeout))
    attempt = _invite(store, world_size, timeout) if rank == 0 else _join(store)
    return dist.PrefixStore(f"{_PREFIX}/{attempt}", store), rank, world_size


def _join(store: Store) -> str:
    """Ask for the attempt's name under a name of this process, which no earlier rank 0 can have
    answered.
    """
    own = uuid.uuid4().hex
    store.set(f"{_PREFIX}/asked/{store.add(f'{_PREFIX}/asked', 1)}", own)
    attempt = store.get(f"{_PREFIX}/answer/{own}").decode()
    store.add(f"{_PREFIX}/{attempt}/joined", 1)
    return attempt


def _invite(store: Store, world_size: int, timeout: float) -> str:
    """Answer every question, those of dead ranks too, until all ranks of this attempt have joined
    it.
    """
    from torch.distributed import DistStoreError

    attempt, unanswered, num_asked, end = (
        uuid.uuid4().hex,
        set[int](),
        0,
        time.monotonic() + timeout,
    )
    while (num_joined := store.add(f"{_PREFIX}/{attempt}/joined", 0)) < world_size - 1:
        if time.monotonic() > end:
            raise DistStoreError(
                f"timed out after {timeout:.0f} s: {num_joined + 1}/{world_size} ranks joined"
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
