"""engine.kind -> Engine."""

from __future__ import annotations

from torch import nn

from mmldlm.config.schema import Config
from mmldlm.engines.base import Engine


def build_engine(model: nn.Module, config: Config) -> Engine:
    """Wrap the model (freezing already decided) in the engine that config.engine.kind names. Collective."""
    if config.engine.kind == "single":
        from mmldlm.engines.single import SingleEngine

        return SingleEngine(model, config)
    from mmldlm.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(model, config)
