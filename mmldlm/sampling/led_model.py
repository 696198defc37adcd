"""A run's model as samplers call it, while its weights stay sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from mmldlm.distributed.collectives import broadcast_object
from mmldlm.engines.base import Engine
from mmldlm.models.base import LatentInputs

T = TypeVar("T")


@dataclass(frozen=True)
class UnencodedLatent:
    """Latents in place of an `EncodedLatent`, which every pass encodes again; None: the learned
    null.
    """

    inputs: LatentInputs | None

    def select(self, rows: Tensor) -> UnencodedLatent:
        """Return the latents of the samples rows [B'] int64."""
        if self.inputs is None:
            return self
        parts = (None if part is None else part.index_select(0, rows) for part in self.inputs)
        return UnencodedLatent(LatentInputs._make(parts))


class LedModel:
    """The model of a run, called by rank 0 alone: every call is a forward pass of the engine on
    all ranks, with rank 0's inputs.

    It has what samplers call of a model (`sampling.model.Model`). The forward pass is what gathers
    sharded weights under every engine, and loops that depend on the outputs run on one rank, so
    that no rounding takes two ranks different ways.

    Args:
        engine: Engine of the run.
        before_pass: Function called on every rank before each pass.

    Attributes:
        is_in_pass: Whether a pass has begun and not returned: after an error within it, other
            ranks may wait in its collectives.
    """

    def __init__(self, engine: Engine, before_pass: Callable[[], None] = lambda: None):
        self._engine, self._before_pass = engine, before_pass
        self.is_in_pass = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.model, name)

    def run(self, work: Callable[[], T]) -> T | None:
        """Return work(), which calls this model, on rank 0; the others take part in its passes and
        return None. Collective.

        An error of `work` is raised on rank 0 alone.
        """
        if self._engine.rank != 0:
            while (inputs := self._share(None)) is not None:
                self._forward(*inputs)
            return None
        try:
            return work()
        finally:
            if not self.is_in_pass:
                self._share(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for these inputs; called within `run`."""
        # Tensors made in inference mode could not be used in training, and engines keep some.
        with torch.inference_mode(False):
            inputs = tree_map(_without_wrapper, (args, kwargs))
            if self._engine.world_size > 1:
                self._share(tree_map_only(Tensor, Tensor.cpu, inputs))
            return self._forward(*inputs)

    def encode_latents(
        self, latents: LatentInputs | None, batch: int | None = None, caches: bool = False
    ) -> UnencodedLatent:
        """Return latents for later calls, which encode them."""
        return UnencodedLatent(latents)

    def _share(self, inputs: Any) -> Any:
        return broadcast_object(inputs, self._engine.world_size)

    @torch.no_grad()
    def _forward(self, args: Any, kwargs: Any) -> Any:
        self._before_pass()
        self.is_in_pass = True
        device = self._engine.device
        args, kwargs = tree_map_only(Tensor, lambda part: part.to(device), (args, kwargs))
        output = self._engine.module(*args, **kwargs)
        self.is_in_pass = False
        return output


def _without_wrapper(value: Any) -> Any:
    return value.inputs if isinstance(value, UnencodedLatent) else value
