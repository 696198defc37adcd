"""Exponential moving average of the master weights, sharded as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmldlm.engines.base import Engine, StateReader


class WeightAverage:
    """ema = decay * ema + (1 - decay) * weight after every applied step, in fp32, for this rank's
    shards.
    """

    def __init__(self, engine: Engine, decay: float):
        self.engine, self.decay = engine, decay
        self._shards = engine.parameter_shards()
        self._weights = [shard.slice_of(shard.owner) for shard in self._shards]
        self.values = [weight.clone() for weight in self._weights]

    def restart(self) -> None:
        """Restart from the current weights (after weights were loaded without an average)."""
        torch._foreach_copy_(self.values, self._weights)

    def update(self) -> None:
        """Include the weights of the step that was just applied."""
        torch._foreach_lerp_(self.values, self._weights, 1 - self.decay)

    def named_values(self) -> list[tuple[str, torch.Tensor]]:
        """(parameter name, this rank's shard of its average)."""
        return [
            (shard.name, value)
            for shard, value in zip(self._shards, self.values, strict=True)
            if shard.count
        ]

    def load(self, reader: StateReader) -> None:
        """Load the average from a checkpoint of any engine and world size."""
        for shard, value in zip(self._shards, self.values, strict=True):
            value.copy_(torch.from_numpy(reader.read(shard.name, "ema", shard.start, shard.count)))

    def snapshot_state(self) -> dict[str, Any]:
        """name -> start, shape of the parameter, values [count]; all ranks' files together cover
        each parameter.
        """
        if not self.engine.saves_shards:
            return {}
        return {
            shard.name: {"start": shard.start, "shape": list(shard.shape), "values": value}
            for shard, value in zip(self._shards, self.values, strict=True)
            if shard.count
        }

    def write(self, state: dict[str, Any], folder: Path) -> list[Path]:
        """Save this rank's shards; return the files written."""
        if not state:
            return []
        path = folder / f"ema_rank{self.engine.rank}.pt"
        torch.save(state, path)
        return [path]
