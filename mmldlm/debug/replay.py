"""Rerun a skipped step in one process, find the operation that produced its non-finite numbers,
and report it.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from mmldlm.checkpoints import locate
from mmldlm.checkpoints.init_from import init_weights
from mmldlm.checkpoints.manifest import ENGINE_FOLDER
from mmldlm.checkpoints.resume import open_training_state
from mmldlm.checkpoints.training_state import read_training_state
from mmldlm.config.renamed_keys import with_new_names
from mmldlm.data.batch import Batch
from mmldlm.data.loader import MicroBatches
from mmldlm.debug.nan_tracer import (
    NanOrigin,
    NanTracer,
    nonfinite_inputs,
    nonfinite_kind,
    nonfinite_weights,
)
from mmldlm.distributed.environment import pick_device
from mmldlm.engines.base import Autocast, compute_dtype
from mmldlm.engines.deepspeed_config import resolve_stage
from mmldlm.engines.muon import attach_muon
from mmldlm.engines.torch_engines import SingleEngine
from mmldlm.errors import UserError
from mmldlm.observe.layer_stats import LayerStatsCollector
from mmldlm.stability.guard import NO_USABLE_SAMPLE, Guard
from mmldlm.stability.skipped_steps import load_skipped_step, nonfinite_micro_batches
from mmldlm.tasks.registry import build_config, find_task, open_run_data
from mmldlm.training.state import TrainingState
from mmldlm.training.step import StepContext, train_step
from mmldlm.utils.formatting import count_noun, for_screen, join_some
from mmldlm.utils.json_files import plain_value

DTYPES = ("bf16", "fp16", "fp32")
MAX_AUTOMATIC_MICRO_BATCHES = 64
"""Largest number of micro-batches that is retrained without --exact; fewer than the samples run
one by one.
"""


def replay_skipped_step(
    run_dir: Path,
    event: str,
    *,
    exact: bool = False,
    checkpoint: str | None = None,
    dtypes: Sequence[str] | None = None,
    max_samples: int = 256,
) -> dict:
    """Replay one skipped step in every dtype, print the findings and return them as a JSON-ready
    report.

    Args:
        run_dir: Folder of the run.
        event: Step number of a skip, or `last`.
        exact: Whether to retrain first, from the nearest checkpoint up to the step.
        checkpoint: Checkpoint to take the weights from instead.
        dtypes: Compute dtypes to try (default: the run's, bf16 and fp32).
        max_samples: Maximum number of samples that are run one by one.

    Raises:
        UserError: unknown run or event, data that differs from what the run read, or both `exact`
            and `checkpoint`.
    """
    if exact and checkpoint is not None:
        raise UserError(
            "weights of --checkpoint, or those that --exact trains up to",
            f"--exact and --checkpoint {checkpoint}",
            "omit one of the two",
        )
    skipped = load_skipped_step(run_dir, event)
    print(f"step {skipped['step']} was skipped: {skipped['reason']}")
    dtypes = list(dict.fromkeys(dtypes or [skipped["dtype"], "bf16", "fp32"]))
    replay = Replay(run_dir, skipped)
    if skipped["reason"] == NO_USABLE_SAMPLE and (rejected := replay.rejected_samples()):
        print_rejected(rejected)
        return {"step": skipped["step"], "reason": skipped["reason"], "rejected": rejected}
    replay.load_weights(checkpoint, exact)
    report = _run_dtypes(replay, dtypes, max_samples)
    if is_clean(report) and replay.num_micro_batches_before <= MAX_AUTOMATIC_MICRO_BATCHES:
        print(
            f"nothing found with older weights: retraining {replay.num_steps_before} step(s), as"
            " --exact does"
        )
        replay = Replay(run_dir, skipped)
        replay.load_weights(None, True)
        report = _run_dtypes(replay, dtypes, max_samples)
    if is_clean(report):
        age = replay.num_steps_before
        advice = explain_clean(
            run_dir,
            skipped,
            replay.is_exact,
            age,
            nonfinite_micro_batches(skipped["micro_batches"]),
        )
        print(for_screen(advice, sys.stdout))
    return report


def _run_dtypes(replay: Replay, dtypes: Sequence[str], max_samples: int) -> dict:
    """Run the micro-batches of the step in every dtype; return the report."""
    skipped = replay.skipped
    print(f"weights  {replay.weights}")
    entries = nonfinite_micro_batches(skipped["micro_batches"]) or skipped["micro_batches"]
    subset = "with a bad loss" if len(entries) < len(skipped["micro_batches"]) else "of the step"
    print(f"running  {len(entries)} micro-batch(es) {subset}, of {len(skipped['micro_batches'])}")
    report = {
        "step": skipped["step"],
        "reason": skipped["reason"],
        "weights": replay.weights,
        "dtypes": {},
    }
    for dtype in dtypes:
        report["dtypes"][dtype] = replay.run(dtype, entries, max_samples)
    return report


class Replay:
    """One skipped step: its data, its weights and its micro-batches.

    Attributes:
        weights: Description of where the weights come from.
        is_exact: Whether they are the weights of the step.
        num_steps_before: Training steps between these weights and the step; None if unknown.
    """

    def __init__(self, run_dir: Path, skipped: dict):
        self.skipped, self.run_dir = skipped, run_dir
        self.config = build_config(with_new_names(skipped["config"]))
        self.task = find_task(self.config.task)
        self.data = open_run_data(self.config)
        self.config = self.data.config
        self.device = pick_device(0)
        self.plan = self.data.training_plan(skipped["global_batch"])
        self.collator = self.task.collator(self.data)
        self.objective = self.task.objective(self.config)
        self.batch = self.plan.batch(skipped["step"] - 1)
        self._check_samples()
        self.num_steps_before: int | None = None
        self.model = self.task.build_model(self.data)
        self.parameters = self.task.parameter_plan(self.model, self.config)
        self.parameters.set_requires_grad(self.model)
        self.weights, self.is_exact = "those of the start", False

    def _check_samples(self) -> None:
        for entry in self.skipped["micro_batches"]:
            ids, _ = self.batch.samples_at(self._slots_of(entry))
            if ids.tolist() != entry["ids"]:
                raise UserError(
                    f"the samples of step {self.skipped['step']} as the run read them",
                    f"other samples in {self.data.source}",
                    "restore the data that the run was trained on",
                )

    def rejected_samples(self) -> list[dict]:
        """Return {id, reason} of the step's samples that are unusable."""
        batches = [self._collate(self._slots_of(entry)) for entry in self.skipped["micro_batches"]]
        return [bad for batch in batches for bad in batch.bad if not bad.get("repaired")]

    def _collate(self, slots: np.ndarray) -> Batch:
        return self.collator.collate(self.batch, slots, self.data.train, self.data.train_lengths)

    def _slots_of(self, entry: dict) -> np.ndarray:
        skipped = self.skipped
        return self.plan.slots(
            self.batch, skipped["world_size"], skipped["accum"], entry["rank"], entry["micro"]
        )

    # -- weights ----------------------------------------------------------------------------------

    def load_weights(self, checkpoint: str | None, exact: bool) -> None:
        """Load the weights of a checkpoint; None: those nearest to the step, with `exact` trained
        up to it.
        """
        self.weights, self.is_exact = self._load_weights(checkpoint, exact)

    def _load_weights(self, checkpoint: str | None, exact: bool) -> tuple[str, bool]:
        """Load the weights nearest to the step; return (description, whether they are exact)."""
        # A skipped step does not change the weights, so a checkpoint of the step itself is exact,
        # too.
        before, after = self.skipped["step"] - 1, self.skipped["step"]
        if checkpoint is not None:
            init_weights(self.model, checkpoint)
            return checkpoint, False
        start, path = self._nearest_checkpoint(after)
        if exact and start < before:
            self._retrain(path, start, before)
            return (
                (
                    f"trained from {path or 'the start'} (step {start}) to step {before} on this"
                    " process"
                ),
                True,
            )
        source = path or self.config.training.init_from
        if source is not None:
            init_weights(self.model, str(source))
        description = str(path) if path is not None else "initial weights of the run"
        if start in (before, after):
            return f"{description}: those of the step", True
        self.num_steps_before = before - start
        return f"{description}: those of step {start}, {before - start} step(s) before", False

    def _nearest_checkpoint(self, last_step: int) -> tuple[int, Path | None]:
        """Return (step, path) of the newest valid checkpoint up to last_step; (0, None) if there
        is none.
        """
        saved = [path for _, path in locate.list_checkpoints(self.run_dir)]
        valid = [path for path in saved if not locate.examine_with_state(path).problems]
        steps = [(read_training_state(path)["step"], path) for path in valid]
        steps = [(step, path) for step, path in steps if step <= last_step]
        resumed = self.config.training.resume
        if steps or resumed in (None, "auto"):
            return steps[-1] if steps else (0, None)
        path = locate.locate_checkpoint(resumed)
        return read_training_state(path)["step"], path

    @property
    def num_micro_batches_before(self) -> float:
        """Micro-batches that retraining up to the step takes; inf if the weights are exact or the
        distance unknown.
        """
        if self.is_exact or self.num_steps_before is None:
            return math.inf
        return self.num_steps_before * self.skipped["world_size"] * self.skipped["accum"]

    def _retrain(self, path: Path | None, start: int, end: int) -> None:
        """Repeat steps start .. end - 1 with the micro-batches of all ranks in sequence (losses
        equal to rounding).
        """
        skipped, config = self.skipped, copy.deepcopy(self.config)
        if path is None and config.training.init_from is not None:
            init_weights(self.model, config.training.init_from)
        num_micro_batches = skipped["world_size"] * skipped["accum"]
        config.training.grad_accum_steps = num_micro_batches
        engine = SingleEngine(self.model, config, self.parameters)
        if config.optimizer.kind == "muon":
            attach_muon(engine, self.parameters)
        saved = {} if path is None else read_training_state(path)
        state = TrainingState(
            skipped["global_batch"],
            len(self.data.train_lengths),
            step=start,
            applied_steps=saved.get("applied_steps", 0),
            lr_scale=skipped["lr_scale"],
            passed_over=[list(steps) for steps in skipped["passed_over"]],
        )
        if path is not None:
            with open_training_state(path / ENGINE_FOLDER) as reader:
                engine.load(reader, state.applied_steps if reader.has_moments else 0)
                reader.finish()
            engine.sync_weights_from_masters()
        guard = Guard(config.stability, config.training.dtype)
        guard.restore(saved.get("guard", {}))
        no_layer_stats = LayerStatsCollector(engine, 0)
        context = StepContext(
            self.task,
            config,
            engine,
            self.plan,
            self.objective,
            state,
            guard,
            no_layer_stats,
            average=None,
        )
        micro_batches = MicroBatches(
            self.data.train, self.plan, self.collator, 0, 1, num_micro_batches
        )
        while state.step < end:
            if state.is_excluded():
                state.exclude_batch(skipped["global_batch"])
                continue
            first = state.step * num_micro_batches
            train_step(context, [micro_batches[first + i] for i in range(num_micro_batches)])
            print(f"trained  step {state.step} of {end}", end="\r", flush=True)
        print()

    # -- running ----------------------------------------------------------------------------------

    def run(self, dtype: str, entries: list[dict], max_samples: int) -> dict:
        """Run all entries in one dtype, then the samples of failing ones one by one; print and
        return the findings.
        """
        model, module = self._cast_model(dtype)
        self._loss_scale = self.skipped["loss_scale"] if dtype == "fp16" else 1.0
        bad_weights = nonfinite_weights(model)
        findings: dict[str, Any] = {
            "clean": not bad_weights,
            "weights": [str(origin) for origin in bad_weights],
            "micro_batches": [],
        }
        for origin in bad_weights[:8]:
            print(f"{dtype}     {origin}")
        norms, num_left = [], max_samples
        for entry in entries:
            slots = self._slots_of(entry)
            result = self.forward_backward(model, module, slots)
            norms.append(result.grad_norm)
            record = {
                "rank": entry["rank"],
                "micro": entry["micro"],
                **result.to_json(),
                "samples": [],
            }
            if not result.is_clean:
                findings["clean"] = False
                print(
                    f"{dtype}     rank {entry['rank']} micro-batch {entry['micro']}:"
                    f" {result.summary()}"
                )
            if not result.is_clean or self.skipped["reason"].startswith("spike"):
                for slot in slots[slots < len(self.batch.ids)][:num_left]:
                    record["samples"].append(
                        self.forward_backward(model, module, np.array([slot])).to_json()
                    )
                    num_left -= 1
                print_samples(record["samples"])
            findings["micro_batches"].append(record)
        if findings["clean"]:
            total = math.sqrt(math.fsum(norm * norm for norm in norms))
            print(
                f"{dtype}     clean: all outputs and gradients are finite (combined gradient norm"
                f" {total:.4g})"
            )
        return findings

    def _cast_model(self, dtype: str) -> tuple[nn.Module, nn.Module]:
        """Return (model, callable module) as the run's engine computes in this dtype."""
        model = copy.deepcopy(self.model).to(self.device)
        if dtype == "fp32":
            return model, model
        config = self.config
        keeps_fp32 = config.engine.kind in ("single", "ddp") or (
            config.engine.kind == "deepspeed" and resolve_stage(config) == 0
        )
        if keeps_fp32:
            return model, Autocast(model, self.device.type, compute_dtype(dtype))
        for parameter in model.parameters():
            parameter.data = parameter.data.to(compute_dtype(dtype))
        return model, model

    def forward_backward(
        self, model: nn.Module, module: nn.Module, slots: np.ndarray
    ) -> ReplayResult:
        """Run forward and backward over some slots of the global batch.

        A failing pass is repeated under NanTracer, whose hooks make the blocks run layer by layer.
        """
        batch = self._collate(slots).to(self.device)
        result = self._run_once(model, module, batch)
        if result.is_clean:
            return result
        with NanTracer(model) as tracer:
            by_layers = self._run_once(model, module, batch)
        result.origins = nonfinite_inputs(batch.named_tensors())
        result.origins += [
            origin for origin in (tracer.forward, tracer.backward) if origin is not None
        ]
        result.only_fused = by_layers.is_clean and not result.origins
        return result

    def _run_once(self, model: nn.Module, module: nn.Module, batch: Batch) -> ReplayResult:
        model.zero_grad(set_to_none=True)
        module.train()
        loss, _ = self.objective(module, batch)
        (loss * self._loss_scale).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        bad = [name for name, grad in gradients.items() if nonfinite_kind(grad)]
        norm = (
            nn.utils.get_total_norm([grad.float() for grad in gradients.values()])
            / self._loss_scale
        )
        return ReplayResult(batch.ids.tolist(), loss.item(), norm.item(), bad_gradients=bad)


@dataclass
class ReplayResult:
    """Result of one forward and backward pass.

    Attributes:
        ids: Ids of the samples.
        loss: Contribution of this micro-batch to the loss.
        grad_norm: Norm of its gradients alone.
        origins: Non-finite inputs, then the first operation of the forward and of the backward
            pass that produced a non-finite number.
        bad_gradients: Parameters with a non-finite gradient.
        only_fused: Whether the same pass run layer by layer is clean, so that the fused
            blocks produce the bad numbers.
    """

    ids: list[int]
    loss: float
    grad_norm: float
    origins: list[NanOrigin] = field(default_factory=list)
    bad_gradients: list[str] = field(default_factory=list)
    only_fused: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return not self.bad_gradients and math.isfinite(self.loss)

    def summary(self) -> str:
        """Describe the result in one line."""
        parts = [str(origin) for origin in self.origins]
        if self.only_fused:
            parts.append("only where blocks run fused; layer by layer every number is finite")
        if self.bad_gradients:
            parts.append(f"non-finite gradients of {join_some(self.bad_gradients, 3)}")
        return "; ".join(parts) or f"loss {self.loss}"

    def to_json(self) -> dict:
        """Return the result for --json; non-finite numbers are words."""
        return plain_value(
            {
                "ids": self.ids,
                "clean": self.is_clean,
                "sentence": self.summary(),
                "origins": [vars(origin) for origin in self.origins],
                "bad_gradients": self.bad_gradients,
                "only_fused": self.only_fused,
                "loss": self.loss,
                "grad_norm": self.grad_norm,
            }
        )


def is_clean(report: dict) -> bool:
    """Whether a report found nothing.

    A spike's numbers are finite; its samples are listed by gradient norm.
    """
    is_spike = report["reason"].startswith("spike")
    return not is_spike and all(result["clean"] for result in report["dtypes"].values())


def print_rejected(samples: list[dict]) -> None:
    """Print which samples of a step are unusable, and why."""
    print(f"no sample of the step was usable: {count_noun(len(samples), 'sample')} left out")
    for sample in samples[:16]:
        print(for_screen(f"         sample {sample['id']}: {sample['reason']}", sys.stdout))
    if len(samples) > 16:
        print(f"         and {len(samples) - 16} more samples")


def print_samples(samples: list[dict]) -> None:
    """Print the failing samples, and the largest gradient norms of the others."""
    bad = [sample for sample in samples if not sample["clean"]]
    for sample in bad[:16]:
        print(f"         sample {sample['ids'][0]}: {sample['sentence']}")
    if len(bad) > 16:
        print(f"         and {len(bad) - 16} more samples")
    clean = sorted(
        (sample for sample in samples if sample["clean"]), key=lambda sample: -sample["grad_norm"]
    )
    if clean:
        largest = ", ".join(
            f"{sample['ids'][0]} ({sample['grad_norm']:.3g})" for sample in clean[:4]
        )
        print(
            f"         {len(clean)} sample(s) clean by themselves; largest gradient norms:"
            f" {largest}"
        )


def explain_clean(
    run_dir: Path, skipped: dict, is_exact: bool, age: int | None, bad: list[dict]
) -> str:
    """Advice for a replay that found nothing.

    Args:
        age: Steps between the weights used and those of the step.
        bad: Micro-batches that had a non-finite loss in the run.
    """
    if not is_exact:
        older = f"{age} step(s) older than" if age else "not"
        return (
            f"nothing found with these weights, which are {older} those of the step. The weights"
            f" themselves may be the cause: `mmldlm replay {run_dir} {skipped['step']} --exact`"
            " first trains up to the step on this process (the micro-batches of all ranks in"
            " sequence)"
        )
    ranks = (
        ", ".join(sorted({f"rank {entry['rank']} on {entry['host']}" for entry in bad}))
        or "the step's ranks"
    )
    return (
        "nothing found: data, weights and model give finite numbers here. What differs is the"
        f" machine and the engine: check the hardware of {ranks} (ECC, memory errors of other"
        " jobs), or run the step under engine.kind=single"
    )
