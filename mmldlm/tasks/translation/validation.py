"""Evaluation during training: losses on validation data, shared by all ranks, with noise that training never sees."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mmldlm.config.schema import PURE_MODES, Config
from mmldlm.data.batching.batch_plan import BatchPlan, Spaced
from mmldlm.data.batching.loader import MicroBatches, iterate_steps
from mmldlm.data.batching.run_data import RunData
from mmldlm.engines.base import Engine
from mmldlm.tasks.translation.noiser import Noiser
from mmldlm.tasks.translation.objective import METRICS, TranslationObjective

_SEED_OFFSET = 7_919
_SHARE = 0.05  # of the training between two evaluations that one may cost, under data.max_validation_samples=auto
_LEAST = 64  # samples: fewer say nothing
_TRAINING_COST = 3  # forward passes that training on a sample costs: its backward pass is two


def passes_of(config: Config) -> list[tuple[str, str, float]]:
    """Name, mode and share of null conditions of each pass over the validation samples."""
    found = []
    for mode, weight in config.training.mode_weights().items():
        if weight > 0:
            found.append((mode, mode, 0.0))
            if mode == "l2t" and config.training.condition_dropout > 0:
                found.append(("l2t_null", "l2t", 1.0))
    return found


def num_samples(config: Config, available: int, global_batch: int) -> int:
    """Samples of one evaluation: those that data.max_validation_samples leaves, of `auto` what a few percent pay for.

    Args:
        available: samples of the split that are in use. global_batch: training samples of one optimizer step.
    """
    if config.data.max_validation_samples != "auto":
        return available
    between = min(config.logging.eval_freq, config.training.num_train_steps) * global_batch
    affordable = int(_SHARE * _TRAINING_COST * between / len(passes_of(config)))
    return min(available, max(affordable, _LEAST))


class Validation:
    """The same samples, masks, timesteps and noise at every call, so that two calls differ only by the weights.

    Args:
        data: of the run. engine: whose model is evaluated; every rank must call.

    Attributes:
        bad: {id, reason} of the samples that this rank found unusable in the last call: they are in no figure.
    """

    def __init__(self, data: RunData, engine: Engine):
        config = data.config
        self.engine, self.objective = engine, TranslationObjective(config)
        micro = config.training.eval_batch_size or config.training.train_batch_size
        seed = config.training.seed + _SEED_OFFSET
        self.num_available = len(data.validation_lengths)
        global_batch = config.training.train_batch_size * config.training.grad_accum_steps * engine.world_size
        self.num_samples = num_samples(config, self.num_available, global_batch)
        self.plan = BatchPlan(
            data.validation_lengths,
            micro * engine.world_size,
            seed,
            shuffle=False,
            order=Spaced(self.num_samples, self.num_available),
        )
        self.passes: list[tuple[str, MicroBatches]] = []
        self.bad: list[dict] = []

        def add(name: str, mode: str, dropout: float) -> None:
            noiser = Noiser(
                config,
                config.model.mask_token_id,
                config.model.pad_token_id,
                config.model.eos_token_id,
                data.latent_mean,
                data.latent_std,
                mode_weights={other: float(other == mode) for other in PURE_MODES},
                seed=seed,
                condition_dropout=dropout,
                max_norm=data.max_latent_norm(),
            )
            dataset = MicroBatches(data.validation, self.plan, noiser, engine.rank, engine.world_size, accum=1)
            self.passes.append((name, dataset))

        for name, mode, dropout in passes_of(config):
            add(name, mode, dropout)
        self.num_batches = len(self.passes) * self.plan.batches_per_epoch

    @torch.no_grad()
    def run(self, goes_on: Callable[[int], bool] = lambda _: True) -> dict[str, float] | None:
        """Metrics over the validation samples, equal on every rank. Collective.

        Args:
            goes_on: asked before every batch, with the number of those done of `num_batches`; its answer must be the
                same on every rank.

        Returns:
            None where goes_on said no. Else
            {mode}_nelbo (nats per token, EOS counted), {mode}_token_accuracy (at masked positions), {mode}_latent_mse,
            {mode}_latent_cosine, l2t_length_nll, and l2t_gain_null = NELBO with the null minus with the right latent;
            bad_samples, where any rank found some (of all ranks, the same number on each). Every figure is of what was
            scored: one of which nothing was is left out.
        """
        self.engine.module.eval()
        try:
            return self._figures(goes_on)
        finally:
            self.engine.module.train()

    def _figures(self, goes_on: Callable[[int], bool]) -> dict[str, float] | None:
        result: dict[str, float] = {}
        bad: dict[int, dict] = {}
        num_bad = num_done = 0
        for name, dataset in self.passes:
            sums = torch.zeros(len(METRICS), dtype=torch.float64, device=self.engine.device)
            num_tokens, found = 0, {}
            for batches in iterate_steps(dataset, 0, self.plan.batches_per_epoch):
                if not goes_on(num_done):
                    return None
                num_done += 1
                for batch in batches:
                    _, metrics = self.objective(self.engine.module, batch.to(self.engine.device))
                    sums += torch.stack([metrics[key].double() for key in METRICS])
                    num_tokens += batch.num_tokens  # of the sound samples; the batch's own counts are the plan's
                    found.update({sample["id"]: sample for sample in batch.bad})
            bad.update(found)
            told = self.engine.to_device([num_tokens, len(found)])
            *values, num_tokens, num_found = self.engine.sum_on_host(torch.cat([sums, told]))
            num_bad = max(num_bad, int(num_found))
            total = dict(zip(METRICS, values, strict=True))
            if not name.startswith("t2l") and num_tokens:
                result[f"{name}_nelbo"] = total["text_nelbo_sum"] / num_tokens
                result[f"{name}_token_accuracy"] = total["text_correct"] / max(total["text_masked"], 1)
                result[f"{name}_length_nll"] = total["length_nll_sum"] / max(total["length_scored"], 1)
            if total["latent_scored"]:
                result[f"{name}_latent_mse"] = total["latent_error_sum"] / total["latent_scored"]
                result[f"{name}_latent_cosine"] = total["latent_cosine_sum"] / total["latent_scored"]
        self.bad = list(bad.values())
        if num_bad:
            result["bad_samples"] = num_bad
        if "l2t_null_nelbo" in result:
            result["l2t_gain_null"] = result["l2t_null_nelbo"] - result["l2t_nelbo"]
        return result
