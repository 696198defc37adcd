"""The data of a run: two splits, their lengths, and the config with what the data decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.config.schema import Config
from mmldlm.config.task_registry import find_task
from mmldlm.data.batching.batch_plan import BatchPlan, Order, SpacedOrder, build_batch_plan
from mmldlm.errors import UserError


@dataclass(kw_only=True)
class RunData(ABC):
    """The data of a run.

    Attributes:
        config: with the keys filled in that the data decides.
        train: training split, read by the task's collator.
        validation: validation split.
        train_lengths: [N] int32 tokens of the training samples in use.
        validation_lengths: [M] int32 tokens of the validation samples in use.
        source: file or folder that the data comes from, for the screen and for messages about bad
            samples.
        notes: lines for the user.
    """

    config: Config
    train: Any
    validation: Any
    train_lengths: np.ndarray
    validation_lengths: np.ndarray
    source: str = "the task's data"
    notes: list[str] = field(default_factory=list)

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash of the training split, wherever it is stored: a resume must find
        the same.
        """

    def locate(self, split: Any, sample: int) -> tuple[str, int]:
        """Return file or folder of a sample, and its row in it: where to look for a bad one.

        Args:
            split: self.train or self.validation.
        """
        return self.source, sample

    def training_plan(self, global_batch: int) -> BatchPlan:
        """Return the batch plan of training."""
        data, seed = self.config.data, self.config.training.seed
        return build_batch_plan(
            data.batching,
            self.train_lengths,
            global_batch,
            seed,
            data.bucket_batches,
            order=self._order(global_batch),
        )

    def _order(self, global_batch: int) -> Order | None:
        """Order of the training samples; None: reshuffled in every epoch."""
        return None

    def validation_orders(self, count: int) -> list[Order]:
        """Return which validation samples an evaluation of `count` uses; samples of two orders
        share no batch.
        """
        return [SpacedOrder(count, len(self.validation_lengths))]

    def describe(self) -> str:
        """Return one line for the screen."""
        return (
            f"{len(self.train_lengths):,} training and {len(self.validation_lengths):,} validation"
            f" samples from {self.source}, {int(self.train_lengths.sum()):,} tokens"
        )

    def shape(self) -> list[str]:
        """Return the dimensions that the data decides, for preflight: for example ["D=384",
        "V=30522"].
        """
        return []

    def files_to_keep(self) -> dict[str, Path]:
        """Files to copy into every checkpoint: path below the checkpoint -> path now (for example
        a tokenizer).
        """
        return {}


def open_run_data(config: Config) -> RunData:
    """Let the task of a config open its data, and check what it returns: the task may be a user's
    own.

    Raises:
        UserError: as Task.open_data, or what it returns is not the data of a run.
    """
    task = find_task(config.task)
    data = task.open_data(config)
    where = f"{type(task).__module__}:{type(task).__name__}.open_data"
    if not isinstance(data, RunData):
        raise UserError(f"a RunData from {where}", repr(data)[:200], "return one (docs/tasks.md)")
    for name in ("train_lengths", "validation_lengths"):
        lengths = getattr(data, name)
        if not (
            isinstance(lengths, np.ndarray)
            and lengths.ndim == 1
            and np.issubdtype(lengths.dtype, np.integer)
        ):
            found = (
                f"{type(lengths).__name__} {getattr(lengths, 'dtype', '')}"
                f" {getattr(lengths, 'shape', '')}"
            )
            raise UserError(
                f"{name} of {where}: [N] integers of NumPy",
                found,
                "return np.array(..., dtype=np.int32)",
            )
        if not len(lengths):
            split = name.removesuffix("_lengths")
            raise UserError(
                f"a sample for {split} in {data.source}",
                "none",
                "give more data, or split it otherwise",
            )
    return data
