"""Checks of `mmldlm sanity`: batches, engine and training step, as rows of a table."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.config.schema import Config
from mmldlm.data.batch import Batch
from mmldlm.data.run_data import RunData
from mmldlm.engines.base import Engine, compute_dtype
from mmldlm.engines.deepspeed import DeepSpeedEngine
from mmldlm.engines.shards import ParameterShard
from mmldlm.observe.layer_stats import LayerStats
from mmldlm.tasks.base import Task
from mmldlm.utils.formatting import join_some
from mmldlm.utils.moments import MOMENTS

# -- before the first step ------------------------------------------------------------------------


def check_device(engine: Engine, findings: Findings) -> None:
    """Check that all parameters and buffers are on the engine's device."""
    tensors = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    for name, tensor in tensors:
        if tensor.device != engine.device:
            findings.failed("device", f"{name} on {tensor.device}, the engine on {engine.device}")
    findings.passed("device", f"{len(tensors)} tensors on {engine.device}")


def check_coverage(engine: Engine, findings: Findings) -> None:
    """Check that the optimizer updates every trainable element exactly once and no frozen one
    (single process).
    """
    updated: dict[str, int] = defaultdict(int)
    for fragment in engine.parameter_shards():
        updated[fragment.name] += fragment.count
    sizes = {name: _numel(parameter) for name, parameter in engine.model.named_parameters()}
    trainable = {
        name for name, parameter in engine.model.named_parameters() if parameter.requires_grad
    }
    for name, size in sizes.items():
        if updated[name] != (size if name in trainable else 0):
            status = "trainable" if name in trainable else "frozen"
            findings.failed(
                "optimizer",
                f"it updates {updated[name]} of {size} elements of {name}, which is {status}",
            )
    owners = {id(fragment.owner) for fragment in engine.parameter_shards()}
    for owner in engine.optimizer_groups():
        if id(owner) not in owners:
            findings.failed(
                "optimizer",
                f"it holds a tensor of shape {tuple(owner.shape)} that is not a parameter",
            )
    findings.passed(
        "optimizer",
        f"{len(trainable)} tensors, {sum(sizes[name] for name in trainable):,} elements",
    )


def _numel(parameter: Tensor) -> int:
    # ZeRO-3 empties a partitioned parameter.
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def group_table(engine: Engine, lr: float) -> list[dict]:
    """Return the optimizer's groups: tensors, elements, lr, weight_decay."""
    table: dict[tuple, dict] = {}
    groups = engine.optimizer_groups()
    names = defaultdict(set)
    for fragment in engine.parameter_shards():
        group = groups[fragment.owner]
        decay, group_lr = group["weight_decay"], lr * group.get("lr_factor", 1.0)
        key = group_lr, decay
        line = table.setdefault(
            key, {"tensors": 0, "elements": 0, "lr": group_lr, "weight_decay": decay}
        )
        names[key].add(fragment.name)
        line["tensors"], line["elements"] = len(names[key]), line["elements"] + fragment.count
    return list(table.values())


# -- a step ---------------------------------------------------------------------------------------


def check_dtypes(
    engine: Engine, config: Config, products: dict[str, torch.dtype], findings: Findings
) -> None:
    """Check dtypes after the first applied step.

    Args:
        products: Linear layer -> dtype of its output.
    """
    expected = compute_dtype(config.training.dtype)
    wrong = [f"{name} ({str(dtype)[6:]})" for name, dtype in products.items() if dtype != expected]
    problem = f"not {str(expected)[6:]} although training.dtype={config.training.dtype}"
    findings.failed_names("precision", problem, wrong)
    states = engine.optimizer_state()
    for fragment in engine.parameter_shards():
        if fragment.owner.dtype != torch.float32:
            findings.failed(
                "precision", f"the master of {fragment.name} is {str(fragment.owner.dtype)[6:]}"
            )
        state = states.get(fragment.owner) or {}
        for key in MOMENTS:
            if key in state and state[key].dtype != torch.float32:
                findings.failed(
                    "precision", f"{key} of {fragment.name} is {str(state[key].dtype)[6:]}"
                )
            if key in state and state[key].device != fragment.owner.device:
                where = f"{state[key].device}, the weights on {fragment.owner.device}"
                findings.failed("optimizer", f"{key} of {fragment.name} is on {where}")
    others = (
        "masters, moments, gradients and the loss are float32; autocast is off outside the forward"
        " pass"
    )
    findings.passed(
        "precision", f"{len(products)} linear layers returned {str(expected)[6:]}; {others}"
    )


def check_groups(engine: Engine, config: Config, lr: float, findings: Findings) -> None:
    """Check the optimizer's groups after a step with learning rate lr."""
    optimizer = config.optimizer
    for group in engine.optimizer_groups().values():
        for key, actual, expected in (
            ("LR", group["lr"], (lr * group.get("lr_factor", 1.0),)),
            ("weight decay", group["weight_decay"], (optimizer.weight_decay, 0.0)),
            ("betas", tuple(group["betas"]), (tuple(optimizer.betas),)),
            ("eps", group["eps"], (optimizer.eps,)),
        ):
            if actual not in expected:
                findings.failed(
                    "groups",
                    f"{key} {actual} where {' or '.join(map(str, expected))} was expected",
                )
    line = "; ".join(
        f"{g['tensors']} tensors, {g['elements']:,} elements: LR {g['lr']:.3g}, weight decay"
        f" {g['weight_decay']:g}"
        for g in group_table(engine, lr)
    )
    findings.passed("groups", line)


def check_clipping(engine: Engine, config: Config, norm: float, findings: Findings) -> None:
    """Check clipping after the first applied step.

    AdamW's first moment is then (1 - beta1) times the gradient that it received, Muon's momentum
    (1 - momentum) times.
    """
    states, groups, squares = engine.optimizer_state(), engine.optimizer_groups(), 0.0
    for fragment in engine.parameter_shards():
        if fragment.count and states.get(fragment.owner):
            moment, group = (
                fragment.slice_of(states[fragment.owner]["exp_avg"]),
                groups[fragment.owner],
            )
            decay = group["momentum"] if group.get("muon") else group["betas"][0]
            squares += float(
                torch.linalg.vector_norm(moment, dtype=torch.float64).div(1 - decay).square()
            )
    received = math.sqrt(squares)
    clip = config.optimizer.grad_clip_norm
    expected = norm if clip is None else min(norm, clip)
    if not math.isclose(received, expected, rel_tol=0.01):
        findings.failed(
            "clipping",
            f"expected a gradient of norm {expected:.4g}, the optimizer received {received:.4g}",
        )
    limit = "no clipping" if clip is None else f"clipped to {clip:g}"
    findings.passed("clipping", f"norm {norm:.4g}, {limit}: the optimizer received {received:.4g}")


def check_layer_stats(stats: LayerStats, findings: Findings) -> None:
    """Check that no layer has a non-finite gradient."""
    for name, tensor in stats.parameters.items():
        if tensor.num_nonfinite:
            findings.failed(
                "finite",
                f"step {stats.step}: {tensor.num_nonfinite} non-finite gradients in {name}",
            )


def measured_loss_drop(
    engine: Engine, objective: Callable, batches: Sequence[Batch], relative_drop: float
) -> float | str:
    """Take one gradient step sized for a relative drop of the loss; return measured / expected
    drop.

    A message instead if the loss or the gradient norm cannot be compared.
    """
    before = 0.0
    for batch in batches:
        loss, _ = objective(engine.module, batch)
        engine.backward(loss)
        before += float(loss.detach())
    norm = float(engine.grad_norm())
    if not (math.isfinite(before) and math.isfinite(norm) and norm > 0):
        engine.discard_gradients()
        return f"a loss of {before} with a gradient of norm {norm} cannot be compared"
    expected = relative_drop * abs(before)
    with torch.no_grad():
        for fragment, gradient in engine.gradient_shards():
            if gradient is not None and fragment.count:
                alpha = -expected / norm**2 / engine.loss_scale
                fragment.slice_of(fragment.owner).add_(gradient, alpha=alpha)
    engine.discard_gradients()
    engine.sync_weights_from_masters()
    with torch.no_grad():
        after = math.fsum(float(objective(engine.module, batch)[0]) for batch in batches)
    return (before - after) / expected


def connected(engine: Engine, fired: set[str]) -> set[str]:
    """Return the parameters that the last backward pass reached, even with zeros.

    Args:
        fired: Parameters whose hook was called; they decide under ZeRO.
    """
    if isinstance(engine, DeepSpeedEngine) and engine.stage > 0:
        return set(fired)
    return {
        fragment.name for fragment, gradient in engine.gradient_shards() if gradient is not None
    }


def checksums(fragments: Iterable[ParameterShard]) -> dict[tuple[str, int], tuple[float, float]]:
    """Return (name, start) -> (sum, norm) in fp64; they differ where an element changed."""
    return {
        (fragment.name, fragment.start): (
            float(view.sum(dtype=torch.float64)),
            float(torch.linalg.vector_norm(view, dtype=torch.float64)),
        )
        for fragment in fragments
        for view in [fragment.slice_of(fragment.owner)]
    }


def changed(before: dict, after: dict) -> list[str]:
    """Return the names whose checksums differ."""
    return list(dict.fromkeys(key[0] for key in before if before[key] != after[key]))


class GradientHooks:
    """Hooks that record the output dtypes of Linear layers and which parameters received a
    gradient.

    Attributes:
        products: Linear layer -> dtype of its output.
        fired: Parameters whose hook was called since the last clear.
    """

    def __init__(self, model: nn.Module):
        self.products: dict[str, torch.dtype] = {}
        self.fired: set[str] = set()
        self._handles = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self._handles.append(module.register_forward_hook(self._record_dtype(name)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._record_gradient(name)))

    def _record_dtype(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.products[name] = output.dtype

        return record

    def _record_gradient(self, name: str) -> Callable[[Tensor], None]:
        def record(gradient: Tensor) -> None:
            self.fired.add(name)

        return record

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


# id -> title, in the order of the table.
CHECKS = {
    "step_runs": "forward, backward and step run",
    "device": "the model is on the device",
    "optimizer": "the optimizer holds the parameters",
    "groups": "parameter groups",
    "precision": "precision and autocast",
    "micro_batches": "each sample stands alone in its micro-batch",
    "gradient_scale": "gradients are those of the loss",
    "batches": "batches are intact, on the device",
    "train_mode": "train mode",
    "loss_graph": "the loss has its graph",
    "in_place": "nothing is changed in place",
    "gradient_coverage": "gradients reach what is trainable",
    "frozen": "frozen parameters stay as they are",
    "finite": "every number is finite",
    "clipping": "the optimizer gets clipped gradients",
    "weights_update": "parameters with a gradient change",
    "overfit": "the loss falls on one batch",
    "memory": "peak memory",
}
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
MAX_LISTED = 4
"""Names and failures that one reason spells out."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        id: Key of CHECKS.
        title: Description of the check.
        status: PASS, FAIL, or NOT RUN if an earlier failure ended the steps.
        reason: Reason for the verdict.
    """

    id: str
    title: str
    status: str
    reason: str


class Findings:
    """Failures per check. A check passes if it ran and found none."""

    def __init__(self):
        self._failures: dict[str, dict[str, None]] = defaultdict(dict)
        self._passed: dict[str, str] = {}

    def passed(self, check: str, reason: str) -> None:
        """Record that a check ran; `reason` is printed if it has no failure."""
        assert check in CHECKS
        self._passed[check] = reason

    def failed(self, check: str, text: str) -> None:
        """Record a failure; the same text counts once."""
        assert check in CHECKS
        self._failures[check][text] = None

    def failed_names(self, check: str, problem: str, names: Collection[str]) -> None:
        """Record a failure of all that has a problem; none if nothing has it."""
        if names:
            self.failed(check, f"{problem}: {format_names(names)}")

    def rows(self) -> list[Row]:
        """Return the table."""
        rows = []
        for check, title in CHECKS.items():
            failures = list(self._failures[check])
            more = f"; {len(failures) - MAX_LISTED} more" if len(failures) > MAX_LISTED else ""
            status = FAIL if failures else PASS if check in self._passed else NOT_RUN
            not_reached = "the steps ended before this check"
            reason = (
                "; ".join(failures[:MAX_LISTED]) + more
                if failures
                else self._passed.get(check, not_reached)
            )
            rows.append(Row(check, title, status, reason))
        return rows


def format_names(names: Collection[str]) -> str:
    """Join names: `a, b, c, d and 3 more`."""
    return join_some(names, MAX_LISTED)


def check_pinned(batches: list[Batch], device: torch.device, findings: Findings) -> None:
    """Check that batches for a GPU are in pinned memory; otherwise the copy is synchronous."""
    if device.type == "cuda":
        tensors = [item for batch in batches for item in batch.named_tensors().items()]
        unpinned = [name for name, tensor in tensors if tensor.numel() and not tensor.is_pinned()]
        findings.failed_names("batches", "not in pinned memory", unpinned)


def check_batch(
    task: Task, batch: Batch, data: RunData, device: torch.device, findings: Findings
) -> None:
    """Check a micro-batch on the device against the data it was made from."""
    for bad in batch.bad:
        findings.failed("batches", f"sample {bad['id']} is left out: {bad['reason']}")
    for text in [*_tensor_problems(batch, device), *task.check_batch(data, batch)]:
        findings.failed("batches", text)


def _tensor_problems(batch: Batch, device: torch.device) -> list[str]:
    problems = []
    for name, tensor in batch.named_tensors().items():
        if tensor.device != device:
            problems.append(f"{name} on {tensor.device}, not on {device}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{int((~torch.isfinite(tensor)).sum())} non-finite values in {name}")
    return problems
