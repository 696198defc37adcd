"""Both modalities from nothing, by whichever way the model was trained for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.diffusion.process import LatentProcess
from mmldlm.errors import UserError
from mmldlm.sampling.latent_sampler import latent_shape, project_to_sphere, time_grid
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.sampling.text.loop import DecodingState, TextSamples, device_of, predict_lengths
from mmldlm.utils.counter_rng import Stream, normals, uniforms

JOINT_METHODS = ("joint", "chain")


def choose_method(pretrained: Pretrained, asked: str | None = None) -> str:
    """How a model can write text and latent from nothing.

    joint: both start as noise and are denoised together, which a model learns in mode `unconditional` alone. chain: a
    latent from the null text (trained by t2l with condition dropout), then text from that latent (l2t). joint is
    preferred where both are possible: it is one model of the pair, while a chain's text sees a sampled latent where
    training showed it an encoder's.

    Raises:
        UserError: a way the model was not trained for, or a folder that does not say.
    """
    weights, dropout = pretrained.mode_weights, pretrained.condition_dropout
    if weights is None:
        if asked is not None:
            return asked
        raise UserError(
            f'"training": {{"mode_weights": ...}} in {pretrained.folder}/config.json, which says what the model can do',
            "no such key",
            "say it yourself with --way joint or --way chain",
        )
    trained = {mode for mode, weight in weights.items() if weight > 0}
    possible = []
    if "unconditional" in trained:
        possible.append("joint")
    if {"l2t", "t2l"} <= trained and dropout != 0:
        possible.append("chain")
    if asked in possible or (asked is None and possible):
        return asked or possible[0]
    raise UserError(
        "a model trained in mode unconditional (joint), or in l2t and t2l with condition_dropout > 0 (chain)",
        f"modes {', '.join(sorted(trained))}, condition_dropout {dropout}"
        + (f", which does not allow --way {asked}" if asked else ""),
        f"use --way {possible[0]}" if possible else "train with training.loss_type=mixed",
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
    temperature: float | None = None,
    top_p: float = 1.0,
    renormalise: bool = False,
    seed: int = 0,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[TextSamples, Tensor]:
    """Text and latent stepping together from t = 1 to 0; training draws their timesteps apart, so every path is known.

    Args:
        model: trained in mode unconditional. num_samples: N. steps: passes. progress: called after every step with the
            steps of all samples done so far, and in all.
        The rest as in `sample_text` and `sample_latents`.

    Returns:
        the texts, and the latents [N, D] (or [N, M, D]) in the encoder's space. Lengths are drawn from p(length).
    """
    device, config = device_of(model), model.config
    lengths = predict_lengths(model, None, num_samples, "sample", seed)
    order = torch.argsort(lengths, stable=True)
    texts: list[list[int]] = [[] for _ in range(num_samples)]
    latents = torch.empty(num_samples, *latent_shape(config))
    grid = time_grid(latent_diffusion, steps).tolist()
    project = partial(project_to_sphere, model) if renormalise else None
    done = 0
    for index in order.split(batch_size):
        rows = index.tolist()
        state = DecodingState(
            lengths[index].to(device),
            int(lengths[index].max()),
            steps,
            sampler=sampler,
            diffusion=text_diffusion,
            temperature=temperature,
            top_p=top_p,
            uniform=uniforms(seed, Stream.TEXT, rows, (2, config.max_seq_len)),
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            common_clock=True,
        )
        z = normals(seed, Stream.JOINT_LATENT, rows, latent_shape(config)).to(device)
        for k, (t, s) in enumerate(zip(grid[:-1], grid[1:])):
            now, then = (torch.full((len(rows),), value, dtype=torch.float64, device=device) for value in (t, s))
            positions = state.wanted(k)
            out = model(state.tokens, z, state.timesteps(k), now.float(), state.real, text_positions=positions)
            prediction = out["latent_pred"].float()
            if k < steps - 1:
                z = latent_diffusion.step(prediction, z, now, then, project=project)
            else:
                z = latent_diffusion.to_x0(prediction, z, now)
            state.update(k, positions, out["text_logits"])
            done += len(rows)
            if progress is not None:
                progress(done, num_samples * steps)
        for row, text in zip(rows, state.texts()):
            texts[row] = text
        latents[index] = model.unscale_latents(z).cpu()
    return TextSamples(texts, lengths, num_samples * steps), latents
