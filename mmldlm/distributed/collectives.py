"""How the ranks of a run agree, and raise an error together.

A rank that raises alone leaves the others waiting in their next collective. Whatever may fail on
one rank therefore runs in `Ranks.run_together`, after which all ranks continue or all raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mmldlm.errors import MmldlmError, UserError

T = TypeVar("T")
Failure = BaseException | None


def gather_objects(value: T, world_size: int, group: Any = None) -> list[T]:
    """Return the values of all ranks of a process group, in the order of the ranks. Collective."""
    if world_size == 1:
        return [value]
    # One process commits a checkpoint without torch.
    import torch.distributed as dist

    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: T, world_size: int) -> T:
    """Return rank 0's value on every rank. Collective."""
    if world_size == 1:
        return value
    import torch.distributed as dist

    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


class Ranks:
    """The ranks of a run, seen from one of them; this base class is one process alone.

    All methods are collective: every rank calls them in the same order.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
    """

    rank: int = 0
    world_size: int = 1

    def all_agree(self, ok: bool) -> bool:
        """Return whether `ok` is True on every rank."""
        return ok

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on every rank."""
        return gather_objects(value, self.world_size)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_agree(True)

    def gather_messages(self, text: str | None) -> list[str]:
        """Return the texts of the ranks that pass one, on every rank."""
        return [message for message in self.gather_objects(text) if message is not None]

    def raise_together(
        self, failure: Failure, explain: Callable[[Failure], BaseException]
    ) -> None:
        """Return if no rank has a failure; otherwise raise on every rank.

        Args:
            failure: Failure of this rank.
            explain: Makes the error of this rank from its own failure. Called on every rank once
                any has failed, so it may call further collectives.
        """
        if self.all_agree(failure is None):
            return
        error = explain(failure)
        if error is failure:
            raise error
        raise error from failure

    def run_together(
        self,
        work: Callable[[], T],
        explain: Callable[[Failure], BaseException],
        catch: tuple[type[Exception], ...] = (Exception,),
    ) -> T:
        """Return what work() returns on this rank; an error of any rank is raised on all.

        Args:
            work: Not collective.
            explain: See `raise_together`.
            catch: Errors that another rank could not foresee; any other is raised at once.
        """
        failure: Failure = None
        try:
            result = work()
        except catch as error:
            failure = error
        self.raise_together(failure, explain)
        return result

    def share_outcome(self, result: T, failure: Failure) -> T:
        """Return rank 0's result on every rank, or raise its failure on every rank.

        Args:
            result: Of rank 0; other ranks' are ignored, as are their failures.
            failure: Why rank 0 has no result.

        Raises:
            UserError: rank 0 failed with one.
            MmldlmError: it failed with any other error.
        """
        outcome: tuple[T, Any] = result, None
        if isinstance(failure, UserError):
            outcome = result, (failure.expected, failure.found, failure.fix)
        elif isinstance(failure, MmldlmError):
            outcome = result, str(failure)
        elif failure is not None:
            outcome = result, f"{type(failure).__name__}: {failure}"
        result, reason = broadcast_object(outcome, self.world_size)
        if isinstance(reason, tuple):
            raise UserError(*reason)
        if reason is not None:
            raise MmldlmError(reason)
        return result
