"""The steps of `mmldlm sanity`: those of a real run in one process, each part of which is looked at."""

from __future__ import annotations

import contextlib
import math
import platform
import resource
from collections.abc import Callable

import torch

from mmldlm.data.batching.loader import MicroBatches, iterate_steps
from mmldlm.data.batching.run_data import RunData
from mmldlm.debug import sanity_checks as checks
from mmldlm.debug.sanity_checks import Findings
from mmldlm.engines.build import build_engine
from mmldlm.engines.gradient_shards import gradient_shards
from mmldlm.engines.optimizer import learning_rate
from mmldlm.observe.layer_stats import LayerStats, LayerStatsCollector
from mmldlm.stability.loss_scaler import LossScaler
from mmldlm.stability.state_audit import nonfinite_tensors
from mmldlm.tasks.translation.build_model import build_model
from mmldlm.tasks.translation.freezing import apply_freezing, verify_parameter_freezing
from mmldlm.tasks.translation.noiser import NoisedBatch, Noiser
from mmldlm.tasks.translation.objective import TranslationObjective
from mmldlm.tasks.translation.parameter_plan import parameter_plan

OVERFIT_STEPS = 10
"""Steps on one batch. Fewer than about five would leave layers behind adaLN-Zero's zeros without a gradient."""
MIN_LOSS_DROP = 1e-4  # of the first loss
CANDIDATES = 64  # steps searched for the batch that uses most of the model


class SanityAborted(Exception):
    """A fault after which no further step makes sense; it is in the findings already."""


class SanityRunner:
    """The steps and what was found.

    Args:
        data: the run's data and config. interval: steps between two looks at the layers (0: none).
        detect_anomaly: torch's anomaly detection (slow; names the forward operation of a NaN gradient).

    Attributes:
        findings: faults by check. steps: what each step gave. look: the last look at the layers, or None.
    """

    def __init__(self, data: RunData, interval: int = 1, detect_anomaly: bool = False):
        self.data, self.config, self.detect_anomaly = data, data.config, detect_anomaly
        self.findings, self.steps, self.groups = Findings(), [], []
        self.look: LayerStats | None = None
        self.say: Callable[[str], None] = lambda text: None  # what is being tried, while it is tried
        self._has_gradient: set[str] = set()
        self._connected: set[str] = set()
        self._null_rows = {"text": False, "latent": False}
        self._applied = 0
        self._loss_scale = LossScaler(self.config.stability, self.config.training.dtype)
        model = build_model(data)
        apply_freezing(model, self.config.training.loss_type, self.config.training.freeze)
        self.trainable = verify_parameter_freezing(model, self.config.training.loss_type, self.config.training.freeze)
        # Blocks stay uncompiled under training.compile_model: hooks inside them see what eager code does.
        self.engine = build_engine(model, self.config, parameter_plan(model, self.config))
        self.objective = TranslationObjective(self.config)
        # Sanity needs every step's figures to know which parameters a gradient reached; `interval` is what it shows.
        self.interval, self._diagnostics = interval, LayerStatsCollector(self.engine, 1, self.config.training.dtype)

    def run(self, max_steps: int, overfit_steps: int = OVERFIT_STEPS) -> None:
        """Checks before the steps, max_steps steps on the run's own batches, overfit_steps on one of them."""
        engine, findings = self.engine, self.findings
        if engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(engine.device)
        checks.check_device(engine, findings)
        checks.check_coverage(engine, findings)
        frozen = checks.checksums(engine.frozen_shards())
        start = checks.checksums(engine.parameter_shards())
        self._watch = checks.GradientHooks(engine.model)
        engine.module.train()
        try:
            with torch.autograd.set_detect_anomaly(self.detect_anomaly):
                batches = self._batches(max_steps)
                for step in range(1, max_steps + 1):
                    own = next(batches)
                    checks.check_pinned(own, engine.device, findings)
                    loss = self._step(step, own, learning_rate(self._applied, max_steps, self.config.optimizer))
                    self.say(f"step {step}/{max_steps}: loss {loss:.4g}")
                self.say(f"{overfit_steps} more on one batch, which it must learn")
                self._overfit(max_steps, overfit_steps)
            note = ", blocks not compiled" if self.config.training.compile_model else ""
            findings.passed("runs", f"{len(self.steps)} steps on {engine.describe()}, {engine.device}{note}")
            self._after_all(start)
        except SanityAborted:
            pass
        finally:
            self._watch.close()
        # Whether or not the steps came to their end.
        self._check_frozen(frozen)
        self._check_memory()

    # -- batches -----------------------------------------------------------------------------------------------------

    def _batches(self, max_steps: int):
        self.dataset = self._micro_batches()
        data = self.config.data
        return iterate_steps(self.dataset, 0, max_steps, data.num_workers, data.prefetch_factor)

    def _micro_batches(self) -> MicroBatches:
        config, data = self.config, self.data
        training, model = config.training, config.model
        plan = data.training_plan(training.train_batch_size * training.grad_accum_steps)
        special_ids = (model.mask_token_id, model.pad_token_id, model.eos_token_id)
        noiser = Noiser(config, *special_ids, data.latent_mean, data.latent_std, max_norm=data.max_latent_norm())
        return MicroBatches(data.train, plan, noiser, 0, 1, training.grad_accum_steps)

    def _fullest_step(self) -> int:
        """The step among the first ones whose batch uses most of the model: every mode and both learned nulls."""

        def used(step: int) -> int:
            batches = self._make(step)
            nulls = [bool(sum(b.tensors[f"{side}_is_null"].any() for b in batches)) for side in self._null_rows]
            return sum(nulls) + len({int(mode) for b in batches for mode in b.modes[b.real]})

        return max(range(min(CANDIDATES, self.dataset.plan.batches_per_epoch)), key=used)

    def _make(self, step: int) -> list[NoisedBatch]:
        accum = self.dataset.accum
        return [self.dataset[step * accum + micro] for micro in range(accum)]

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self, step: int, batches: list[NoisedBatch], lr: float) -> float:
        """One optimizer step as the training loop takes it; returns its loss.

        Raises:
            Stopped: nothing further can be checked.
        """
        engine, findings = self.engine, self.findings
        with self._faults_are_findings(step):
            while True:
                engine.loss_scale = self._loss_scale.value
                self._watch.fired.clear()
                self._diagnostics.before_forward(step)
                loss = math.fsum(self._micro_batch(step, batch) for batch in batches)
                norm = float(engine.grad_norm())
                self._diagnostics.before_step()
                if math.isfinite(norm) or not math.isfinite(loss) or not self._loss_scale.can_decrease:
                    break
                # fp16: what a run skips until the loss scale fits is taken again here, on the same batch.
                self._diagnostics.after_step(lr, False)
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
            look = self._diagnostics.after_step(lr, finite)
            self._has_gradient |= {part for part, p in look.parameters.items() if p.num_zeros < p.numel}
            checks.check_layer_stats(look, findings)
            if self.interval and step % self.interval == 0:
                self.look = look
            self.steps.append({"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "applied": finite})
            if finite:
                checks.check_groups(engine, self.config, lr, findings)
                self.groups = checks.group_table(engine, lr)
                if self._applied == 1:
                    checks.check_clipping(engine, self.config, norm, findings)
                    checks.check_dtypes(engine, self.config, self._watch.products, findings)
        return loss

    @contextlib.contextmanager
    def _faults_are_findings(self, step: int):
        try:
            yield
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            # The user asked what is wrong with the steps: whatever breaks in one is the answer, not a crash.
            check = "in_place" if "modified by an inplace operation" in str(error) else "runs"
            first_line = str(error).strip().split("\n")[0]
            self.findings.failed(check, f"step {step}: {type(error).__name__}: {first_line}")
            raise SanityAborted from error

    def _micro_batch(self, step: int, batch: NoisedBatch) -> float:
        engine, findings, first = self.engine, self.findings, step == 1
        for side in self._null_rows:
            self._null_rows[side] |= bool(batch.tensors[f"{side}_is_null"].any())
        batch.to(engine.device)
        checks.check_batch(batch, self.data, engine.device, findings)
        findings.passed(
            "batches", "tokens, masks and latents of every sample are the store's; all finite, on the device"
        )
        versions = {name: tensor._version for name, tensor in batch.tensors.items()}
        weights = checks.checksums(engine.parameter_shards()) if first else {}

        loss, _ = self.objective(engine.module, batch)
        evaluating = [name or "the model" for name, module in engine.model.named_modules() if not module.training]
        if evaluating:
            findings.failed("train_mode", f"in eval mode: {checks.format_names(evaluating)}")
        findings.passed("train_mode", f"{sum(1 for _ in engine.model.modules())} modules")
        if torch.is_autocast_enabled(engine.device.type):
            findings.failed("precision", "autocast is on outside the forward pass")
        if loss.dtype != torch.float32:
            findings.failed("precision", f"the loss is {str(loss.dtype)[6:]}, not float32")
        if not loss.requires_grad:
            findings.failed("attached", "the loss has no graph: it was detached, or replaced by a constant")
            raise SanityAborted
        findings.passed("attached", f"it comes from {type(loss.grad_fn).__name__}")

        engine.backward(loss)
        moved = checks.changed(weights, checks.checksums(engine.parameter_shards())) if first else []
        if moved:
            findings.failed("in_place", f"forward or backward changed weights: {checks.format_names(moved)}")
        written = [name for name, tensor in batch.tensors.items() if tensor._version != versions[name]]
        if written:
            findings.failed("in_place", f"forward or backward wrote into the batch: {checks.format_names(written)}")
        findings.passed("in_place", "inputs and weights are as before, autograd saw no saved tensor overwritten")
        return float(loss.detach())

    def _check_gradients(self) -> None:
        engine, findings = self.engine, self.findings
        self._connected |= checks.connected(engine, self._watch.fired)
        trainable = {name for name in self._diagnostics.names}
        for name, parameter in engine.model.named_parameters():
            if name not in trainable and (parameter.requires_grad or parameter.grad is not None):
                findings.failed("frozen", f"{name} has a gradient although it is frozen")
        for fragment, gradient in gradient_shards(engine):
            if gradient is not None and gradient.dtype != torch.float32:
                findings.failed("precision", f"the gradient of {fragment.name} is {str(gradient.dtype)[6:]}")

    # -- one batch again and again -----------------------------------------------------------------------------------

    def _overfit(self, max_steps: int, overfit_steps: int) -> None:
        """The loss of one batch with one noise must fall; the run's peak LR, no warm-up."""
        chosen, findings = self._fullest_step(), self.findings
        self._check_scale(self._make(chosen))
        lr, losses = self.config.optimizer.lr, []
        for step in range(max_steps + 1, max_steps + overfit_steps + 1):
            losses.append(self._step(step, self._make(chosen), lr))
        if len(losses) < 2:
            return
        told = f"from {losses[0]:.5g} to {losses[-1]:.5g} in {len(losses) - 1} steps at LR {lr:g}"
        if not losses[-1] < losses[0] - MIN_LOSS_DROP * abs(losses[0]):
            findings.failed("overfit", f"it went {told}")
        findings.passed("overfit", told)

    def _check_scale(self, batches: list[NoisedBatch]) -> None:
        """A small step straight down the gradient must lower the loss by its length times the gradient's norm."""
        engine, fall = self.engine, 0.001 if self.config.training.dtype == "fp32" else 0.005
        with self._faults_are_findings(len(self.steps) + 1):
            before = 0.0
            for batch in batches:
                loss, _ = self.objective(engine.module, batch.to(engine.device))
                engine.backward(loss)
                before += float(loss.detach())
            norm = float(engine.grad_norm())
            if not (math.isfinite(before) and math.isfinite(norm) and norm > 0):
                engine.discard_gradients()
                self.findings.failed("scale", f"a loss of {before} with a gradient of norm {norm} cannot be compared")
                return
            expected = fall * abs(before)
            with torch.no_grad():
                for fragment, gradient in gradient_shards(engine):
                    if gradient is not None and fragment.count:
                        alpha = -expected / norm**2 / engine.loss_scale
                        fragment.slice_of(fragment.owner).add_(gradient, alpha=alpha)
            engine.discard_gradients()
            engine.sync_weights_from_masters()
            with torch.no_grad():
                after = math.fsum(float(self.objective(engine.module, batch)[0]) for batch in batches)
        ratio = (before - after) / expected
        told = f"a step down the gradient lowers the loss by {ratio:.2f} times what its norm says"
        if not 1 / 1.5 < ratio < 1.5:
            self.findings.failed("scale", f"{told} (expected about 1)")
        scaler = {
            "bf16": "no loss scaling: bf16 has the range of fp32",
            "fp32": "no loss scaling: fp32 needs none",
            "fp16": f"loss scale {engine.loss_scale:g}",
        }
        self.findings.passed("scale", f"{told}; {scaler[self.config.training.dtype]}")

    # -- at the end --------------------------------------------------------------------------------------------------

    def _after_all(self, start: dict) -> None:
        engine, findings = self.engine, self.findings
        names, parts = self._diagnostics.names, self._diagnostics.parts
        cut_off = [name for name in names if name not in self._connected]
        if cut_off:
            findings.failed("reached", f"no gradient, cut off from the loss: {checks.format_names(cut_off)}")
        excused = checks.expected_zero_gradients(engine.model, self.config.training.loss_type, self._null_rows)
        zero = [part for part, name in parts.items() if name in self._connected and part not in self._has_gradient]
        unexcused = [part for part in zero if not part.startswith(excused)]
        if unexcused:
            findings.failed(
                "reached", f"a zero gradient in each of {len(self.steps)} steps: {checks.format_names(unexcused)}"
            )
        idle = f"; the mode and these batches do not use {checks.format_names(zero)}" if zero else ""
        findings.passed("reached", f"{len(parts) - len(zero)} of {len(parts)} tensors (a block's by streams){idle}")

        moved = checks.changed(start, checks.checksums(engine.parameter_shards()))
        used = {parts[part] for part in self._has_gradient}
        still = [name for name in names if name in used and name not in moved]
        if still:
            findings.failed("moves", f"a gradient, but the weight stayed as it was: {checks.format_names(still)}")
        findings.passed("moves", f"{len(moved)} of {len(names)} tensors")

        bad = nonfinite_tensors(engine)
        if bad:
            findings.failed("finite", "non-finite after the steps: " + checks.format_names(list(bad)))
        norms = [step["grad_norm"] for step in self.steps]
        findings.passed("finite", f"gradient norms {min(norms):.4g} to {max(norms):.4g}")

    def _check_frozen(self, before: dict) -> None:
        moved = checks.changed(before, checks.checksums(self.engine.frozen_shards()))
        if moved:
            self.findings.failed("frozen", f"changed during the steps: {checks.format_names(moved)}")
        names = {name for name, _ in before}
        told = f"{len(names)} frozen tensors, bit for bit as they were" if names else "nothing is frozen in this run"
        self.findings.passed("frozen", told)

    def _check_memory(self) -> None:
        self.peak_bytes, kind = peak_memory(self.engine.device)
        self.findings.passed("memory", f"{self.peak_bytes / 2**30:.2f} GiB of {kind}")


def peak_memory(device: torch.device) -> tuple[int, str]:
    """Bytes, and of what: allocated on the GPU since the last reset, or resident in this process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "GPU memory, allocated"
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "host memory, the whole process"
