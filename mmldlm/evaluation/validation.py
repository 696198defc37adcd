"""Evaluation during training: losses on validation data, shared by all ranks, with noise that training never sees."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mmldlm.config.schema import PURE_MODES
from mmldlm.data.loader import MicroBatches, iterate_steps
from mmldlm.data.noising import Noiser
from mmldlm.data.plan import BatchPlan
from mmldlm.data.resolve import RunData
from mmldlm.engines.base import Engine
from mmldlm.objectives.translation import METRICS, TranslationObjective

_SEED_OFFSET = 7_919


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
        self.plan = BatchPlan(
            data.validation_lengths, micro * engine.world_size, seed, bucket_batches=64, shuffle=False
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

        for mode, weight in config.training.mode_weights().items():
            if weight > 0:
                add(mode, mode, 0.0)
                if mode == "l2t" and config.training.condition_dropout > 0:
                    add("l2t_null", "l2t", 1.0)

    @torch.no_grad()
    def run(self, on_batch: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Metrics over the whole validation split, equal on every rank. Collective.

        Args:
            on_batch: called before every batch (a sign of life).

        Returns:
            {mode}_nelbo (nats per token, EOS counted), {mode}_token_accuracy (at masked positions), {mode}_latent_mse,
            {mode}_latent_cosine, l2t_length_nll, and l2t_gain_null = NELBO with the null minus with the right latent;
            bad_samples, where any rank found some (of all ranks, the same number on each). Every figure is of what was
            scored: one of which nothing was is left out.
        """
        self.engine.module.eval()
        result: dict[str, float] = {}
        bad: dict[int, dict] = {}
        num_bad = 0
        for name, dataset in self.passes:
            sums = torch.zeros(len(METRICS), dtype=torch.float64, device=self.engine.device)
            num_tokens, found = 0, {}
            for batches in iterate_steps(dataset, 0, self.plan.batches_per_epoch):
                on_batch()
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
        self.engine.module.train()
        return result
