"""`mmldlm sanity`: take steps in one process as a real run does, check every part, report."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mmldlm.data.batch import Batch
from mmldlm.data.loader import MicroBatches, iterate_steps
from mmldlm.data.run_data import RunData
from mmldlm.debug import sanity_checks as checks
from mmldlm.debug.sanity_checks import (
    FAIL,
    PASS,
    Findings,
    check_batch,
    check_pinned,
    format_names,
)
from mmldlm.engines.build import build_engine
from mmldlm.engines.optimizer import learning_rate
from mmldlm.observe.layer_stats import LayerStats, LayerStatsCollector
from mmldlm.observe.throughput import peak_memory, reset_peak_memory
from mmldlm.stability.audit import nonfinite_tensors
from mmldlm.stability.guard import LossScaler
from mmldlm.tasks.registry import find_task
from mmldlm.utils.formatting import first_line, for_screen
from mmldlm.utils.json_files import plain_value
from mmldlm.utils.validation import not_none

OVERFIT_STEPS = 10
"""Steps on one batch. With fewer than about five, layers behind adaLN-Zero have no gradient yet.

"""
MIN_LOSS_DROP = 1e-4  # fraction of the first loss
MICRO_BATCH_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}  # of a loss, by dtype
MAX_CANDIDATES = 64  # steps searched for the batch that uses most of the model


class SanityAborted(Exception):
    """Raised after a recorded failure that makes further steps meaningless."""


class SanityRunner:
    """Run real steps and collect findings.

    Args:
        data: Data and config of the run.
        interval: Steps between two layer statistics (0: none).
        detect_anomaly: Whether to use torch's anomaly detection (slow; names the forward
            operation of a NaN gradient).

    Attributes:
        findings: Failures of each check.
        steps: Loss, gradient norm and learning rate of each step.
        layer_stats: Last layer statistics, or None.
        log: Function called with a line of progress before each part.
    """

    def __init__(self, data: RunData, interval: int = 1, detect_anomaly: bool = False):
        self.data, self.config, self.detect_anomaly = data, data.config, detect_anomaly
        self.findings = Findings()
        self.steps: list[dict] = []
        self.groups: list[dict] = []
        self.layer_stats: LayerStats | None = None
        self.log: Callable[[str], None] = lambda text: None
        self._has_gradient: set[str] = set()
        self._connected: set[str] = set()
        self._unused: set[str] | None = None  # parameters that no batch so far has used
        self._applied = 0
        self._loss_scale = LossScaler(self.config.stability, self.config.training.dtype)
        self.task = find_task(self.config.task)
        model = self.task.build_model(data)
        parameters = self.task.parameter_plan(model, self.config)
        self.trainable = parameters.apply(model, self.task.parameter_groups(model))
        # Blocks stay uncompiled under training.compile_model: hooks inside them see what eager
        # code does.
        self.engine = build_engine(model, self.config, parameters)
        self.objective = self.task.objective(self.config)
        # Every step is measured, to know which parameters received a gradient; `interval` selects
        # what is printed.
        self.interval, self._collector = (
            interval,
            LayerStatsCollector(self.engine, 1, self.config.training.dtype),
        )

    def run(self, max_steps: int, overfit_steps: int = OVERFIT_STEPS) -> None:
        """Check the engine, take max_steps steps on the run's batches and overfit_steps on one of
        them.
        """
        engine, findings = self.engine, self.findings
        if engine.device.type == "cuda":
            reset_peak_memory(engine.device)
        checks.check_device(engine, findings)
        checks.check_coverage(engine, findings)
        frozen = checks.checksums(engine.frozen_shards())
        start = checks.checksums(engine.parameter_shards())
        self._hooks = checks.GradientHooks(engine.model)
        engine.module.train()
        try:
            with torch.autograd.set_detect_anomaly(self.detect_anomaly):
                batches = self._batches(max_steps)
                for step in range(1, max_steps + 1):
                    micro_batches = next(batches)
                    check_pinned(micro_batches, engine.device, findings)
                    loss = self._step(
                        step,
                        micro_batches,
                        learning_rate(self._applied, max_steps, self.config.optimizer),
                    )
                    self.log(f"step {step}/{max_steps}: loss {loss:.4g}")
                self.log(f"{overfit_steps} more steps on one batch, to overfit it")
                self._overfit(max_steps, overfit_steps)
            note = ", blocks not compiled" if self.config.training.compile_model else ""
            findings.passed(
                "step_runs",
                f"{len(self.steps)} steps on {engine.describe()}, {engine.device}{note}",
            )
            self._final_checks(start)
        except SanityAborted:
            pass
        finally:
            self._hooks.close()
        # Also after aborted steps.
        self._check_frozen(frozen)
        self._check_memory()

    # -- batches ----------------------------------------------------------------------------------

    def _batches(self, max_steps: int) -> Iterator[list[Batch]]:
        self.dataset = self._micro_batches(self.config.training.grad_accum_steps)
        data = self.config.data
        return iterate_steps(self.dataset, 0, max_steps, data.num_workers, data.prefetch_factor)

    def _micro_batches(self, accum: int) -> MicroBatches:
        """The run's global batches, each in so many micro-batches."""
        data, training = self.data, self.config.training
        plan = data.training_plan(training.train_batch_size * training.grad_accum_steps)
        return MicroBatches(data.train, plan, self.task.collator(data), 0, 1, accum)

    def _largest_step(self) -> int:
        """Return the step whose batch uses most of the model."""

        def num_unused(step: int) -> int:
            return len(
                set.intersection(*(self._unused_by(batch) for batch in self._step_batches(step)))
            )

        return min(range(min(MAX_CANDIDATES, self.dataset.plan.batches_per_epoch)), key=num_unused)

    def _unused_by(self, batch: Batch) -> set[str]:
        return set(self.task.unused_parameters(self.engine.model, self.config, batch))

    def _step_batches(self, step: int) -> list[Batch]:
        accum = self.dataset.accum
        return [self.dataset[step * accum + micro] for micro in range(accum)]

    # -- one step ---------------------------------------------------------------------------------

    def _step(self, step: int, batches: list[Batch], lr: float) -> float:
        """One optimizer step as the training loop takes it; returns its loss.

        Raises:
            SanityAborted: nothing further can be checked.
        """
        engine, findings = self.engine, self.findings
        with self._record_exceptions(step):
            while True:
                engine.loss_scale = self._loss_scale.value
                self._hooks.fired.clear()
                self._collector.before_forward(step)
                loss = math.fsum(self._micro_batch(step, batch) for batch in batches)
                norm = float(engine.grad_norm())
                self._collector.before_step()
                if (
                    math.isfinite(norm)
                    or not math.isfinite(loss)
                    or not self._loss_scale.can_decrease
                ):
                    break
                # fp16: a run would skip this step; here it is repeated on the same batch with a
                # lower scale.
                self._collector.after_step(lr, False)
                engine.discard_gradients()
                self._loss_scale.on_overflow()
            self._check_gradients()
            finite = math.isfinite(loss) and math.isfinite(norm)
            if not math.isfinite(loss):
                findings.failed("finite", f"step {step}: the loss is {loss}")
            if not math.isfinite(norm):
                findings.failed("finite", f"step {step}: the gradient norm is {norm}")
            if finite:
                engine.step(lr, norm)
                self._applied += 1
            else:
                engine.discard_gradients()
            stats = not_none(self._collector.after_step(lr, finite))
            self._has_gradient |= {
                part for part, p in stats.parameters.items() if p.num_zeros < p.numel
            }
            checks.check_layer_stats(stats, findings)
            if self.interval and step % self.interval == 0:
                self.layer_stats = stats
            self.steps.append(
                {"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "applied": finite}
            )
            if finite:
                checks.check_groups(engine, self.config, lr, findings)
                self.groups = checks.group_table(engine, lr)
                if self._applied == 1:
                    checks.check_clipping(engine, self.config, norm, findings)
                    checks.check_dtypes(engine, self.config, self._hooks.products, findings)
        return loss

    @contextlib.contextmanager
    def _record_exceptions(self, step: int) -> Iterator[None]:
        try:
            yield
        except (
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
            KeyError,
            AttributeError,
        ) as error:
            # An exception inside a step is a finding, not a crash.
            check = "in_place" if "modified by an inplace operation" in str(error) else "step_runs"
            self.findings.failed(check, f"step {step}: {first_line(error)}")
            raise SanityAborted from error

    def _micro_batch(self, step: int, batch: Batch) -> float:
        engine, findings, first = self.engine, self.findings, step == 1
        unused = self._unused_by(batch)
        self._unused = unused if self._unused is None else self._unused & unused
        batch.to(engine.device)
        check_batch(self.task, batch, self.data, engine.device, findings)
        findings.passed("batches", "every sample is as the data has it; all finite, on the device")
        inputs = batch.named_tensors()
        versions = {name: tensor._version for name, tensor in inputs.items()}
        weights = checks.checksums(engine.parameter_shards()) if first else {}

        loss, _ = self.objective(engine.module, batch)
        evaluating = [
            name or "the model"
            for name, module in engine.model.named_modules()
            if not module.training
        ]
        findings.failed_names("train_mode", "in eval mode", evaluating)
        findings.passed("train_mode", f"{sum(1 for _ in engine.model.modules())} modules")
        if torch.is_autocast_enabled(engine.device.type):
            findings.failed("precision", "autocast is on outside the forward pass")
        if loss.dtype != torch.float32:
            findings.failed("precision", f"the loss is {str(loss.dtype)[6:]}, not float32")
        if not loss.requires_grad:
            findings.failed(
                "loss_graph", "the loss has no graph: it was detached, or replaced by a constant"
            )
            raise SanityAborted
        findings.passed("loss_graph", f"grad_fn is {type(loss.grad_fn).__name__}")

        engine.backward(loss)
        changed = (
            checks.changed(weights, checks.checksums(engine.parameter_shards())) if first else []
        )
        findings.failed_names("in_place", "forward or backward changed weights", changed)
        changed_inputs = [
            name for name, tensor in inputs.items() if tensor._version != versions[name]
        ]
        findings.failed_names(
            "in_place", "forward or backward wrote into the batch", changed_inputs
        )
        findings.passed("in_place", "inputs and weights unchanged, no saved tensor overwritten")
        return float(loss.detach())

    def _check_gradients(self) -> None:
        engine, findings = self.engine, self.findings
        self._connected |= checks.connected(engine, self._hooks.fired)
        trainable = {name for name in self._collector.names}
        for name, parameter in engine.model.named_parameters():
            if name not in trainable and (parameter.requires_grad or parameter.grad is not None):
                findings.failed("frozen", f"{name} has a gradient although it is frozen")
        for fragment, gradient in engine.gradient_shards():
            if gradient is not None and gradient.dtype != torch.float32:
                findings.failed(
                    "precision", f"the gradient of {fragment.name} is {str(gradient.dtype)[6:]}"
                )

    # -- overfitting one batch --------------------------------------------------------------------

    def _overfit(self, max_steps: int, overfit_steps: int) -> None:
        """Check that the loss of one batch with fixed noise falls at the run's peak LR without
        warm-up.
        """
        chosen, findings = self._largest_step(), self.findings
        self._check_micro_batches(chosen)
        self._check_gradient_scale(self._step_batches(chosen))
        lr, losses = self.config.optimizer.lr, []
        for step in range(max_steps + 1, max_steps + overfit_steps + 1):
            losses.append(self._step(step, self._step_batches(chosen), lr))
        if len(losses) < 2:
            return
        change = (
            f"from {losses[0]:.5g} to {losses[-1]:.5g} in {len(losses) - 1} steps at LR {lr:g}"
        )
        if not losses[-1] < losses[0] - MIN_LOSS_DROP * abs(losses[0]):
            findings.failed("overfit", f"it went {change}")
        findings.passed("overfit", change)

    def _check_micro_batches(self, step: int) -> None:
        """Check that a global batch has the same loss in smaller micro-batches: that of a sample
        must not depend on those beside it, as where padding leaks.
        """
        training, engine, losses = self.config.training, self.engine, []
        size, accum_steps = training.train_batch_size, training.grad_accum_steps
        if size == 1:
            self.findings.passed("micro_batches", "of one sample, which has none beside it")
            return
        num_parts = next(parts for parts in range(2, size + 1) if size % parts == 0)
        engine.module.eval()  # without dropout
        try:
            with self._record_exceptions(len(self.steps) + 1), torch.no_grad():
                for accum in (accum_steps, num_parts * accum_steps):
                    micro_batches = self._micro_batches(accum)
                    batches = (micro_batches[step * accum + micro] for micro in range(accum))
                    losses.append(
                        math.fsum(
                            float(self.objective(engine.module, batch.to(engine.device))[0])
                            for batch in batches
                        )
                    )
        finally:
            engine.module.train()
        whole, parts = losses
        smaller = f"{size // num_parts} instead of {size}"
        result = f"the loss of a global batch is {whole:.6g}, in micro-batches of {smaller}"
        if not abs(parts - whole) <= MICRO_BATCH_TOLERANCE[training.dtype] * abs(whole):
            self.findings.failed(
                "micro_batches",
                f"{result} {parts:.6g}: a sample's loss depends on those beside it (padding?), or"
                " is a mean over its micro-batch",
            )
        self.findings.passed("micro_batches", f"{result} the same")

    def _check_gradient_scale(self, batches: list[Batch]) -> None:
        """Check that a small gradient step lowers the loss by its length times the
        gradient norm.
        """
        dtype, findings = self.config.training.dtype, self.findings
        with self._record_exceptions(len(self.steps) + 1):
            batches = [batch.to(self.engine.device) for batch in batches]
            step = 0.001 if dtype == "fp32" else 0.005
            drop = checks.measured_loss_drop(self.engine, self.objective, batches, step)
            while isinstance(drop, str) and dtype == "fp16" and self._loss_scale.can_decrease:
                # the largest batch may overflow where those before it did not
                self._loss_scale.on_overflow()
                self.engine.loss_scale = self._loss_scale.value
                drop = checks.measured_loss_drop(self.engine, self.objective, batches, step)
        if isinstance(drop, str):
            findings.failed("gradient_scale", drop)
            return
        result = f"a gradient step lowers the loss by {drop:.2f} times the expected amount"
        if not 1 / 1.5 < drop < 1.5:
            findings.failed("gradient_scale", f"{result} (expected about 1)")
        scaler = {
            "bf16": "no loss scaling: bf16 has the range of fp32",
            "fp32": "no loss scaling: fp32 needs none",
            "fp16": f"loss scale {self.engine.loss_scale:g}",
        }
        findings.passed("gradient_scale", f"{result}; {scaler[dtype]}")

    # -- at the end -------------------------------------------------------------------------------

    def _final_checks(self, start: dict) -> None:
        engine, findings = self.engine, self.findings
        names, parts = self._collector.names, self._collector.parts
        cut_off = [name for name in names if name not in self._connected]
        problem = "no gradient, cut off from the loss"
        findings.failed_names("gradient_coverage", problem, cut_off)
        exempt = tuple(self._unused or ())
        zero = [
            part
            for part, name in parts.items()
            if name in self._connected and part not in self._has_gradient
        ]
        unexpected = [part for part in zero if not part.startswith(exempt)]
        problem = f"a zero gradient in each of {len(self.steps)} steps"
        findings.failed_names("gradient_coverage", problem, unexpected)
        idle = f"; the mode and these batches do not use {format_names(zero)}" if zero else ""
        streams = " (a block's by streams)" if len(parts) > len(names) else ""
        findings.passed(
            "gradient_coverage", f"{len(parts) - len(zero)} of {len(parts)} tensors{streams}{idle}"
        )

        changed = checks.changed(start, checks.checksums(engine.parameter_shards()))
        used = {parts[part] for part in self._has_gradient}
        unchanged = [name for name in names if name in used and name not in changed]
        problem = "a gradient, but an unchanged weight"
        findings.failed_names("weights_update", problem, unchanged)
        findings.passed("weights_update", f"{len(changed)} of {len(names)} tensors")

        findings.failed_names("finite", "non-finite after the steps", nonfinite_tensors(engine))
        norms = [step["grad_norm"] for step in self.steps]
        findings.passed("finite", f"gradient norms {min(norms):.4g} to {max(norms):.4g}")

    def _check_frozen(self, before: dict) -> None:
        changed = checks.changed(before, checks.checksums(self.engine.frozen_shards()))
        self.findings.failed_names("frozen", "changed during the steps", changed)
        names = {name for name, _ in before}
        result = (
            f"{len(names)} frozen tensors, bitwise unchanged"
            if names
            else "nothing is frozen in this run"
        )
        self.findings.passed("frozen", result)

    def _check_memory(self) -> None:
        self.peak_bytes, memory_type = peak_memory(self.engine.device)
        self.findings.passed("memory", f"{self.peak_bytes / 2**30:.2f} GiB of {memory_type}")


def as_dict(sanity: SanityRunner) -> dict:
    """Return the report for --json; non-finite numbers are words."""
    rows = sanity.findings.rows()
    config, engine = sanity.config, sanity.engine
    report = {
        "ok": all(row.status == PASS for row in rows),
        "conditions": {
            "engine": engine.describe(),
            "device": str(engine.device),
            "dtype": config.training.dtype,
            "task": sanity.task.describe(config),
            "grad_clip_norm": config.optimizer.grad_clip_norm,
            "torch": torch.__version__,
        },
        "checks": [
            {"id": row.id, "what": row.title, "status": row.status, "reason": row.reason}
            for row in rows
        ],
        "groups": sanity.groups,
        "steps": sanity.steps,
        "layers": None if sanity.layer_stats is None else sanity.layer_stats.record()["layers"],
        "peak_memory_bytes": sanity.peak_bytes,
    }
    return plain_value(report)


def heading(sanity: SanityRunner) -> str:
    """Describe the run about to start: a large model on a CPU takes minutes per step."""
    config, engine = sanity.config, sanity.engine
    return (
        f"sanity   {engine.describe()}, {engine.device}, {config.training.dtype},"
        f" {sanity.task.describe(config)}; "
        + ", ".join(
            f"{group} {part:,} of {total:,}" for group, (part, total) in sanity.trainable.items()
        )
        + f" parameters trainable; batches of {config.training.train_batch_size}"
    )


def print_tables(sanity: SanityRunner, console: Console) -> None:
    """Print a verdict, layer statistics, parameter groups and checks."""
    rows = sanity.findings.rows()
    failed = sum(row.status != PASS for row in rows)
    console.print(
        f"{failed} of {len(rows)} checks not passed" if failed else f"{len(rows)} checks passed"
    )
    if sanity.layer_stats is not None:
        console.print(_layer_table(sanity.layer_stats))
    if sanity.groups:
        table = Table("group", "tensors", "elements", "LR", "weight decay", box=SIMPLE)
        for index, group in enumerate(sanity.groups):
            numbers = (f"{group['tensors']:,}", f"{group['elements']:,}", f"{group['lr']:.3g}")
            table.add_row(str(index), *numbers, f"{group['weight_decay']:g}")
        console.print(table)
    width = max(len(row.title) for row in rows)
    for row in rows:
        color = {PASS: "green", FAIL: "red"}.get(row.status, "yellow")
        text = for_screen(
            f"{row.status:7} {row.title:{width}}  {row.reason}", console.file, " " * 8
        )
        line = Text.assemble((text[:7], color), text[7:])
        console.print(line, soft_wrap=True)


def _layer_table(stats: LayerStats) -> Table:
    columns = ("grad norm", "zero share", "non- finite", "update / weight", "output RMS")
    table = Table(Column("layer", no_wrap=True), *columns, title=f"step {stats.step}", box=SIMPLE)
    for name, tensor in stats.layers.items():
        values = tensor.record()
        cells = [
            values.get(key)
            for key in ("grad_norm", "zero_share", "nonfinite", "update_ratio", "activation_rms")
        ]
        table.add_row(name, *("-" if value is None else f"{value:.3g}" for value in cells))
    return table
