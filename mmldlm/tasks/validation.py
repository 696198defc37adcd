"""Evaluation during training, for any task: passes over validation samples, with noise that
training never sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmldlm.config.schema import Config
from mmldlm.data.batch import Collator
from mmldlm.data.batch_plan import BatchPlan, Order
from mmldlm.data.lengths import AnyLengths
from mmldlm.data.loader import MicroBatches, iterate_items
from mmldlm.data.run_data import RunData
from mmldlm.engines.base import Engine

# Fraction of the training between two evaluations, under data.max_validation_samples=auto.
_COST_SHARE = 0.05
# Fewer samples give no useful estimate.
_MIN_SAMPLES = 64
# Forward passes that training on a sample costs: the backward pass is two.
_TRAINING_COST = 3


@dataclass
class PassTotals:
    """Totals of one pass over the validation samples, equal on every rank.

    Attributes:
        sums: Sums of the objective, over all ranks.
        counts: Counts of the batches, samples that were left out included.
        num_tokens: Real tokens of the samples that were not left out.
    """

    sums: dict[str, float]
    counts: dict[str, int]
    num_tokens: int


def num_samples(config: Config, available: int, global_batch: int, num_passes: int) -> int:
    """Return the samples of one evaluation: of `auto`, what a few percent of the training pay for.

    Args:
        available: Samples of the split in use.
        global_batch: Training samples of one optimizer step.
        num_passes: Passes over the samples in one evaluation.
    """
    if config.data.max_validation_samples != "auto":
        return available
    between = min(config.logging.eval_freq, config.training.num_train_steps) * global_batch
    affordable = int(_COST_SHARE * _TRAINING_COST * between / num_passes)
    return min(available, max(affordable, _MIN_SAMPLES))


class _WholeSplit(BatchPlan):
    """All samples of an order as one global batch: their noise is then a function of the sample's
    place among them, whatever the number of ranks and the size of the micro-batches.
    """

    def __init__(self, lengths: AnyLengths, order: Order, micro: int, world_size: int):
        self.accum = -(-order.count // (micro * world_size))
        padded = self.accum * micro * world_size
        super().__init__(lengths, padded, seed=0, shuffle=False, order=order)

    def _size(self, ids: np.ndarray) -> int:
        return len(ids)


class Validation:
    """The same samples, masks, timesteps and noise at every call, on any number of ranks, so that
    two calls differ only by the weights.

    Args:
        task: `Task` whose objective, sums and validation_figures these are.
        data: Data of the run.
        engine: Engine whose model is evaluated; every rank must call.
        passes: Name and collator of each pass over the samples.

    Attributes:
        num_samples: Samples of one evaluation.
        num_available: Samples of the validation split in use.
        num_batches: Batches of one evaluation.
        bad: {id, reason} of samples that this rank found unusable in the last call: they are in no
            sum, but in the counts.
    """

    SEED_OFFSET = 7_919

    def __init__(
        self,
        task: Any,
        data: RunData,
        engine: Engine,
        passes: Sequence[tuple[str, Collator]],
    ):
        config = data.config
        self.engine = engine
        self.objective = task.objective(config)
        self.task = task
        self.sums = task.sums_of(config)
        training = config.training
        micro = training.eval_batch_size or training.train_batch_size
        self.num_available = len(data.validation_lengths)
        global_batch = training.train_batch_size * training.grad_accum_steps * engine.world_size
        self.num_samples = num_samples(config, self.num_available, global_batch, len(passes))
        self.plans = [
            _WholeSplit(data.validation_lengths, order, micro, engine.world_size)
            for order in data.validation_orders(self.num_samples)
        ]
        self.passes = [
            (
                name,
                [
                    MicroBatches(
                        data.validation,
                        plan,
                        collator,
                        engine.rank,
                        engine.world_size,
                        plan.accum,
                    )
                    for plan in self.plans
                ],
            )
            for name, collator in passes
        ]
        self.num_batches = len(self.passes) * sum(plan.accum for plan in self.plans)
        self.bad: list[dict] = []

    @torch.no_grad()
    def run(self, goes_on: Callable[[int], bool] = lambda _: True) -> dict[str, float] | None:
        """Evaluate the validation samples; equal on every rank. Collective.

        Args:
            goes_on: Function of the number of batches done, called before every batch; its answer
                must be the same on every rank.

        Returns:
            None where goes_on said no. Else the figures, and bad_samples (of all ranks) where any
            rank found some. A figure without anything scored is left out.
        """
        module = self.engine.module
        was_training = module.training
        module.eval()
        try:
            return self._run(goes_on)
        finally:
            module.train(was_training)

    def _run(self, goes_on: Callable[[int], bool]) -> dict[str, float] | None:
        totals: dict[str, PassTotals] = {}
        bad: dict[int, dict] = {}
        num_bad = num_done = 0
        for name, datasets in self.passes:
            sums = torch.zeros(len(self.sums), dtype=torch.float64, device=self.engine.device)
            counts: dict[str, int] = {}
            num_tokens, bad_samples = 0, {}
            for dataset in datasets:
                for batch in iterate_items(dataset, range(dataset.accum)):
                    if not goes_on(num_done):
                        return None
                    num_done += 1
                    loss, metrics = self.objective(
                        self.engine.module, batch.to(self.engine.device)
                    )
                    sums += self.task.stack_sums(self.sums, loss, metrics)
                    # Tokens of valid samples; the counts are those of the plan.
                    num_tokens += batch.num_tokens
                    bad_samples.update({sample["id"]: sample for sample in batch.bad})
                # All micro-batches of a global batch have its counts.
                counts = {key: counts.get(key, 0) + value for key, value in batch.counts.items()}
            bad.update(bad_samples)
            local = self.engine.to_device([num_tokens, len(bad_samples)])
            *values, all_tokens, num_found = self.engine.sum_on_host(torch.cat([sums, local]))
            num_bad = max(num_bad, int(num_found))
            totals[name] = PassTotals(
                dict(zip(self.sums, values, strict=True)), counts, int(all_tokens)
            )
        self.bad = list(bad.values())
        figures = self.task.validation_figures(totals)
        return figures | ({"bad_samples": num_bad} if num_bad else {})
