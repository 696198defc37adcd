"""Bring the shards of matrices together at one rank per matrix, and its results back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmldlm.engines.shards import ParameterShard

# Number of elements that one exchange brings to a rank or takes from it at most (256 MiB of fp32),
# or one matrix if that is larger.
BUCKET_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Matrix:
    """One matrix of a parameter that stacks several: elements [start, start + rows * columns), row
    by row.

    Attributes:
        name: Name of the parameter.
        start: First element in the flattened parameter.
        rows: Number of rows.
        columns: Number of columns.
    """

    name: str
    start: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz product."""
        return self.size * min(self.rows, self.columns)


class _Part(NamedTuple):
    """Elements [first, first + count) of a matrix that one rank holds, in its shard of
    this index.
    """

    matrix: int
    rank: int
    shard: int
    first: int
    count: int  # type: ignore[assignment]


class ShardRange(NamedTuple):
    """Elements [start, start + count) of a parameter, as one rank holds them.

    Can be sent to other ranks.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    count: int  # type: ignore[assignment]

    @classmethod
    def of(cls, shard: ParameterShard) -> ShardRange:
        """The range of a shard."""
        return cls(shard.name, shard.shape, shard.start, shard.count)


def stacked_matrices(name: str, shape: Sequence[int], num_stacked: int) -> list[Matrix]:
    """The matrices that a parameter of shape [num_stacked * rows, columns] stacks.

    Raises:
        ValueError: it does not stack so many.
    """
    if len(shape) != 2 or shape[0] % num_stacked:
        raise ValueError(f"{name} of shape {tuple(shape)} does not stack {num_stacked} matrices")
    rows, columns = shape[0] // num_stacked, shape[1]
    return [Matrix(name, index * rows * columns, rows, columns) for index in range(num_stacked)]


def assign_owners(matrices: Sequence[Matrix], world_size: int) -> list[int]:
    """Rank that transforms each matrix: the most expensive first, each to the rank with the least
    work.
    """
    load, owners = [0] * world_size, [0] * len(matrices)
    for index in sorted(range(len(matrices)), key=lambda index: (-matrices[index].cost, index)):
        rank = min(range(world_size), key=lambda rank: (load[rank], rank))
        owners[index] = rank
        load[rank] += matrices[index].cost
    return owners


class MatrixExchange:
    """Transforms the matrices of sharded parameters, each at its owner, in a few all-to-all
    exchanges.

    Args:
        shards: Shards of each rank of the group, the same list on every rank.
        num_stacked: Parameter -> number of matrices that it stacks.
        rank: Rank of this process in the group.
        device: Device on which matrices are transformed and from which they are sent.
        group: Ranks that share the parameters; None: this process alone.

    Attributes:
        matrices: Matrices of all ranks, in the same order on each.
        owners: Rank of each matrix.
    """

    def __init__(
        self,
        shards: list[list[ShardRange]],
        num_stacked: Mapping[str, int],
        rank: int,
        device: torch.device,
        group: Any = None,
    ):
        self.rank, self.device, self.group = rank, device, group
        self._shards = shards
        shapes = {shard.name: shard.shape for held in shards for shard in held}
        matrices = [
            matrix
            for name, shape in shapes.items()
            for matrix in stacked_matrices(name, shape, num_stacked[name])
        ]
        self.matrices = self._in_turn(matrices)
        self.owners = assign_owners(self.matrices, len(shards))
        parts = self._find_parts()
        # With replicas, an owner that holds its whole matrix needs no other rank's copy of it.
        is_complete = [
            sum(part.count for part in parts[k] if part.rank == owner) == self.matrices[k].size
            for k, owner in enumerate(self.owners)
        ]
        self._targets = parts
        self._sources = [
            [part for part in parts[k] if part.rank == owner or not is_complete[k]]
            for k, owner in enumerate(self.owners)
        ]
        self._buckets = self._make_buckets()

    def run(self, values: list[Tensor], transform: Callable[[Tensor], Tensor]) -> None:
        """Replace what this rank's shards hold of each matrix by their elements of
        transform(matrix). Collective.

        Args:
            values: Flat fp32 tensor of each shard of this rank, changed in place; elements of no
                matrix are left as they are.
            transform: [rows, columns] fp32 -> [rows, columns] fp32.
        """
        for bucket in self._buckets:
            results = {
                k: transform(matrix).reshape(-1)
                for k, matrix in self._gather(bucket, values).items()
            }
            self._scatter(bucket, values, results)

    def bytes_sent(self) -> int:
        """Bytes that all ranks together send to others in one run."""
        to_owners = [(part, k) for k, parts in enumerate(self._sources) for part in parts]
        from_owners = [(part, k) for k, parts in enumerate(self._targets) for part in parts]
        return 4 * sum(
            part.count for part, k in to_owners + from_owners if part.rank != self.owners[k]
        )

    def _in_turn(self, matrices: list[Matrix]) -> list[Matrix]:
        """Order matrices so that the ranks take turns, by the first one that holds a part of
        each: ZeRO-1 and 2 keep consecutive matrices on one rank, of which an exchange takes few.
        """
        holder: dict[str, int] = {}
        for rank, held in enumerate(self._shards):
            for shard in held:
                holder.setdefault(shard.name, rank)
        num_before = Counter[int]()
        places = []
        for index, matrix in enumerate(matrices):
            places.append((num_before[holder[matrix.name]], index))
            num_before[holder[matrix.name]] += 1
        return [matrices[index] for _, index in sorted(places)]

    def _find_parts(self) -> list[list[_Part]]:
        """Per matrix, the parts of it that ranks hold."""
        by_name: dict[str, list[tuple[int, int, ShardRange]]] = {}
        for rank, held in enumerate(self._shards):
            for index, shard in enumerate(held):
                by_name.setdefault(shard.name, []).append((rank, index, shard))
        parts_of = []
        for k, matrix in enumerate(self.matrices):
            parts = []
            for rank, index, shard in by_name[matrix.name]:
                first = max(matrix.start, shard.start)
                count = min(matrix.start + matrix.size, shard.start + shard.count) - first
                if count > 0:
                    parts.append(_Part(k, rank, index, first - matrix.start, count))
            parts_of.append(parts)
        return parts_of

    def _make_buckets(self) -> list[list[int]]:
        """Matrices of each exchange. A rank's share limits it, not the sum over ranks: all owners
        transform at the same time, so that an exchange should have matrices for each of them.
        """
        buckets: list[list[int]] = [[]]
        owned, held = Counter[int](), Counter[int]()  # elements of each rank in the last bucket
        for k, matrix in enumerate(self.matrices):
            own = {self.owners[k]: matrix.size}
            parts: dict[int, int] = {}
            for part in self._targets[k]:
                parts[part.rank] = parts.get(part.rank, 0) + part.count
            shares = ((owned, own), (held, parts))
            if buckets[-1] and any(
                total[rank] + count > BUCKET_ELEMENTS
                for total, share in shares
                for rank, count in share.items()
            ):
                buckets.append([])
                owned.clear()
                held.clear()
            buckets[-1].append(k)
            for total, share in shares:
                total.update(share)
        return buckets

    def _view(self, part: _Part, values: list[Tensor]) -> Tensor:
        """The part in this rank's values."""
        shard = self._shards[self.rank][part.shard]
        offset = self.matrices[part.matrix].start + part.first - shard.start
        return values[part.shard][offset : offset + part.count]

    def _gather(self, bucket: list[int], values: list[Tensor]) -> dict[int, Tensor]:
        """The complete matrices that this rank owns."""
        parts = [part for k in bucket for part in self._sources[k]]
        outgoing = [
            (self.owners[part.matrix], self._view(part, values))
            for part in parts
            if part.rank == self.rank
        ]
        incoming = [part for part in parts if self.owners[part.matrix] == self.rank]
        matrices = {
            k: torch.empty(self.matrices[k].size, device=self.device)
            for k in bucket
            if self.owners[k] == self.rank
        }
        for part, received in self._all_to_all(outgoing, [(part.rank, part) for part in incoming]):
            matrices[part.matrix][part.first : part.first + part.count] = received
        return {
            k: flat.view(self.matrices[k].rows, self.matrices[k].columns)
            for k, flat in matrices.items()
        }

    def _scatter(
        self, bucket: list[int], values: list[Tensor], results: dict[int, Tensor]
    ) -> None:
        """Store what this rank holds of every result in its values."""
        parts = [part for k in bucket for part in self._targets[k]]
        outgoing = [
            (part.rank, results[part.matrix][part.first : part.first + part.count])
            for part in parts
            if self.owners[part.matrix] == self.rank
        ]
        incoming = [(self.owners[part.matrix], part) for part in parts if part.rank == self.rank]
        for part, received in self._all_to_all(outgoing, incoming):
            self._view(part, values).copy_(received)

    def _all_to_all(
        self, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, _Part]]
    ) -> list[tuple[_Part, Tensor]]:
        """Send (rank, tensor) and receive (rank, part), in the order in which both ranks list
        them. Collective.
        """
        ranks = range(len(self._shards))
        sends = [[tensor for to, tensor in outgoing if to == rank] for rank in ranks]
        receives = [[part for source, part in incoming if source == rank] for rank in ranks]
        in_order = [part for parts in receives for part in parts]
        flat = [tensor for tensors in sends for tensor in tensors]
        sent = torch.cat(flat).to(self.device) if flat else torch.empty(0, device=self.device)
        if self.group is None:
            received = sent
        else:
            sizes_out = [sum(tensor.numel() for tensor in tensors) for tensors in sends]
            sizes_in = [sum(part.count for part in parts) for parts in receives]
            received = torch.empty(sum(sizes_in), device=self.device)
            dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=self.group)
        return list(zip(in_order, received.split([part.count for part in in_order]), strict=True))
