"""An exponential moving average of the master weights, cut over the ranks as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmldlm.engines.base import Engine


class WeightAverage:
    """ema = decay * ema + (1 - decay) * weight after every applied step, in fp32, for what this rank holds."""

    def __init__(self, engine: Engine, decay: float):
        self.engine, self.decay = engine, decay
        self._fragments = engine.parameter_shards()
        self._weights = [fragment.of(fragment.owner) for fragment in self._fragments]
        self.values = [weight.clone() for weight in self._weights]

    def restart(self) -> None:
        """Begin again at the present weights (after weights were loaded without an average)."""
        torch._foreach_copy_(self.values, self._weights)

    def update(self) -> None:
        """Count in the weights of the step that was just applied."""
        torch._foreach_lerp_(self.values, self._weights, 1 - self.decay)

    def named_values(self) -> list[tuple[str, torch.Tensor]]:
        """Parameter's name and this rank's part of its average."""
        return [(f.name, value) for f, value in zip(self._fragments, self.values, strict=True) if f.count]

    def load(self, reader) -> None:
        """Take the average from a checkpoint of any engine and world size."""
        for fragment, value in zip(self._fragments, self.values, strict=True):
            value.copy_(torch.from_numpy(reader.read(fragment.name, "ema", fragment.start, fragment.count)))

    def snapshot_state(self) -> dict[str, Any]:
        """name -> first element, whole shape, values [count]; several ranks' files together cover each parameter."""
        if not self.engine.saves_shards:
            return {}
        return {
            fragment.name: {"start": fragment.start, "shape": list(fragment.shape), "values": value}
            for fragment, value in zip(self._fragments, self.values, strict=True)
            if fragment.count
        }

    def file_name(self) -> str:
        """This rank's file in the engine's folder."""
        return f"ema_rank{self.engine.rank}.pt"

    def write(self, state: dict[str, Any], folder: Path) -> None:
        """torch.save this rank's part."""
        if state:
            torch.save(state, folder / self.file_name())
