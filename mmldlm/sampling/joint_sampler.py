"""Text and latent unconditionally, by whichever method the model was trained for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.diffusion.process import LatentProcess
from mmldlm.errors import UserError
from mmldlm.models.base import LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.device import device_of
from mmldlm.sampling.latent_sampler import estimate_rule, latent_shape, raw_latents
from mmldlm.sampling.latent_solver import LatentSolver
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.sampling.text.draw import DrawSettings
from mmldlm.sampling.text.length_rule import predict_lengths
from mmldlm.sampling.text.loop import start_decoding
from mmldlm.sampling.text.records import Observer, Recorder, TextSamples
from mmldlm.utils.counter_rng import Stream, normals

JOINT_METHODS = ("joint", "chain")


def choose_method(pretrained: Pretrained, requested: str | None = None) -> str:
    """Return how a model can sample text and latent unconditionally.

    joint: both start as noise and are denoised together; only mode `unconditional` trains this.
    chain: a latent from the null text (trained by t2l with condition dropout), then text from that
    latent (l2t). joint is preferred if both are possible: it models the pair, while a chain's text
    is conditioned on a sampled latent, unlike in training.

    Raises:
        UserError: a method the model was not trained for, or a folder without this information.
    """
    weights, dropout = pretrained.mode_weights, pretrained.condition_dropout
    if weights is None:
        if requested is not None:
            return requested
        raise UserError(
            f'"training": {{"mode_weights": ...}} in {pretrained.folder}/config.json, which names'
            " the trained modes",
            "no such key",
            "choose with --method joint or --method chain",
        )
    trained = {mode for mode, weight in weights.items() if weight > 0}
    possible = []
    if "unconditional" in trained:
        possible.append("joint")
    if {"l2t", "t2l"} <= trained and dropout != 0:
        possible.append("chain")
    if requested in possible or (requested is None and possible):
        return requested or possible[0]
    raise UserError(
        "a model trained in mode unconditional (joint), or in l2t and t2l with condition_dropout >"
        " 0 (chain)",
        f"modes {', '.join(sorted(trained))}, condition_dropout {dropout}"
        + (f", which does not allow --method {requested}" if requested else ""),
        f"use --method {possible[0]}" if possible else "train with training.loss_type=mixed",
    )


@torch.inference_mode()
def sample_joint(
    model: nn.Module,
    num_samples: int,
    *,
    text_diffusion: MaskedDiffusion,
    latent_diffusion: LatentProcess,
    steps: int = 64,
    sampler: str = "ancestral",
    solver: str = "ddim",
    temperature: float | None = None,
    top_p: float = 1.0,
    renormalize: bool = False,
    clamp: float | None = None,
    seed: int = 0,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
    recorder: Recorder | None = None,
) -> tuple[TextSamples, Tensor]:
    """Denoise text and latent together from t = 1 to 0.

    Training draws the two timesteps independently, so any schedule of the pair is in distribution.

    Args:
        model: trained in mode unconditional.
        num_samples: N.
        steps: number of passes.
        solver: of the latents: ddim or dpm++2m.
        progress: called after every step with the number of steps done and in total, over all
            samples.
        recorder: called after every step that wrote something.
        The rest as in `sample_text` and `sample_latents`.

    Returns:
        the texts, and the latents [N, D] (or [N, M, D]) in the encoder's space. Lengths are drawn
        from p(length).
    """
    device = device_of(model)
    lengths = predict_lengths(model, None, num_samples, "sample", seed)
    order = torch.argsort(lengths, stable=True)
    texts: list[list[int]] = [[] for _ in range(num_samples)]
    shape = latent_shape(model.config)
    latents = torch.empty(num_samples, *shape)
    draw, done = DrawSettings(temperature, top_p), 0
    rule = estimate_rule(model, renormalize, clamp)
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
            z = latent_solver.step(k, z, lambda z, t, given=prediction: given)
            strategy.take_pass(positions, out.text.logits, observer if len(positions) else None)
            done += len(rows)
            if progress is not None:
                progress(done, num_samples * steps)
        for row, text in zip(rows, state.texts()):
            texts[row] = text
        latents[index] = raw_latents(model, z, clamp)
    passes = torch.full((num_samples,), steps)
    return TextSamples(texts, lengths, num_samples * steps, passes), latents
