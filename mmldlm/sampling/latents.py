"""Latents by continuous diffusion: from noise to an embedding, given a text or unconditionally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.diffusion import GaussianProcess
from mmldlm.errors import MmldlmError, UserError
from mmldlm.models.base import LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.model import Model, device_of, rows_of_latents
from mmldlm.sampling.records import keeping_finished
from mmldlm.utils.counter_rng import Stream, normals


class LatentSolver:
    """Denoise one batch step by step.

    Args:
        process: Noise process of training.
        steps: Number of steps.
        method: One of `process.solvers`: ddim, dpm++2m (second order, one pass per step) or heun
            (second order, two).
        eta: Noise of DDIM: 0 none, 1 ancestral, or one of `process.named_etas`.
        project: Function of every x0 estimate but the last.

    Raises:
        UserError: a method or eta that the process does not have, or noise for a method that takes
            none.
    """

    def __init__(
        self,
        process: GaussianProcess,
        steps: int,
        method: str = "ddim",
        eta: float | str = 0.0,
        project: Callable[[Tensor], Tensor] | None = None,
    ):
        if method not in process.solvers:
            raise UserError(
                f"method {' or '.join(process.solvers)}, the solvers of this model's noise"
                " schedule",
                method,
                "choose one of them (heun is that of rectified_flow)",
            )
        if eta != 0 and method != "ddim":
            raise UserError(
                f"eta 0 with method {method}, which takes no noise",
                f"eta {eta}",
                "choose method ddim",
            )
        if isinstance(eta, str) and eta not in process.named_etas:
            raise UserError(
                "a number from 0 to 1 for the eta of this model's noise schedule",
                f"eta {eta}",
                "choose a number (bridge is that of schedule=decoupled)",
            )
        # Only a process that names heun among its solvers has `heun_step`.
        self.process: Any = process
        self.steps, self.method, self.project = steps, method, project
        self.eta = process.named_etas[eta] if isinstance(eta, str) else eta
        self.grid: list[float] = process.sampling_grid(steps).tolist()
        self._previous: tuple[Tensor, Tensor] | None = None

    def step(
        self,
        k: int,
        z: Tensor,
        predict: Callable[[Tensor, float], Tensor],
        noise: Tensor | None = None,
    ) -> Tensor:
        """Take step k; the last returns its x0 estimate as it is.

        Args:
            k: Number of the step, 0 .. steps - 1 in order.
            z: State. [B, ..., D]
            predict: Function (z, t) -> network output.
            noise: Standard normal noise like z, needed where eta is not 0.
        """
        t, s = self.grid[k : k + 2]
        if k < self.steps - 1 and self.method == "heun":
            return self.process.heun_step(predict, z, t, s, project=self.project)
        here, there = _times(t, z), _times(s, z)
        prediction = predict(z, t)
        if k == self.steps - 1:
            return self.process.to_x0(prediction, z, here)
        if self.method == "ddim":
            return self.process.step(
                prediction, z, here, there, eta=self.eta, noise=noise, project=self.project
            )
        x0 = self.process.to_x0(prediction, z, here)
        x0 = x0 if self.project is None else self.project(x0)
        previous, self._previous = self._previous, (x0, here)
        return self.process.multistep(x0, z, here, there, previous)


def steps_given_text(process: GaussianProcess) -> int:
    """Return the default number of steps for an embedding given its text.

    The text determines its embedding, so the x0 estimate from pure noise is already the expected
    embedding; further steps add the network's errors at smaller noise (cosine .84 in 1 step, .76
    in 10: docs/evaluation.md). 10 where x0 cannot be estimated from pure noise (prediction
    epsilon).
    """
    return 1 if process.sampling_start == 1.0 else 10


def estimate_rule(
    model: Model, renormalize: bool, clamp: float | None
) -> Callable[[Tensor], Tensor] | None:
    """Return the function that samplers apply to every x0 estimate [..., D] but the last: to norm
    1, or into [-clamp, clamp], in the encoder's space; None: none.
    """
    if not renormalize and clamp is None:
        return None

    def rule(x0: Tensor) -> Tensor:
        raw = model.unscale_latents(x0)
        if renormalize:
            raw = raw / raw.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        if clamp is not None:
            raw = raw.clamp(-clamp, clamp)
        return model.scale_latents(raw)

    return rule


def raw_latents(model: Model, z: Tensor, clamp: float | None, unit: bool) -> Tensor:
    """Sampled latents [..., D] fp32 in the encoder's space, on the CPU; with unit, of norm 1."""
    raw = model.unscale_latents(z)
    raw = (raw if clamp is None else raw.clamp(-clamp, clamp)).float().cpu()
    return raw / raw.norm(dim=-1, keepdim=True).clamp_min(1e-12) if unit else raw


def check_guidance_interval(
    guidance: float, interval: Sequence[float] | None, times: Tensor
) -> None:
    """Check timesteps (low, high) between which there is guidance.

    Args:
        guidance: Scale of the guidance.
        interval: Bounds (low, high); None: all timesteps.
        times: Timesteps at which the network is called. [T]

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
        description = (
            f"{low:g} {high:g}, and steps at {', '.join(f'{t:.3g}' for t in times.tolist())}"
        )
        raise UserError(
            "--guidance-interval that holds a step", description, "add --num-steps 20, or widen it"
        )


def pad_texts(
    texts: Sequence[Sequence[int]], eos_token_id: int, pad_token_id: int, device: Any = None
) -> tuple[Tensor, Tensor]:
    """Append EOS to ids and pad them.

    Returns:
        Tokens [B, S] int64, and the mask [B, S] bool of real tokens.
    """
    width = max(len(text) for text in texts) + 1
    tokens = np.full((len(texts), width), pad_token_id, dtype=np.int64)
    real = np.zeros((len(texts), width), dtype=bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        tokens[row, len(text)] = eos_token_id
        real[row, : len(text) + 1] = True
    return torch.from_numpy(tokens).to(device), torch.from_numpy(real).to(device)


def latent_shape(config: Any) -> tuple[int, ...]:
    """Return the shape of one sample's latents: (D,), or (M, D) for a model of M latents
    per text.
    """
    count = getattr(config, "num_latents", 1)
    return (config.latent_dim,) if count == 1 else (count, config.latent_dim)


@torch.inference_mode()
def sample_latents(
    model: Model,
    texts: Sequence[Sequence[int]] | None,
    *,
    diffusion: GaussianProcess,
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
        texts: N lists of ids without EOS, or None.
        diffusion: Noise process of training.
        steps: Number of steps (heun: 2 steps - 1 passes); `steps_given_text` is a good number with
            texts.
        method: Solver: ddim, dpm++2m (second order; any prediction), or heun for rectified flow
            (second order).
        eta: Noise of DDIM: 1 is ancestral, "bridge" that of decoupled diffusion.
        guidance: Scale g of classifier-free guidance, null + g (conditional - null) in the
            prediction's space.
        guidance_interval: Timesteps, ends included, at which there is guidance (arXiv
            2404.07724); None: all.
        renormalize: Whether to project every x0 estimate but the last onto the sphere (only for
            encoders of unit vectors).
        clamp: Bound of every x0 estimate in the encoder's space (pixels: 1); None: no bound.
        unit: Whether to return vectors of norm 1.
        seed: Seed of the noise; that of a sample depends on it and on the sample's index only.
        draw_indices: Indices instead of 0 .. N - 1; equal ones get equal noise. [N]
        batch_tokens: Maximum of padded positions per pass; the rows of several latents count, too.
        progress: Callback after every step, with the number of steps done and in total over all
            latents.

    Returns:
        [N, D] fp32 on the CPU (or [N, M, D] for a model of M latents per text), in the encoder's
        space. The last step returns its x0 estimate.

    Raises:
        MmldlmError: NaN predictions.
        SamplingInterrupted: an interrupt after the first batch.
        UserError: a method or eta that the schedule does not have, noise for a method that takes
            none, or a guidance_interval that `check_guidance_interval` refuses.
    """
    count = len(texts) if texts is not None else num_samples
    assert count is not None, "num_samples is needed without texts"
    device, config = device_of(model), model.config
    shape, num_rows = latent_shape(config), rows_of_latents(config)
    lengths = (
        [len(text) + 1 + num_rows for text in texts]
        if texts is not None
        else [1 + num_rows] * count
    )
    latents = torch.zeros(count, *shape)
    check_guidance_interval(guidance, guidance_interval, diffusion.sampling_grid(steps)[:-1])
    low, high = guidance_interval or (0.0, 1.0)
    done = 0
    with keeping_finished(latents) as finished:
        for rows in token_budget_batches(lengths, batch_tokens):
            tokens = real = None
            if texts is not None:
                tokens, real = pad_texts(
                    [texts[row] for row in rows], config.eos_token_id, config.pad_token_id, device
                )
            indices = rows.tolist()
            if draw_indices is not None:
                indices = [draw_indices[row] for row in indices]
            draws = normals(
                seed, Stream.LATENT, indices, (1 + (steps if eta != 0 else 0), *shape)
            ).to(device)

            def predict(
                z: Tensor, t: float, tokens: Tensor | None = tokens, real: Tensor | None = real
            ) -> Tensor:
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
            check_finite_latents(z)
            latents[torch.from_numpy(rows.copy())] = raw_latents(model, z, clamp, unit)
            finished += rows.tolist()
    return latents


def check_finite_latents(z: Tensor) -> None:
    """Raise a MmldlmError for sampled latents with NaN or infinite values."""
    if not bool(torch.isfinite(z).all()):
        raise MmldlmError(
            "the model returned NaN or infinite latents: its weights are corrupt or its input out"
            " of range"
        )


def _times(t: float, z: Tensor) -> Tensor:
    return torch.full((len(z),), t, dtype=torch.float64, device=z.device)


def _predict(
    model: Model,
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
