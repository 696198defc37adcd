"""`mmldlm replay RUN EVENT`: run a skipped step again on one process and name where its bad numbers were made."""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import nn

from mmldlm.checkpoints import locate
from mmldlm.checkpoints.init_from import init_weights
from mmldlm.checkpoints.layout import ENGINE_FOLDER, STATE_FILE
from mmldlm.checkpoints.manifest import examine
from mmldlm.checkpoints.resume_reader import open_training_state
from mmldlm.config.load import build_config
from mmldlm.data.batching.loader import MicroBatches
from mmldlm.data.batching.run_data import RunData, open_data
from mmldlm.debug.nan_tracer import NanOrigin, NanTracer, faults_of_weights, nonfinite_kind
from mmldlm.distributed.environment import pick_device
from mmldlm.engines.base import Autocast, compute_dtype
from mmldlm.engines.deepspeed.config import resolve_stage
from mmldlm.engines.optimizer import learning_rate
from mmldlm.engines.single import SingleEngine
from mmldlm.errors import UserError
from mmldlm.stability.guard import Guard
from mmldlm.stability.skipped_steps import bad_micro_batches, load_skipped_step
from mmldlm.tasks.translation.build_model import build_model
from mmldlm.tasks.translation.freezing import apply_freezing
from mmldlm.tasks.translation.noiser import NoisedBatch, Noiser
from mmldlm.tasks.translation.objective import TranslationObjective
from mmldlm.tasks.translation.parameter_plan import parameter_plan
from mmldlm.utils.formatting import for_screen

DTYPES = ("bf16", "fp16", "fp32")
_FEW = 64  # micro-batches: fewer than the single samples that are run anyway


@dataclass
class ReplayResult:
    """What one forward and backward pass gave.

    Attributes:
        ids: the samples. loss: this micro-batch's share. grad_norm: of its gradients alone. origins: first the weights
            and inputs that are not finite, then the first operation of the forward and of the backward pass that made
            such a number.
        bad_gradients: parameters whose gradient is not finite.
        only_fused: the same pass run layer by layer is clean: the fused blocks (models/fused.py) make the bad numbers.
    """

    ids: list[int]
    loss: float
    grad_norm: float
    origins: list[NanOrigin] = field(default_factory=list)
    bad_gradients: list[str] = field(default_factory=list)
    only_fused: bool = False

    @property
    def is_clean(self) -> bool:
        return not self.bad_gradients and math.isfinite(self.loss)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("event", metavar="EVENT", help="step number of a skip in events.jsonl, or `last`")
    parser.add_argument(
        "--exact", action="store_true", help="train from the checkpoint to the step first, on this process"
    )
    parser.add_argument("--checkpoint", metavar="PATH", help="take the weights from here")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: the run's and fp32")
    parser.add_argument("--samples", type=int, default=256, metavar="N", help="most samples run one by one (256)")
    parser.add_argument("--json", metavar="FILE", help="also write the findings as JSON")


def main(args: argparse.Namespace) -> int:
    """Print what was found; returns 0 (also when nothing was).

    Raises:
        UserError: no such run or event, or data that is no longer what the run saw.
    """
    run_dir = Path(args.run)
    case = load_skipped_step(run_dir, args.event)
    print(f"step {case['step']} was skipped: {case['reason']}")
    replay = Replay(run_dir, case, args.checkpoint, args.exact)
    report = _look(replay, args)
    if _is_clean(report) and replay.num_micro_batches_before <= _FEW:
        print(
            f"nothing found with older weights: taking the {replay.num_steps_before} step(s) up to it, as --exact does"
        )
        replay = Replay(run_dir, case, None, True)
        report = _look(replay, args)
    if _is_clean(report):
        print(for_screen(_when_clean(replay, bad_micro_batches(case["micro_batches"])), sys.stdout))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _look(replay: Replay, args: argparse.Namespace) -> dict:
    """Run the step's micro-batches in every dtype; returns the report."""
    case = replay.case
    print(f"weights  {replay.weights}")
    entries = bad_micro_batches(case["micro_batches"]) or case["micro_batches"]
    which = "with a bad loss" if len(entries) < len(case["micro_batches"]) else "of the step"
    print(f"running  {len(entries)} micro-batch(es) {which}, of {len(case['micro_batches'])}")
    report = {"step": case["step"], "reason": case["reason"], "weights": replay.weights, "dtypes": {}}
    for dtype in dict.fromkeys(args.dtypes or [case["dtype"], "bf16", "fp32"]):
        report["dtypes"][dtype] = replay.run(dtype, entries, args.samples)
    return report


def _is_clean(report: dict) -> bool:
    """Whether nothing was found of what should be there: a spike's numbers are finite, and listed by gradient."""
    is_spike = report["reason"].startswith("spike")
    return not is_spike and all(found["clean"] for found in report["dtypes"].values())


class Replay:
    """One skipped step: its data, its weights, its micro-batches.

    Attributes:
        weights: where they come from, in words. is_exact: whether they are those of the step.
        num_steps_before: steps of training between these weights and the step's; None where nothing says.
    """

    def __init__(self, run_dir: Path, case: dict, checkpoint: str | None, exact: bool):
        self.case, self.run_dir = case, run_dir
        self.config = build_config(case["config"])
        self.data: RunData = open_data(self.config)
        self.device = pick_device(0)
        self.plan = self.data.training_plan(case["global_batch"])
        model = self.config.model
        special = (model.mask_token_id, model.pad_token_id, model.eos_token_id)
        scaling = (self.data.latent_mean, self.data.latent_std)
        self.noiser = Noiser(self.config, *special, *scaling, max_norm=self.data.max_latent_norm())
        self.objective = TranslationObjective(self.config)
        self.batch = self.plan.batch(case["step"] - 1)
        self._check_samples()
        self.num_steps_before: int | None = None
        self.model = build_model(self.data)
        training = self.config.training
        apply_freezing(self.model, training.loss_type, training.freeze)
        self.weights, self.is_exact = self._load_weights(checkpoint, exact)

    def _check_samples(self) -> None:
        for entry in self.case["micro_batches"]:
            slots = self._slots(entry)
            ids = self.batch.ids[np.where(slots < len(self.batch.ids), slots, 0)]
            if ids.tolist() != entry["ids"]:
                raise UserError(
                    f"the samples of step {self.case['step']} as the run saw them",
                    f"{', '.join(self.config.data.roots)} gives others",
                    "restore what the run was trained on",
                )

    def _slots(self, entry: dict) -> np.ndarray:
        case = self.case
        return self.plan.slots(self.batch, case["world_size"], case["accum"], entry["rank"], entry["micro"])

    # -- weights -----------------------------------------------------------------------------------------------------

    def _load_weights(self, given: str | None, exact: bool) -> tuple[str, bool]:
        # The step was skipped, so a checkpoint saved right after it holds the very weights.
        before, after = self.case["step"] - 1, self.case["step"]
        if given is not None:
            init_weights(self.model, given)
            return given, False
        resumed = self.config.training.resume
        there = [] if resumed in (None, "auto") else [locate.locate_checkpoint(resumed)]
        there += [path for step, path in locate.list_checkpoints(self.run_dir) if not examine(path).problems]
        steps = [(json.loads((path / STATE_FILE).read_text())["step"], path) for path in there]
        there = [(step, path) for step, path in steps if step <= after]
        start, path = there[-1] if there else (0, None)
        if exact and start < before:
            self._train(path, start, before)
            return f"trained from {path or 'the start'} (step {start}) to step {before} on this process", True
        source = path or self.config.training.init_from
        if source is not None:
            init_weights(self.model, str(source))
        told = str(path) if path is not None else "as the run started"
        if start in (before, after):
            return f"{told}: those of the step", True
        self.num_steps_before = before - start
        return f"{told}: those of step {start}, {before - start} step(s) before", False

    @property
    def num_micro_batches_before(self) -> float:
        """What training up to the step would take on this process; inf where it is already there, or cannot."""
        if self.is_exact or self.num_steps_before is None:
            return math.inf
        return self.num_steps_before * self.case["world_size"] * self.case["accum"]

    def _train(self, path: Path | None, start: int, end: int) -> None:
        """Steps start .. end - 1 again, all ranks' micro-batches one after the other (losses equal to rounding)."""
        case, config = self.case, copy.deepcopy(self.config)
        if path is None and config.training.init_from is not None:
            init_weights(self.model, config.training.init_from)
        shares = case["world_size"] * case["accum"]
        config.training.grad_accum_steps = shares
        engine = SingleEngine(self.model, config, parameter_plan(self.model, config))
        saved = {} if path is None else json.loads((path / STATE_FILE).read_text())
        applied = saved.get("applied_steps", 0)
        if path is not None:
            with open_training_state(path / ENGINE_FOLDER) as reader:
                engine.load(reader, applied if reader.has_moments else 0)
            engine.sync_weights_from_masters()
        guard = Guard(config.stability, config.training.dtype)
        guard.restore(saved.get("guard", {}))
        batches = MicroBatches(self.data.train, self.plan, self.noiser, 0, 1, shares)
        for step in range(start, end):
            if any(first <= step < last for first, last in case["passed_over"]):
                continue
            total, num_bad, num_usable, engine.loss_scale = 0.0, 0, 0, guard.loss_scale.value
            for micro in range(shares):
                batch = batches[step * shares + micro].to(self.device)
                loss, _ = self.objective(engine.module, batch)
                engine.backward(loss)
                total, num_bad = total + loss.item(), num_bad + (not math.isfinite(loss.item()))
                num_usable += int(batch.real.sum())
            norm = engine.grad_norm().item()
            if guard.decide(total, num_bad, norm, num_usable).apply:
                schedule = learning_rate(applied, config.training.num_train_steps, config.optimizer)
                engine.step(case["lr_scale"] * schedule, norm)
                applied += 1
            else:
                engine.discard_gradients()
            print(f"trained  step {step + 1} of {end}", end="\r", flush=True)
        print()

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, dtype: str, entries: list[dict], most_samples: int) -> dict:
        """All entries in one dtype, then the samples of those that are not clean one by one; prints and returns it."""
        model, module = self._in_dtype(dtype)
        self._loss_scale = self.case["loss_scale"] if dtype == "fp16" else 1.0
        unfit = faults_of_weights(model)
        found = {"clean": not unfit, "weights": [str(origin) for origin in unfit], "micro_batches": []}
        for origin in unfit[:8]:
            print(f"{dtype}     {origin}")
        norms, left = [], most_samples
        for entry in entries:
            slots = self._slots(entry)
            outcome = self.forward_backward(model, module, slots)
            norms.append(outcome.grad_norm)
            told = {"rank": entry["rank"], "micro": entry["micro"], **_to_json(outcome), "samples": []}
            place = f"{dtype}     rank {entry['rank']} micro-batch {entry['micro']}"
            if not outcome.is_clean:
                found["clean"] = False
                print(f"{place}: {_summarize(outcome)}")
            if not outcome.is_clean or self.case["reason"].startswith("spike"):
                for slot in slots[slots < len(self.batch.ids)][:left]:
                    alone = self.forward_backward(model, module, np.array([slot]))
                    told["samples"].append(_to_json(alone))
                    left -= 1
                self._print_samples(told["samples"])
            found["micro_batches"].append(told)
        if found["clean"]:
            total = math.sqrt(math.fsum(norm * norm for norm in norms))
            print(
                f"{dtype}     clean: every output and gradient is finite (norms of micro-batches add up to {total:.4g})"
            )
        return found

    def _print_samples(self, samples: list[dict]) -> None:
        bad = [sample for sample in samples if not sample["clean"]]
        for sample in bad[:16]:
            print(f"         sample {sample['ids'][0]}: {sample['sentence']}")
        if len(bad) > 16:
            print(f"         and {len(bad) - 16} more samples")
        sound = sorted((s for s in samples if s["clean"]), key=lambda s: -s["grad_norm"])
        if sound:
            top = ", ".join(f"{s['ids'][0]} ({s['grad_norm']:.3g})" for s in sound[:4])
            print(f"         {len(sound)} sample(s) clean by themselves; largest gradient norms: {top}")

    def _in_dtype(self, dtype: str) -> tuple[nn.Module, nn.Module]:
        """The model, and what to call, as the run's engine computes in this dtype."""
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

    def forward_backward(self, model: nn.Module, module: nn.Module, slots: np.ndarray) -> ReplayResult:
        """Forward and backward over some places of the global batch: as in training, and where that gives bad numbers
        once more under NanTracer, whose hooks make the blocks run layer by layer."""
        batch = self.noiser.make(self.batch, slots, self.data.train, self.data.train_lengths).to(self.device)
        outcome = self._outcome(model, module, batch)
        if outcome.is_clean:
            return outcome
        with NanTracer(model) as finder:
            by_layers = self._outcome(model, module, batch)
        outcome.origins = _faults_of_batch(batch)
        outcome.origins += [origin for origin in (finder.forward, finder.backward) if origin is not None]
        outcome.only_fused = by_layers.is_clean and not outcome.origins
        return outcome

    def _outcome(self, model: nn.Module, module: nn.Module, batch: NoisedBatch) -> ReplayResult:
        model.zero_grad(set_to_none=True)
        module.train()
        loss, _ = self.objective(module, batch)
        (loss * self._loss_scale).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        bad = [name for name, grad in gradients.items() if nonfinite_kind(grad)]
        norm = nn.utils.get_total_norm([grad.float() for grad in gradients.values()]) / self._loss_scale
        return ReplayResult(batch.ids.tolist(), loss.item(), norm.item(), bad_gradients=bad)


def _when_clean(replay: Replay, bad: list[dict]) -> str:
    if not replay.is_exact:
        older = f"{replay.num_steps_before} step(s) older than" if replay.num_steps_before else "not"
        return (
            f"nothing found with these weights, which are {older} those of the step. What made the bad numbers may be "
            f"in the weights themselves: `mmldlm replay {replay.run_dir} {replay.case['step']} --exact` trains up to "
            "the step on this process first (all ranks' micro-batches, one after the other)"
        )
    ranks = ", ".join(sorted({f"rank {entry['rank']} on {entry['host']}" for entry in bad})) or "the step's ranks"
    return (
        "nothing found: data, weights and model give finite numbers here. What differs is the machine and the engine: "
        f"look at the hardware of {ranks} (ECC, other jobs' memory errors), or run the step under engine.kind=single"
    )


def _faults_of_batch(batch: NoisedBatch) -> list[NanOrigin]:
    return [
        NanOrigin("input", kind, name) for name, tensor in batch.tensors.items() if (kind := nonfinite_kind(tensor))
    ]


def _summarize(outcome: ReplayResult) -> str:
    parts = [str(origin) for origin in outcome.origins]
    if outcome.only_fused:
        parts.append("only where blocks run fused; layer by layer every number is finite")
    if outcome.bad_gradients:
        shown = ", ".join(outcome.bad_gradients[:3])
        more = f" and {len(outcome.bad_gradients) - 3} more" if len(outcome.bad_gradients) > 3 else ""
        parts.append(f"non-finite gradients of {shown}{more}")
    return "; ".join(parts) or f"loss {outcome.loss}"


def _to_json(outcome: ReplayResult) -> dict:
    """For --json: strict JSON has no NaN."""
    figures = {"loss": outcome.loss, "grad_norm": outcome.grad_norm}
    return {
        "ids": outcome.ids,
        "clean": outcome.is_clean,
        "sentence": _summarize(outcome),
        "origins": [vars(origin) for origin in outcome.origins],
        "bad_gradients": outcome.bad_gradients,
        "only_fused": outcome.only_fused,
        **{key: value if math.isfinite(value) else str(value) for key, value in figures.items()},
    }
