"""Muon for matrices and AdamW for all other parameters, over the shards that an engine updates
on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmldlm.distributed.collectives import gather_objects
from mmldlm.engines.base import Engine
from mmldlm.engines.muon_exchange import MatrixExchange, ShardRange
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.engines.shards import ParameterShard, local_shard
from mmldlm.utils.validation import not_none

# Label of its work in a profile.
LABEL = "muon"
# The key of AdamW's own running mean of gradients, so that checkpoints need no third name.
MOMENTUM = "exp_avg"


class MuonAdamW(torch.optim.AdamW):
    """AdamW on its ordinary groups, Muon on groups with "muon": True.

    Muon (kellerjordan.github.io/posts/muon) updates a matrix by the nearest orthogonal matrix of
    its momentum, which takes the complete matrix. Under ZeRO and FSDP a rank holds a slice of it.
    Therefore each matrix has an owner: the other ranks send it their slices of the momentum, and
    it returns to each the slice of the update. The momentum changes in `step` alone, so a skipped
    step leaves it as it was.

    Group keys in addition to AdamW's: "muon", "momentum" (of Muon, Nesterov), "lr_factor" (the
    engine sets "lr" to the schedule's rate times this). State of a Muon tensor: "step" and
    "exp_avg", the momentum, fp32.

    Call `attach` before the first step.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        momentum: float = 0.95,
        block_rows: int | None = None,
        **settings: Any,
    ):
        groups = [
            {"muon": False, "momentum": momentum, "lr_factor": 1.0, **group} for group in groups
        ]
        super().__init__(groups, **settings)
        self.block_rows = block_rows
        self._units: dict[int, tuple[list[Tensor], list[ParameterShard], MatrixExchange]] = {}

    def attach(
        self,
        units: list[list[Tensor]],
        shards: list[ParameterShard],
        num_stacked: Mapping[str, int],
        device: torch.device,
        group: Any = None,
    ) -> None:
        """Name the shards that this rank updates. Collective over `group`.

        Args:
            units: Muon's tensors that one call of `step` updates together (all parameters, or the
                flat tensor of a ZeRO group or sub-group), in the same order on every rank.
            shards: Shards of this rank; those of other parameters are ignored.
            num_stacked: Parameter -> number of matrices that it stacks along dimension 0.
            device: Device of the matrix products and of the process group's tensors.
            group: Ranks that shard or replicate the parameters; None: this process alone.

        Raises:
            ValueError: a parameter does not stack so many matrices.
        """
        rank, world_size = 0, 1
        if group is not None:
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        for owners in units:
            ids = {id(owner) for owner in owners}
            held = [
                shard
                for shard in shards
                if id(shard.owner) in ids and shard.name in num_stacked and shard.count
            ]
            own_ranges = [ShardRange.of(shard) for shard in held]
            ranges_by_rank = gather_objects(own_ranges, world_size, group)
            exchange = MatrixExchange(
                ranges_by_rank, num_stacked, rank, device, group if world_size > 1 else None
            )
            self._units[id(owners[0])] = owners, held, exchange

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every group from its tensors' gradients, which Muon overwrites. Collective."""
        assert closure is None
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"] and group["params"]]
        try:
            if self.param_groups:
                super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"] and group["params"]:
                # DeepSpeed puts the tensors of one ZeRO-3 sub-group after another into the group.
                units = [
                    self._units[id(owner)] for owner in group["params"] if id(owner) in self._units
                ]
                assert units, "attach() was not called with the tensors of this group"
                for unit in units:
                    self._step_unit(*unit, group)

    def _step_unit(
        self,
        owners: list[Tensor],
        shards: list[ParameterShard],
        exchange: MatrixExchange,
        group: dict[str, Any],
    ) -> None:
        updates = {id(owner): self._advance_momentum(owner, group["momentum"]) for owner in owners}
        values = [shard.slice_of(updates[id(shard.owner)]) for shard in shards]
        with torch.profiler.record_function(LABEL):
            exchange.run(values, lambda momentum: orthogonal_update(momentum, self.block_rows))
        for shard, value in zip(shards, values, strict=True):
            weights = shard.slice_of(shard.owner)
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.sub_(value, alpha=group["lr"])

    def _advance_momentum(self, owner: Tensor, momentum: float) -> Tensor:
        """Add the gradient to the momentum; return Nesterov's look-ahead, in the gradient's
        memory.

        Both are laid out as the owner. A missing gradient counts as zero.
        """
        state = self.state[owner]
        if MOMENTUM not in state:
            state["step"] = torch.zeros((), device=local_shard(owner).device)
            state[MOMENTUM] = torch.zeros_like(owner)
        state["step"] += 1
        buffer = local_shard(state[MOMENTUM])
        gradient = torch.zeros_like(buffer) if owner.grad is None else local_shard(owner.grad)
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp_(buffer, momentum)

    def cost(self) -> dict[str, float]:
        """Cost of one step: matrices, flops (of all ranks), flops_per_rank (of the busiest), bytes
        (sent).
        """
        exchanges = [exchange for _, _, exchange in self._units.values()]
        per_rank: dict[int, float] = {}
        for exchange in exchanges:
            for matrix, owner in zip(exchange.matrices, exchange.owners, strict=True):
                flops = update_flops(matrix.rows, matrix.columns, self.block_rows)
                per_rank[owner] = per_rank.get(owner, 0.0) + flops
        return {
            "matrices": sum(len(exchange.matrices) for exchange in exchanges),
            "flops": sum(per_rank.values()),
            "flops_per_rank": max(per_rank.values(), default=0.0),
            "bytes": sum(exchange.bytes_sent() for exchange in exchanges),
        }


NUM_ITERATIONS = 5
# As in the reference implementation and in torch.optim.Muon. Without gradients, momentum decays
# until its squares underflow in fp32: without this bound the update would keep its full size, and
# become NaN after a thousand such steps.
_MIN_NORM = 1e-7
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximate the nearest (semi-)orthogonal matrix, U V^T of the singular value decomposition
    U S V^T.

    Args:
        matrix: [..., m, n], any floating dtype. The products are in bf16 on GPUs and in fp32 on
            CPUs.

    Returns:
        [..., m, n] fp32, singular values between about 0.7 and 1.2; smaller ones of a matrix of a
        norm below 1e-7. Zeros stay zeros.
    """
    x = matrix.float()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(_MIN_NORM)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


def orthogonalization_flops(rows: int, columns: int) -> float:
    """FLOPs of `orthogonalize` for one [rows, columns] matrix."""
    short, long = sorted((rows, columns))
    return NUM_ITERATIONS * (4.0 * short * short * long + 2.0 * short**3)


def update_scale(rows: int, columns: int) -> float:
    """Factor of an orthogonal update: its largest effect on a row's RMS is then the same for every
    shape.

    sqrt(max(1, rows / columns)), as in the reference implementation and in torch.optim.Muon
    ("original").
    """
    return max(1.0, rows / columns) ** 0.5


def block_shape(rows: int, columns: int, block_rows: int | None) -> tuple[int, int, int]:
    """Number, rows and columns of the blocks that are orthogonalized by themselves
    (optimizer.muon_block_rows).
    """
    block = rows if block_rows is None else min(block_rows, rows)
    return rows // block, block, columns


def orthogonal_update(matrix: Tensor, block_rows: int | None = None) -> Tensor:
    """Update of a matrix [m, n] from its momentum, fp32: its blocks of rows orthogonalized and
    scaled.
    """
    rows, columns = matrix.shape
    blocks = matrix.view(block_shape(rows, columns, block_rows))
    return (orthogonalize(blocks) * update_scale(*blocks.shape[1:])).view(matrix.shape)


def update_flops(rows: int, columns: int, block_rows: int | None = None) -> float:
    """FLOPs of `orthogonal_update` for one [rows, columns] matrix."""
    count, rows, columns = block_shape(rows, columns, block_rows)
    return count * orthogonalization_flops(rows, columns)


def muon_of(engine: Engine) -> MuonAdamW | None:
    """The engine's optimizer if it is Muon. DeepSpeed wraps it in its own from ZeRO-1 on."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return inner if isinstance(inner, MuonAdamW) else None


def attach_muon(engine: Engine, plan: ParameterPlan) -> None:
    """Attach the optimizer of a new engine to the shards that it updates. Collective."""
    owners = [owner for owner, group in engine.optimizer_groups().items() if group["muon"]]
    not_none(muon_of(engine)).attach(
        [[owner] for owner in owners] if engine.steps_one_by_one else [owners],
        engine.parameter_shards(),
        plan.matrices,
        engine.device,
        engine.process_group(),
    )
