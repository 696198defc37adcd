"""Text and latent together, without a condition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mmldlm.diffusion import GaussianProcess, MaskedDiffusion
from mmldlm.models.base import LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.decoding import predict_lengths
from mmldlm.sampling.latents import (
    LatentSolver,
    check_finite_latents,
    estimate_rule,
    latent_shape,
    raw_latents,
)
from mmldlm.sampling.model import Model, device_of
from mmldlm.sampling.records import Recorder, TextSamples, keeping_finished
from mmldlm.sampling.settings import DrawSettings
from mmldlm.sampling.strategies import Observer
from mmldlm.sampling.text import start_decoding
from mmldlm.utils.counter_rng import Stream, normals


@torch.inference_mode()
def sample_joint(
    model: Model,
    num_samples: int,
    *,
    text_diffusion: MaskedDiffusion,
    latent_diffusion: GaussianProcess,
    steps: int = 64,
    sampler: str = "ancestral",
    solver: str = "ddim",
    temperature: float | None = None,
    top_p: float = 1.0,
    renormalize: bool = False,
    clamp: float | None = None,
    unit: bool = False,
    seed: int = 0,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
    recorder: Recorder | None = None,
) -> tuple[TextSamples, Tensor]:
    """Denoise text and latent together from t = 1 to 0.

    Training draws the two timesteps independently, so any schedule of the pair is in distribution.

    Args:
        model: Model trained in mode unconditional.
        steps: Number of passes.
        solver: Solver of the latents: ddim or dpm++2m.
        unit: Whether to return latents of norm 1.
        progress: Callback after every step, with the number of steps done and in total over all
            samples.
        recorder: Callback after every step that wrote something.
        The rest as in `sample_text` and `sample_latents`.

    Returns:
        The texts, and the latents [N, D] (or [N, M, D]) in the encoder's space. Lengths are drawn
        from p(length).

    Raises:
        MmldlmError: NaN predictions.
        SamplingInterrupted: an interrupt after the first batch.
    """
    device = device_of(model)
    lengths = predict_lengths(model, None, num_samples, seed)
    order = torch.argsort(lengths, stable=True)
    texts: list[list[int]] = [[] for _ in range(num_samples)]
    shape = latent_shape(model.config)
    latents = torch.zeros(num_samples, *shape)
    passes = torch.full((num_samples,), steps)
    result = TextSamples(texts, lengths, num_samples * steps, passes), latents
    draw, done = DrawSettings(temperature, top_p), 0
    rule = estimate_rule(model, renormalize, clamp)
    with keeping_finished(result) as finished:
        for index in order.split(batch_size):
            rows = index.tolist()
            strategy = start_decoding(
                sampler,
                model,
                lengths[index],
                rows,
                diffusion=text_diffusion,
                options={"num_steps": steps},
                draw=draw,
                seed=seed,
                shared_schedule=True,
            )
            state = strategy.state
            observer = None if recorder is None else Observer(state, rows, recorder)
            z = normals(seed, Stream.JOINT_LATENT, rows, shape).to(device)
            latent_solver = LatentSolver(latent_diffusion, steps, solver, project=rule)
            for k, time in enumerate(latent_solver.grid[:-1]):
                t = torch.full((len(rows),), time, dtype=torch.float32, device=device)
                positions = strategy.positions()
                out = model(
                    TextInputs(state.tokens, strategy.timesteps(), state.real),
                    LatentInputs(z, t),
                    TokenQuery(positions),
                )
                prediction = out.latent.float()
                z = latent_solver.step(k, z, partial(_given, prediction))
                strategy.fill(positions, out.text.logits, observer if len(positions) else None)
                done += len(rows)
                if progress is not None:
                    progress(done, num_samples * steps)
            for row, text in zip(rows, state.texts()):
                texts[row] = text
            check_finite_latents(z)
            latents[index] = raw_latents(model, z, clamp, unit)
            finished += rows
    return result


def _given(prediction: Tensor, z: Tensor, t: float) -> Tensor:
    """Return the prediction of a pass that was taken already, for `LatentSolver.step`."""
    return prediction
