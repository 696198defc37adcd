"""Find the checkpoint to continue from: rank 0 searches and checks, all ranks get its answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmldlm.checkpoints import locate
from mmldlm.config.schema import Config
from mmldlm.engines.base import Engine
from mmldlm.errors import MmldlmError, UserError
from mmldlm.training.async_save import BackgroundTask
from mmldlm.utils.formatting import join_some


class CheckpointSearch:
    """Searches in a thread of rank 0, because every byte of a checkpoint is read. Everything
    public is collective.

    Args:
        wait: waits on all ranks while a function returns True, with a description and what may end
            the wait.
        stop_requested: whether this rank was asked to stop.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        wait: Callable[..., None],
        stop_requested: Callable[[], bool],
    ):
        self.config, self.engine = config, engine
        self.run_dir, self.is_main = config.run_dir(), engine.rank == 0
        self._wait, self._stop_requested = wait, stop_requested

    def find_resume(self) -> Path | None:
        """Return the step folder that training.resume names; None: start afresh.

        See Checkpointer.find_resume.
        """
        resume = self.config.training.resume
        return None if resume is None else self._agree(lambda: self._locate(resume))

    def find_rollback(self, below: int | None) -> Path | None:
        """Return the newest checkpoint for a rollback; None: there is none.

        Args:
            below: only checkpoints of earlier steps.
        """
        return self._agree(lambda: self._latest(for_rollback=True, below=below))

    def _agree(self, find: Callable[[], str | None]) -> Path | None:
        search = BackgroundTask(find, self.engine.device) if self.is_main else None
        self._wait(
            lambda: search is not None and search.is_running(),
            "checking a checkpoint",
            self._stop_requested,
        )
        found: list[Any] = [None, None]  # path and failure: rank 0 must not raise alone
        if search is not None:
            failure = search.failure
            if isinstance(failure, UserError):
                found[1] = (failure.expected, failure.found, failure.fix)
            elif failure is not None:
                found[1] = (
                    str(failure)
                    if isinstance(failure, MmldlmError)
                    else f"{type(failure).__name__}: {failure}"
                )
            found[0] = search.result
        if self.engine.world_size > 1:
            torch.distributed.broadcast_object_list(found, src=0)
        if isinstance(found[1], tuple):
            raise UserError(*found[1])
        if found[1] is not None:
            raise MmldlmError(found[1])
        return None if found[0] is None else Path(found[0])

    def _latest(self, **options) -> str | None:
        path = locate.find_latest_valid(self.run_dir, **{"on_damaged": _warn, **options})
        return None if path is None else str(path.resolve())

    def _locate(self, resume: str) -> str | None:
        if resume == "auto":
            damaged: list[str] = []
            path = self._latest(on_damaged=damaged.append)
            if path is None and damaged:
                raise UserError(
                    f"a valid checkpoint in {self.run_dir}, or none at all",
                    f"only damaged ones: {join_some(damaged, 3, '; ')}",
                    "restore one of them, or start under another logging.run_name; nothing was"
                    " changed",
                )
            for message in damaged:
                _warn(message)
            return path
        path = locate.locate_checkpoint(resume)
        for problem in locate.check_complete(path, with_state=True)[:1]:
            _warn(f"checkpoint {path.name} is used, its training state is complete: {problem}")
        return str(path)


def _warn(message: str) -> None:
    print(f"warning: {message}", flush=True)
