"""Identities of baselines.py that hold whatever the models learned: AR with and without its cache,
GIDD without uniform noise against MDLM, and every bound for a denoiser whose NELBO is known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB, MASK, EOS, NUM_CLUSTERS = 24, 3, 2, 4
# Points of the integral over time: errors fall below 1e-3 at every setting.
POINTS = 5_000


def largest_error() -> float:
    """Largest |NELBO - cross-entropy| in nats a token, over masked, hybrid and hierarchical
    diffusion.

    A denoiser that predicts the same law everywhere costs its cross-entropy, whatever the process.
    The NELBO is summed over all noised states and integrated over time with the weights and
    divergences that the tasks train with.
    """
    import torch

    from mmldlm.diffusion.gidd import GiddProcess
    from mmldlm.diffusion.hdlm import HierarchicalProcess

    log_p = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_p[MASK] = float("-inf")
    log_p = log_p.log_softmax(0)
    targets = [EOS, *range(MASK + 1, VOCAB)]
    clusters = torch.tensor(
        [-1] * (MASK + 1) + [k % NUM_CLUSTERS for k in range(VOCAB - MASK - 1)]
    )
    errors = {"masked": abs(_masked_bound(log_p, targets) - _cross_entropy(log_p, targets))}
    for share in (0.0, 0.1, 0.5):
        process = GiddProcess(VOCAB, MASK, share)
        errors[f"GIDD, uniform share {share:g}"] = _error(process, _gidd_states, log_p, targets)
    for gamma in (0.5, 1.0, 2.0):
        process = HierarchicalProcess(clusters, MASK, gamma)
        errors[f"HDLM, gamma {gamma:g}"] = _error(process, _hierarchical_states, log_p, targets)
    for name, error in errors.items():
        print(
            f"context-free denoiser under {name}: |NELBO - cross-entropy| = {error:.1e} nats/token"
        )
    return max(errors.values())


def _cross_entropy(log_p, targets: list[int]) -> float:
    return -float(log_p[targets].mean())


def _masked_bound(log_p, targets: list[int]) -> float:
    """E over mask counts k of L / k times the loss of the k masked tokens, over all texts of two
    tokens.
    """
    import torch

    from mmldlm.diffusion import MaskedDiffusion

    texts = torch.cartesian_prod(torch.tensor(targets), torch.tensor(targets)).repeat_interleave(
        256, 0
    )
    uniform = (
        torch.quasirandom.SobolEngine(3)
        .draw(256, dtype=torch.float64)
        .repeat(len(texts) // 256, 1)
    )
    diffusion = MaskedDiffusion(MASK)
    real = torch.ones_like(texts, dtype=torch.bool)
    _, masked, fraction = diffusion.corrupt_count(texts, uniform[:, 2], uniform[:, :2], real, MASK)
    return float(((-log_p[texts] * masked).sum(1) / fraction).mean() / texts.shape[1])


def _error(process, states, log_p, targets: list[int]) -> float:
    import torch

    from mmldlm.diffusion.timesteps import arcsine

    t, density = arcsine((torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS)
    total = 0.0
    for target in targets:
        x = torch.full((POINTS,), target)
        for z, probability in states(process, x, t):
            d, _ = process.divergence(x, z, t).score(
                log_p.expand(POINTS, -1), slice(0, POINTS), False
            )
            total += float((probability * process.elbo_weights(x, z, t) * d * density).mean())
    return abs(total / len(targets) - _cross_entropy(log_p, targets))


def _gidd_states(process, x, t):
    """Every state and its probability at t, given the token x."""
    import torch

    shares = process.marginals(t)
    for token in range(VOCAB):
        noise = shares.mask if token == MASK else shares.uniform / process.num_noise_tokens
        z = torch.full_like(x, token)
        yield z, noise + torch.where(z == x, shares.alpha, 0.0)


def _hierarchical_states(process, x, t):
    """The token's cluster and [MASK], with their probabilities; at the token itself the weight is
    0.
    """
    import torch

    levels = process.levels(t)
    for middle, probability in (
        (levels.word + levels.cluster / 2, levels.cluster), (1 - levels.mask / 2, levels.mask),
    ):  # fmt: skip
        real = torch.ones_like(x, dtype=torch.bool)[:, None]
        yield process.corrupt(x[:, None], t, middle[:, None], real)[0][:, 0], probability


def cache_difference(run: Path, store: str, count: int = 16) -> float:
    """Largest difference in nats a token between teacher forcing and one token after the other,
    over some texts.
    """
    import torch

    from mmldlm.data.store import Store
    from mmldlm.evaluation.sentences import choose_sentences
    from mmldlm.inference.load import load_pretrained
    from mmldlm.models.plain import next_logits, start_text
    from mmldlm.sampling.latents import pad_texts

    pretrained = load_pretrained(run / "latest")
    model, config = pretrained.model, pretrained.model.config
    sentences = choose_sentences(Store(store, "validation"), model, count, 0)
    tokens, real = pad_texts(sentences.tokens, config.eos_token_id, config.pad_token_id)
    latents = None
    if config.conditioning != "none":
        latents = model.scale_latents(torch.from_numpy(sentences.latents))
    with torch.inference_mode():
        unread = torch.empty(len(tokens), tokens.shape[1] + 1)
        expected = pretrained.task.score_texts(
            pretrained, tokens, real, latents, unread, (0, 1)
        ).nats
        cache, found = start_text(model, latents, len(tokens)), torch.zeros_like(expected)
        for place in range(tokens.shape[1]):
            logits = next_logits(model, cache, None if place == 0 else tokens[:, place - 1])
            log_p = logits.double().log_softmax(-1).gather(1, tokens[:, place, None])[:, 0]
            found -= torch.where(real[:, place], log_p, 0.0)
    return float(((found - expected).abs() / real.sum(1)).max())


def bound_difference(run: Path, store: str, count: int = 64, draws: int = 4) -> float:
    """Difference in nats a token between GIDD's bound (at uniform_share 0) and MDLM's, whose
    weight is 1 / t.
    """
    import torch

    from mmldlm.data.store import Store
    from mmldlm.diffusion.timesteps import arcsine
    from mmldlm.evaluation.sentences import choose_sentences
    from mmldlm.inference.load import load_pretrained
    from mmldlm.models.base import TextInputs
    from mmldlm.models.token_scores import TokenQuery
    from mmldlm.sampling.latents import pad_texts
    from mmldlm.tasks.text_task import sum_by_row
    from mmldlm.utils.counter_rng import Stream, uniforms

    pretrained = load_pretrained(run / "latest")
    task: Any = pretrained.task
    model, config = pretrained.model, pretrained.model.config
    split = Store(store, "validation")
    sentences = choose_sentences(split, model, min(count, len(split)), 0)
    tokens, real = pad_texts(sentences.tokens, config.eos_token_id, config.pad_token_id)
    uniform = uniforms(0, Stream.LIKELIHOOD, range(len(tokens)), (draws, tokens.shape[1] + 1))
    process, difference = task.process_of_model(pretrained), 0.0
    with torch.inference_mode():
        for draw in range(draws):
            own = torch.cat([uniform[:, draw, :-1], uniform[:, 0, -1:]], dim=1)
            ours = task.score_texts(pretrained, tokens, real, None, own, (draw, draws)).nats
            t, density = arcsine((draw + own[:, -1]) / draws)
            noised, _ = process.corrupt(tokens, t, own[:, :-1], real)
            positions = (noised == config.mask_token_id).flatten().nonzero()[:, 0]
            owner, targets = positions // tokens.shape[1], tokens.flatten()[positions]
            out = model(
                TextInputs(noised, t.float(), real),
                None,
                TokenQuery(positions, targets, torch.ones(len(targets))),
            )
            theirs = sum_by_row(out.text.nll.double() * (density / t)[owner], owner, len(tokens))
            difference += float((ours - theirs).sum())
    return abs(difference) / draws / float(real.sum())
