"""What `mmldlm sanity` looks at: each check reads the engine, a batch or a step, and says what is wrong."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmldlm.config.schema import Config
from mmldlm.data.batching.run_data import RunData
from mmldlm.engines.base import Engine, compute_dtype
from mmldlm.engines.deepspeed.engine import DeepSpeedEngine
from mmldlm.engines.gradient_shards import gradient_shards, optimizer_groups
from mmldlm.observe.layer_stats import LayerStats
from mmldlm.stability.state_audit import STATES
from mmldlm.tasks.translation.noiser import NoisedBatch

# id -> what is asked, in the order of the table.
CHECKS = {
    "runs": "forward, backward and step run",
    "device": "the model is on the device",
    "optimizer": "the optimizer holds the parameters",
    "groups": "parameter groups",
    "precision": "precision and autocast",
    "scale": "gradients are those of the loss",
    "batches": "batches are intact, on the device",
    "train_mode": "train mode",
    "attached": "the loss has its graph",
    "in_place": "nothing is changed in place",
    "reached": "gradients reach what is trainable",
    "frozen": "frozen parameters stay as they are",
    "finite": "every number is finite",
    "clipping": "the optimizer gets clipped gradients",
    "moves": "what has a gradient moves",
    "overfit": "the loss falls on one batch",
    "memory": "peak memory",
}
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
_MOST = 4  # names and faults that one reason spells out


@dataclass(frozen=True)
class Row:
    """One line of the table. status: PASS, FAIL, or NOT RUN when an earlier fault ended the steps."""

    id: str
    what: str
    status: str
    reason: str


class Findings:
    """Faults by check. A check passes when it ran and found none."""

    def __init__(self):
        self._faults: dict[str, dict[str, None]] = defaultdict(dict)
        self._seen: dict[str, str] = {}

    def passed(self, check: str, seen: str) -> None:
        """The check was made; `seen` is its reason when it passes."""
        assert check in CHECKS
        self._seen[check] = seen

    def failed(self, check: str, text: str) -> None:
        """Something is wrong; the same text counts once."""
        assert check in CHECKS
        self._faults[check][text] = None

    def rows(self) -> list[Row]:
        """The table."""
        rows = []
        for check, what in CHECKS.items():
            faults = list(self._faults[check])
            more = f"; {len(faults) - _MOST} more" if len(faults) > _MOST else ""
            status = FAIL if faults else PASS if check in self._seen else NOT_RUN
            reason = "; ".join(faults[:_MOST]) + more if faults else self._seen.get(check, "the steps did not get here")
            rows.append(Row(check, what, status, reason))
        return rows


def format_names(names: list[str]) -> str:
    """`a, b, c, d and 3 more`."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


# -- before the first step ---------------------------------------------------------------------------------------------


def check_device(engine: Engine, findings: Findings) -> None:
    """Parameters and buffers."""
    tensors = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    for name, tensor in tensors:
        if tensor.device != engine.device:
            findings.failed("device", f"{name} on {tensor.device}, the engine on {engine.device}")
    findings.passed("device", f"{len(tensors)} tensors on {engine.device}")


def check_coverage(engine: Engine, findings: Findings) -> None:
    """Every element of every trainable parameter is updated by the optimizer once, of frozen ones none (1 process)."""
    updated: dict[str, int] = defaultdict(int)
    for fragment in engine.parameter_shards():
        updated[fragment.name] += fragment.count
    sizes = {name: _numel(parameter) for name, parameter in engine.model.named_parameters()}
    trainable = {name for name, parameter in engine.model.named_parameters() if parameter.requires_grad}
    for name, size in sizes.items():
        if updated[name] != (size if name in trainable else 0):
            kind = "trainable" if name in trainable else "frozen"
            findings.failed("optimizer", f"it updates {updated[name]} of {size} elements of {name}, which is {kind}")
    owners = {id(fragment.owner) for fragment in engine.parameter_shards()}
    for owner in optimizer_groups(engine):
        if id(owner) not in owners:
            findings.failed("optimizer", f"it holds a tensor of shape {tuple(owner.shape)} that is no parameter")
    findings.passed("optimizer", f"{len(trainable)} tensors, {sum(sizes[name] for name in trainable):,} elements")


def _numel(parameter: Tensor) -> int:
    return getattr(parameter, "ds_numel", None) or parameter.numel()  # ZeRO-3 empties a parameter it has cut up


def group_table(engine: Engine, lr: float) -> list[dict]:
    """The optimizer's groups as printed: tensors, elements, lr, weight_decay."""
    table: dict[float, dict] = {}
    groups = optimizer_groups(engine)
    names = defaultdict(set)
    for fragment in engine.parameter_shards():
        decay = groups[fragment.owner]["weight_decay"]
        line = table.setdefault(decay, {"tensors": 0, "elements": 0, "lr": lr, "weight_decay": decay})
        names[decay].add(fragment.name)
        line["tensors"], line["elements"] = len(names[decay]), line["elements"] + fragment.count
    return list(table.values())


# -- a micro-batch -----------------------------------------------------------------------------------------------------


def check_pinned(batches: list[NoisedBatch], device: torch.device, findings: Findings) -> None:
    """What the loader gives goes to a GPU from pinned memory, or the copy is not asynchronous."""
    if device.type == "cuda":
        tensors = [item for batch in batches for item in batch.tensors.items()]
        unpinned = [name for name, tensor in tensors if tensor.numel() and not tensor.is_pinned()]
        if unpinned:
            findings.failed("batches", f"not in pinned memory: {format_names(unpinned)}")


def check_batch(batch: NoisedBatch, data: RunData, device: torch.device, findings: Findings) -> None:
    """A micro-batch that was moved to the device, against the store it came from."""
    for bad in batch.bad:
        findings.failed("batches", f"sample {bad['id']} of the store is left out: {bad['reason']}")
    for text in [*_tensor_faults(batch, data.config, device), *_store_faults(batch, data)]:
        findings.failed("batches", text)


def _tensor_faults(batch: NoisedBatch, config: Config, device: torch.device) -> list[str]:
    tensors, faults = batch.tensors, []
    for name, tensor in tensors.items():
        if tensor.device != device:
            faults.append(f"{name} on {tensor.device}, not on {device}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            faults.append(f"{int((~torch.isfinite(tensor)).sum())} non-finite values in {name}")
    for name in ("text_tokens", "text_targets"):
        ids = tensors[name]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < config.model.vocab_size:
            faults.append(
                f"{name} holds ids {int(ids.min())}..{int(ids.max())} outside 0..{config.model.vocab_size - 1}"
            )
    for name in ("text_timesteps", "latent_timesteps"):
        if not bool(((tensors[name] >= 0) & (tensors[name] <= 1)).all()):
            faults.append(f"{name} outside [0, 1]")
    if not bool(tensors["attention_mask"].any(dim=1).all()):
        faults.append("a text without a single token")
    return faults


def _store_faults(batch: NoisedBatch, data: RunData) -> list[str]:
    """The clean text and latent of every real row, put together again, against the store."""
    tensors = {name: tensor.cpu() for name, tensor in batch.tensors.items()}
    rows, clean = data.train.get(batch.ids), tensors["text_tokens"].clone()
    width = clean.shape[1]
    positions = tensors["text_positions"]
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < clean.numel():
        return [f"text_positions outside 0..{clean.numel() - 1}"]
    clean.view(-1)[positions] = tensors["text_targets"]
    latents = torch.from_numpy(rows.latents)
    if data.config.latent_diffusion.l2_normalise:
        latents = torch.nn.functional.normalize(latents.float(), dim=-1)
    latents = (latents - torch.as_tensor(data.latent_mean)) / torch.as_tensor(data.latent_std)
    faults = []
    for row in batch.real.nonzero()[0].tolist():
        text = torch.tensor([*rows.tokens[row].tolist(), data.config.model.eos_token_id])
        real = torch.arange(width) < len(text)
        if len(text) > width or not torch.equal(tensors["attention_mask"][row], real):
            faults.append(f"sample {batch.ids[row]}: attention_mask is not that of a text of {len(text)} tokens")
        elif not torch.equal(clean[row, : len(text)], text):
            faults.append(f"sample {batch.ids[row]}: its tokens are not the store's")
        if not torch.allclose(tensors["latent_clean"][row], latents[row], rtol=1e-4, atol=1e-4):
            faults.append(f"sample {batch.ids[row]}: its latent is not the store's")
    return faults


# -- a step ------------------------------------------------------------------------------------------------------------


def check_dtypes(engine: Engine, config: Config, products: dict[str, torch.dtype], findings: Findings) -> None:
    """After the first applied step. products: Linear layer -> dtype it put out."""
    expected = compute_dtype(config.training.dtype)
    wrong = [f"{name} ({str(dtype)[6:]})" for name, dtype in products.items() if dtype != expected]
    if wrong:
        findings.failed(
            "precision",
            f"not {str(expected)[6:]} although training.dtype={config.training.dtype}: {format_names(wrong)}",
        )
    states = engine.optimizer_state()
    for fragment in engine.parameter_shards():
        if fragment.owner.dtype != torch.float32:
            findings.failed("precision", f"the master of {fragment.name} is {str(fragment.owner.dtype)[6:]}")
        state = states.get(fragment.owner) or {}
        for what in STATES:
            if what in state and state[what].dtype != torch.float32:
                findings.failed("precision", f"{what} of {fragment.name} is {str(state[what].dtype)[6:]}")
            if what in state and state[what].device != fragment.owner.device:
                where = f"{state[what].device}, the weights on {fragment.owner.device}"
                findings.failed("optimizer", f"{what} of {fragment.name} is on {where}")
    kept = "masters, moments, gradients and the loss are float32; autocast is off outside the forward pass"
    findings.passed("precision", f"{len(products)} linear layers gave {str(expected)[6:]}; {kept}")


def check_groups(engine: Engine, config: Config, lr: float, findings: Findings) -> None:
    """After a step with learning rate lr."""
    optimizer = config.optimizer
    for group in optimizer_groups(engine).values():
        for key, found, expected in (
            ("LR", group["lr"], (lr,)),
            ("weight decay", group["weight_decay"], (optimizer.weight_decay, 0.0)),
            ("betas", tuple(group["betas"]), (tuple(optimizer.betas),)),
            ("eps", group["eps"], (optimizer.eps,)),
        ):
            if found not in expected:
                findings.failed("groups", f"{key} {found} where {' or '.join(map(str, expected))} belongs")
    line = "; ".join(
        f"{g['tensors']} tensors, {g['elements']:,} elements: LR {lr:.3g}, weight decay {g['weight_decay']:g}"
        for g in group_table(engine, lr)
    )
    findings.passed("groups", line)


def check_clipping(engine: Engine, config: Config, norm: float, findings: Findings) -> None:
    """After the very first applied step: AdamW's first moment is then (1 - beta1) times the gradient it was given."""
    states, squares = engine.optimizer_state(), 0.0
    for fragment in engine.parameter_shards():
        if fragment.count and states.get(fragment.owner):
            moment = fragment.slice_of(states[fragment.owner]["exp_avg"])
            squares += float(torch.linalg.vector_norm(moment, dtype=torch.float64).square())
    given = math.sqrt(squares) / (1 - config.optimizer.betas[0])
    clip = config.optimizer.grad_clip_norm
    expected = norm if clip is None else min(norm, clip)
    if not math.isclose(given, expected, rel_tol=0.01):
        findings.failed("clipping", f"the optimizer got a gradient of norm {given:.4g}, expected {expected:.4g}")
    limit = "no clipping" if clip is None else f"clipped to {clip:g}"
    findings.passed("clipping", f"norm {norm:.4g}, {limit}: the optimizer got {given:.4g}")


def check_layer_stats(look: LayerStats, findings: Findings) -> None:
    """No layer has a non-finite gradient."""
    for name, figures in look.parameters.items():
        if figures.num_nonfinite:
            findings.failed("finite", f"step {look.step}: {figures.num_nonfinite} non-finite gradients in {name}")


def expected_zero_gradients(model: nn.Module, mode: str, null_rows: dict[str, bool]) -> tuple[str, ...]:
    """Beginnings of the names of parameters (diagnostics.parts_of) that rightly have a zero gradient.

    In the last block the stream that no head of the mode reads still gives keys and values to the other one, the rest
    of it changes nothing. A learned null waits for a sample whose condition was dropped.

    Args:
        null_rows: "text", "latent" -> whether a batch had such a sample.
    """
    stream = {"l2t": "latent", "t2l": "text"}.get(mode)
    last = f"blocks.{len(model.blocks) - 1}"
    unread = [f"{last}.{layer}.weight[{stream}]" for layer in ("to_out", "mlp_in", "mlp_out")] if stream else []
    return (*unread, *(f"{side}_encoder.null_" for side, used in null_rows.items() if not used))


def connected(engine: Engine, fired: set[str]) -> set[str]:
    """Parameters that the last backward pass reached, even with zeros. fired: whose own hook was called (ZeRO)."""
    if isinstance(engine, DeepSpeedEngine) and engine.stage > 0:
        return set(fired)
    return {fragment.name for fragment, gradient in gradient_shards(engine) if gradient is not None}


def checksums(fragments) -> dict[tuple[str, int], tuple[float, float]]:
    """(name, start) -> sum and norm in fp64: another value where an element changed."""
    return {
        (fragment.name, fragment.start): (
            float(view.sum(dtype=torch.float64)),
            float(torch.linalg.vector_norm(view, dtype=torch.float64)),
        )
        for fragment in fragments
        for view in [fragment.slice_of(fragment.owner)]
    }


def changed(before: dict, after: dict) -> list[str]:
    """Names whose checksums differ."""
    return list(dict.fromkeys(key[0] for key in before if before[key] != after[key]))


class GradientHooks:
    """Hooks that note what a forward and backward pass did: dtypes of matrix products, whose gradient came."""

    def __init__(self, model: nn.Module):
        self.products: dict[str, torch.dtype] = {}
        self.fired: set[str] = set()
        self._handles = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self._handles.append(module.register_forward_hook(self._noting(name)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._firing(name)))

    def _noting(self, name: str):
        def note(module, inputs, output) -> None:
            self.products[name] = output.dtype

        return note

    def _firing(self, name: str):
        def note(gradient) -> None:
            self.fired.add(name)

        return note

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
