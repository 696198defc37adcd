"""Latents by continuous diffusion: from noise to an embedding, given a text or unconditionally."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce

import numpy as np
import torch
from torch import Tensor, nn

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.diffusion.process import LatentProcess
from mmldlm.errors import MmldlmError, UserError
from mmldlm.models.base import LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.device import device_of
from mmldlm.sampling.latent_solver import LatentSolver
from mmldlm.utils.counter_rng import Stream, normals


def steps_given_text(process: LatentProcess) -> int:
    """Return the default number of steps for an embedding given its text.

    The text determines its embedding, so the x0 estimate from pure noise is already the expected
    embedding; further steps add the network's errors at smaller noise (cosine .84 in 1 step, .76
    in 10: docs/evaluation.md). 10 where x0 cannot be estimated from pure noise (prediction
    epsilon).
    """
    return 1 if process.sampling_start == 1.0 else 10


def project_to_sphere(model: nn.Module, x0: Tensor) -> Tensor:
    """Project model-space latents [..., D] to those whose raw form has norm 1."""
    raw = model.unscale_latents(x0)
    return model.scale_latents(raw / raw.norm(dim=-1, keepdim=True).clamp_min(1e-12))


def clamp_latents(model: nn.Module, x0: Tensor, bound: float) -> Tensor:
    """Clamp model-space latents [..., D] to those whose raw form lies in [-bound, bound]."""
    return model.scale_latents(model.unscale_latents(x0).clamp(-bound, bound))


def estimate_rule(
    model: nn.Module, renormalize: bool, clamp: float | None
) -> Callable[[Tensor], Tensor] | None:
    """Return what samplers put every x0 estimate but the last through; None: nothing."""
    rules: list[Callable[[Tensor], Tensor]] = []
    if renormalize:
        rules.append(partial(project_to_sphere, model))
    if clamp is not None:
        rules.append(partial(clamp_latents, model, bound=clamp))
    return (lambda x0: reduce(lambda x, rule: rule(x), rules, x0)) if rules else None


def raw_latents(model: nn.Module, z: Tensor, clamp: float | None) -> Tensor:
    """Sampled latents [..., D] in the encoder's space, on the CPU."""
    raw = model.unscale_latents(z)
    return (raw if clamp is None else raw.clamp(-clamp, clamp)).cpu()


def check_guidance_interval(
    guidance: float, interval: Sequence[float] | None, times: Tensor
) -> None:
    """Check timesteps (low, high) between which there is guidance.

    Args:
        guidance: its scale.
        interval: (low, high); None: all timesteps.
        times: those at which the network is asked. [T]

    Raises:
        UserError: they are not an interval within [0, 1], or there is guidance nowhere.
    """
    if interval is None:
        return
    low, high = interval
    if not 0 <= low < high <= 1:
        fix = "name a lower and a higher timestep, such as 0 0.9"
        raise UserError(
            "--guidance-interval LOW HIGH with 0 <= LOW < HIGH <= 1", f"{low:g} {high:g}", fix
        )
    if guidance == 1:
        fix = "add --guidance 2, or omit --guidance-interval"
        raise UserError(
            "--guidance-interval with a --guidance other than 1, which is none",
            "--guidance 1",
            fix,
        )
    if not ((low <= times) & (times <= high)).any():
        found = f"{low:g} {high:g}, and steps at {', '.join(f'{t:.3g}' for t in times.tolist())}"
        raise UserError(
            "--guidance-interval that holds a step", found, "add --num-steps 20, or widen it"
        )


def pad_texts(
    texts: Sequence[Sequence[int]], eos_token_id: int, pad_token_id: int, device=None
) -> tuple[Tensor, Tensor]:
    """Append EOS to ids and pad them.

    Returns:
        tokens [B, S] int64, and the mask [B, S] bool of real tokens.
    """
    width = max(len(text) for text in texts) + 1
    tokens = np.full((len(texts), width), pad_token_id, dtype=np.int64)
    real = np.zeros((len(texts), width), dtype=bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        tokens[row, len(text)] = eos_token_id
        real[row, : len(text) + 1] = True
    return torch.from_numpy(tokens).to(device), torch.from_numpy(real).to(device)


def latent_shape(config) -> tuple[int, ...]:
    """Return the shape of one sample's latents: (D,), or (M, D) for a model of M latents
    per text.
    """
    count = getattr(config, "num_latents", 1)
    return (config.latent_dim,) if count == 1 else (count, config.latent_dim)


def check_latents_per_text(store, config) -> None:
    """Check that a store has as many latents per text as the model.

    Raises:
        UserError: it has another number.
    """
    if store.latents_per_text != config.num_latents:
        raise UserError(
            f"a store of {config.num_latents} latents per text, as the model was trained on"
            " (model.num_latents)",
            f"{store.latents_per_text} in {store.root}",
            f"prepare one with --latents-per-text {config.num_latents}",
        )


@torch.inference_mode()
def sample_latents(
    model: nn.Module,
    texts: Sequence[Sequence[int]] | None,
    *,
    diffusion: LatentProcess,
    steps: int = 12,
    num_samples: int | None = None,
    method: str = "ddim",
    eta: float | str = 0.0,
    guidance: float = 1.0,
    guidance_interval: Sequence[float] | None = None,
    renormalize: bool = False,
    clamp: float | None = None,
    unit: bool = False,
    seed: int = 0,
    draw_indices: Sequence[int] | None = None,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Sample one latent per text, or num_samples latents unconditionally (the learned null text).

    Args:
        model: with the forward contract of MultimodalMMDiT.
        texts: N lists of ids without EOS, or None.
        diffusion: noise process of training.
        steps: number of steps (heun: 2 steps - 1 passes); `steps_given_text` is a good number with
            texts.
        method: ddim or dpm++2m (second order; any prediction), or heun for rectified flow (second
            order).
        eta: noise of DDIM: 1 is ancestral, "bridge" that of decoupled diffusion.
        guidance: classifier-free guidance, null + g (given - null) in the prediction's space.
        guidance_interval: the timesteps, ends included, at which there is guidance (arXiv
            2404.07724); None: all.
        renormalize: project every x0 estimate but the last onto the sphere (only for encoders of
            unit vectors).
        clamp: keep every x0 estimate within [-clamp, clamp] in the encoder's space (pixels: 1);
            None: do not.
        unit: return vectors of norm 1.
        seed: the noise of a sample depends on the seed and its index only.
        draw_indices: [N] indices instead of 0 .. N - 1; equal ones get equal noise.
        batch_tokens: maximum padded positions per pass; the rows of several latents count as well.
        progress: called after every step with the number of steps done and in total, over all
            latents.

    Returns:
        [N, D] fp32 on the CPU (or [N, M, D] for a model of M latents per text), in the encoder's
        space. The last step returns its x0 estimate.

    Raises:
        MmldlmError: NaN predictions.
        UserError: a method or eta that the schedule does not have, noise for a method that takes
            none, or a guidance_interval that `check_guidance_interval` refuses.
    """
    count = len(texts) if texts is not None else num_samples
    assert count is not None, "num_samples is needed without texts"
    device, config = device_of(model), model.config
    shape = latent_shape(config)
    own = (
        math.prod(shape[:-1]) * config.tokens_per_latent if len(shape) > 1 else 0
    )  # an image outweighs its text
    lengths = [len(text) + 1 + own for text in texts] if texts is not None else [1 + own] * count
    latents = torch.empty(count, *shape)
    check_guidance_interval(guidance, guidance_interval, diffusion.sampling_grid(steps)[:-1])
    low, high = guidance_interval or (0.0, 1.0)
    done = 0
    for rows in token_budget_batches(lengths, batch_tokens):
        tokens = real = None
        if texts is not None:
            tokens, real = pad_texts(
                [texts[row] for row in rows], config.eos_token_id, config.pad_token_id, device
            )
        indices = rows if draw_indices is None else [draw_indices[row] for row in rows]
        draws = normals(seed, Stream.LATENT, indices, (1 + (steps if eta != 0 else 0), *shape)).to(
            device
        )

        def predict(z: Tensor, t: float, tokens=tokens, real=real) -> Tensor:
            return _predict(model, tokens, real, z, t, guidance if low <= t <= high else 1.0)

        solver = LatentSolver(
            diffusion, steps, method, eta, estimate_rule(model, renormalize, clamp)
        )
        z = draws[:, 0]
        for k in range(steps):
            z = solver.step(k, z, predict, draws[:, 1 + k] if eta != 0 else None)
            done += len(rows)
            if progress is not None:
                progress(done, count * steps)
        _check_finite(z)
        latents[torch.from_numpy(rows.copy())] = raw_latents(model, z, clamp)
    if unit:
        latents = latents / latents.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return latents


def _check_finite(z: Tensor) -> None:
    if not bool(torch.isfinite(z).all()):
        raise MmldlmError(
            "the model returned NaN or infinite latents: its weights are corrupt or its input out"
            " of range"
        )


def _times(t: float, z: Tensor) -> Tensor:
    return torch.full((len(z),), t, dtype=torch.float64, device=z.device)


def _predict(
    model: nn.Module,
    tokens: Tensor | None,
    real: Tensor | None,
    z: Tensor,
    t: float,
    guidance: float,
) -> Tensor:
    latents = LatentInputs(z, _times(t, z).float())
    text = None if tokens is None else TextInputs(tokens, attention_mask=real)
    no_text = TokenQuery(torch.empty(0, dtype=torch.int64, device=z.device))
    prediction = model(text, latents, no_text).latent
    if guidance != 1.0 and text is not None:
        null = model(None, latents).latent
        prediction = null + guidance * (prediction - null)
    return prediction.float()
