"""Samples at the evaluations of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import cast

import torch

from mmldlm.engines.base import Engine
from mmldlm.inference.validation_samples import ValidationSample, sample_validation
from mmldlm.sampling.led_model import LedModel
from mmldlm.sampling.model import Model
from mmldlm.training.run_folder import Run
from mmldlm.utils.formatting import first_line


def draw_samples(
    run: Run, engine: Engine, heartbeat: Callable[[], None]
) -> list[ValidationSample]:
    """Return the samples of logging.eval_samples on rank 0, and [] on the others. Collective.

    They change nothing of the training: all draws are functions of the sample. An error outside of
    a forward pass costs the samples; then all ranks continue.

    Args:
        engine: Engine whose present weights are sampled.
        heartbeat: Function called on every rank before each forward pass.
    """
    count = run.config.logging.eval_samples
    if count == 0:
        return []
    model, module = LedModel(engine, heartbeat), engine.module
    is_compiled = run.config.training.compile_model
    was_training = module.training
    module.eval()
    try:
        # Compiled blocks run as they are: the few shapes of the samples are not worth a graph.
        with torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext():
            # Its latents stay unencoded, and are given to its own calls alone.
            led = cast("Model", model)
            return model.run(lambda: sample_validation(run.task, run.data, led, count)) or []
    except Exception as error:
        # Other ranks may wait in the pass that failed here, as in one of an evaluation; only
        # rank 0 can tell the others that no more passes follow.
        if engine.world_size > 1 and (model.is_in_pass or engine.rank > 0):
            raise
        step = run.state.step
        run.folder.event("samples_failed", step=step, reason=first_line(error))
        run.folder.warning(f"step {step}: no samples: {first_line(error)}")
        return []
    finally:
        module.train(was_training)
