"""The conditioning gain: what a latent tells a model of its text, and a text of its latent, on unseen sentences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from mmldlm.data.store.store import Store, check_latents
from mmldlm.errors import UserError
from mmldlm.evaluation.metrics import retrieval, text_overlap
from mmldlm.evaluation.metrics.nelbo import Likelihood, measure
from mmldlm.evaluation.statistics import Estimate, derangement, mean, proportion, ratio
from mmldlm.models import MultimodalMMDiT
from mmldlm.observe.progress_meter import Advance
from mmldlm.sampling.latent_sampler import check_latents_per_text, sample_latents
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.sampling.text.draw import PRESENCE_PENALTY
from mmldlm.sampling.text.loop import TextSamples, sample_text
from mmldlm.utils.counter_rng import Stream, generator

NATS = "nats/token"
Say = Callable[[str], Advance | None]


@dataclass
class Settings:
    """How much is measured.

    Attributes:
        num_samples: unseen sentences; None is 1,000, or all there are. num_steps: confidence steps of l2t.
        latent_steps: denoising steps of t2l. num_draws: timesteps a sentence in the NELBO. control_samples: sentences
            (of the same) the two untrained controls see. guidance: of both samplers. presence_penalty: of l2t
            (`sample_text`). seed: of every draw. batch_size: texts of full length in a pass; None: as many tokens as
            each measurement takes by itself.
    """

    num_samples: int | None = None
    num_steps: int = 12
    latent_steps: int = 10
    num_draws: int = 2
    control_samples: int = 100
    guidance: float = 1.0
    presence_penalty: float = PRESENCE_PENALTY
    seed: int = 0
    batch_size: int | None = None


def batch_budget(model: nn.Module, batch_size: int | None) -> dict[str, int]:
    """`batch_tokens` of the samplers and the NELBO, whose batches are of tokens: short texts share a pass."""
    return {} if batch_size is None else {"batch_tokens": batch_size * model.config.max_seq_len}


@dataclass
class DirectionResult:
    """What one model did: named estimates, and what it wrote."""

    estimates: dict[str, Estimate] = field(default_factory=dict)
    written: list[list[int]] = field(default_factory=list)
    f1: np.ndarray | None = None
    latents: np.ndarray | None = None


@dataclass
class Sentences:
    """The unseen sentences: token ids without EOS, latents [N, D] (or [N, M, D]) fp32, texts, the partner of each."""

    tokens: list[list[int]]
    latents: np.ndarray
    texts: list[str]
    partner: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def choose_sentences(store: Store, model: nn.Module, num_samples: int | None, seed: int) -> Sentences:
    """Draw sentences of a store's validation split, the same for the same seed.

    Raises:
        UserError: fewer than asked for, another latent dimension or vocabulary, texts too long, unusable latents.
    """
    config, where = model.config, f"{store.root}/{store.split}"
    count = min(1000, len(store)) if num_samples is None else num_samples
    if not 2 <= count <= len(store):
        raise UserError(
            "at least 2 sentences, as each is compared with the latent of another, and at most those in the store",
            f"{count} asked for, {len(store)} in {where}",
            "lower --num-samples, or prepare with more --validation-samples",
        )
    tokenizer = store.manifest["tokenizer"]
    wanted = {key: getattr(config, key) for key in ("mask_token_id", "pad_token_id", "eos_token_id")}
    found = {key: tokenizer[key] for key in wanted}
    if found != wanted or tokenizer["vocab_size"] > config.vocab_size:
        raise UserError(
            f"a store tokenized as the model was trained: {wanted}, at most {config.vocab_size} tokens",
            f"{found}, {tokenizer['vocab_size']} tokens in {store.root}",
            "evaluate on a store prepared with the model's own tokenizer",
        )
    ids = np.sort(generator(seed, Stream.SENTENCES).permutation(len(store))[:count])
    longest = int(store.lengths[ids].max()) + 1
    if longest > config.max_seq_len:
        raise UserError(
            f"texts of at most model.max_seq_len={config.max_seq_len} tokens, EOS included",
            f"one of {longest} in {where}",
            f"prepare with --max-tokens {config.max_seq_len - 1}",
        )
    batch = store.get(ids)
    check_latents(batch.latents, where, config.latent_dim)
    check_latents_per_text(store, config)
    return Sentences([row.tolist() for row in batch.tokens], batch.latents, store.texts(ids), derangement(count, seed))


def measure_l2t(
    pretrained: Pretrained, model: nn.Module, sentences: Sentences, settings: Settings, say: Say
) -> DirectionResult:
    """NELBO, lengths and free-running text of one model.

    The text of the shuffled arm is the text written from the partner's latent, which the right arm wrote already: a
    text depends on nothing of its sentence but the latent, so it is read against this reference, not written again.
    """
    latents, partner = torch.from_numpy(sentences.latents), sentences.partner
    progress = say(f"NELBO of {len(sentences)} sentences, {settings.num_draws} draws, right / shuffled / null latent")
    found = measure(
        model,
        sentences.tokens,
        latents,
        partner,
        diffusion=pretrained.text_diffusion,
        draws=settings.num_draws,
        seed=settings.seed,
        progress=progress,
        **batch_budget(model, settings.batch_size),
    )
    result = DirectionResult(likelihood_estimates(found))
    progress = say(f"writing {len(sentences)} texts from their embeddings in {settings.num_steps} confidence steps")
    samples = sample_text(
        model,
        latents,
        diffusion=pretrained.text_diffusion,
        steps=settings.num_steps,
        guidance=settings.guidance,
        presence_penalty=settings.presence_penalty,
        seed=settings.seed,
        progress=progress,
        **batch_budget(model, settings.batch_size),
    )
    result.estimates.update(text_estimates(samples, sentences.tokens, partner, found.num_tokens, settings.seed))
    result.written, result.f1 = samples.tokens, text_overlap.token_f1(samples.tokens, sentences.tokens)
    return result


def likelihood_estimates(found: Likelihood) -> dict[str, Estimate]:
    """Per-token figures (sum over sentences / sum of their tokens, EOS counted) and their paired differences."""
    nelbo, tokens = found.nelbo, found.num_tokens
    result = {f"nelbo_{name}": ratio(values, tokens, NATS) for name, values in nelbo.items()}
    result["gain_null"] = ratio(nelbo["null"] - nelbo["right"], tokens, NATS)
    result["gain_shuffled"] = ratio(nelbo["shuffled"] - nelbo["right"], tokens, NATS)
    for name, hits in found.correct.items():
        result[f"token_accuracy_{name}"] = ratio(hits, found.masked, "share of masked")
    for name, nll in found.length_nll.items():
        result[f"length_nll_{name}"] = mean(nll, "nats/text")
    # Not a figure of merit: shows whether the model reads its latent at all, so that a gain of 0 means something.
    result["latent_sensitivity"] = mean(np.abs(nelbo["shuffled"] - nelbo["right"]) / tokens, NATS)
    return result


def text_estimates(
    samples: TextSamples, references: Sequence[Sequence[int]], partner: np.ndarray, num_tokens: np.ndarray, seed: int
) -> dict[str, Estimate]:
    """Free-running text against its own reference and, written from the partner's latent, against this one."""
    shuffled = [samples.tokens[other] for other in partner]
    right, wrong = text_overlap.token_f1(samples.tokens, references), text_overlap.token_f1(shuffled, references)
    error = np.abs(samples.lengths.numpy() - num_tokens)
    return {
        "f1_right": mean(right, "points", 100),
        "f1_shuffled": mean(wrong, "points", 100),
        "f1_gap": mean(right - wrong, "points", 100),
        "bleu_right": text_overlap.bleu(samples.tokens, references, seed),
        "bleu_shuffled": text_overlap.bleu(shuffled, references, seed),
        "exact_match_right": mean(text_overlap.exact_match(samples.tokens, references), "points", 100),
        "length_error": mean(error, "tokens"),
        "length_error_shuffled": mean(np.abs(samples.lengths.numpy()[partner] - num_tokens), "tokens"),
    }


def measure_t2l(
    pretrained: Pretrained,
    model: nn.Module,
    sentences: Sentences,
    pool: np.ndarray,
    settings: Settings,
    say: Say,
) -> DirectionResult:
    """Embeddings made from text, against the encoder's; the first rows of pool [N, D] are the sentences' own."""
    progress = say(f"embedding {len(sentences)} texts in {settings.latent_steps} steps, retrieval among {len(pool)}")
    made = sample_latents(
        model,
        sentences.tokens,
        diffusion=pretrained.latent_diffusion,
        steps=settings.latent_steps,
        guidance=settings.guidance,
        renormalise=pretrained.renormalise,
        seed=settings.seed,
        progress=progress,
        **batch_budget(model, settings.batch_size),
    ).numpy()
    return DirectionResult(latent_estimates(made, sentences, pool), latents=made)


def latent_estimates(made: np.ndarray, sentences: Sentences, pool: np.ndarray) -> dict[str, Estimate]:
    """Cosine, recall among the pool and norm ratio of embeddings [Q, D].

    With several latents a text, [Q, M, D], cosine and norm ratio are means over them; retrieval is by their mean.
    """
    places = retrieval.ranks(retrieval.pool_latents(made), retrieval.pool_latents(pool), np.arange(len(made)))
    norm_ratio = np.linalg.norm(made, axis=-1) / np.linalg.norm(sentences.latents, axis=-1)
    return {
        "cosine": mean(retrieval.cosine_similarity(made, sentences.latents), "cosine"),
        "cosine_shuffled": mean(retrieval.cosine_similarity(made[sentences.partner], sentences.latents), "cosine"),
        "recall_at_1": proportion(places < 1, f"share, of {len(pool)}"),
        "recall_at_10": proportion(places < 10, f"share, of {len(pool)}"),
        "norm_ratio": mean(retrieval.mean_over_latents(norm_ratio), "made / true"),
    }


def chance_baselines(sentences: Sentences, model: nn.Module) -> dict[str, Estimate]:
    """What t2l reaches without reading the text: the mean of the training latents for every sentence, and chance."""
    average = model.unscale_latents(torch.zeros(1, model.config.latent_dim, device=model.latent_mean.device))
    constant = np.broadcast_to(average.cpu().numpy(), sentences.latents.shape)
    result = {
        f"mean_embedding_{name}": value
        for name, value in latent_estimates(constant, sentences, sentences.latents).items()
    }
    result["chance_recall_at_1"] = Estimate(1 / len(sentences), 0.0, f"share, of {len(sentences)}")
    return result


def untrained_control(model: nn.Module, seed: int, random_gates: bool) -> MultimodalMMDiT:
    """A fresh model of the same config and latent statistics.

    adaLN-Zero starts as the identity, so a fresh model ignores its latent exactly and its gain is 0 by construction.
    random_gates also draws the layers that start at zero, so that the text does depend on the latent and a gain of 0
    is a finding.
    """
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = MultimodalMMDiT(model.config)
        if random_gates:
            for name, module in fresh.named_modules():
                if name.endswith(("modulation", "to_latent")):
                    nn.init.normal_(module.weight, std=0.1)
    fresh.set_latent_statistics(model.latent_mean.cpu(), model.latent_std.cpu())
    return fresh.to(device).eval()


def evaluate(pretrained: Pretrained, store: Store, settings: Settings | None = None, say: Say = print):
    """Measure the conditioning gain in both directions, for the model and for two untrained ones.

    Args:
        pretrained: model, tokenizer and settings. store: a validation split the model never saw. settings: how much.
        say: receives one line for each thing begun; what it returns, if anything, is called as that advances (Meter).

    Returns:
        Report.

    Raises:
        UserError: the store does not fit the model. MmldlmError: the model gives NaN.
    """
    from mmldlm.evaluation.report import EvaluationReport

    settings = settings or Settings()
    started = time.perf_counter()
    model = pretrained.model
    pretrained.check_guidance(settings.guidance)
    sentences = choose_sentences(store, model, settings.num_samples, settings.seed)
    count = min(settings.control_samples, len(sentences))
    few = Sentences(
        sentences.tokens[:count], sentences.latents[:count], sentences.texts[:count], derangement(count, settings.seed)
    )
    arms: dict[str, dict[str, Estimate]] = {"model": {}, "untrained": {}, "untrained_random_gates": {}}
    examples: list[dict[str, Any]] = []
    notes = []
    models = {
        "untrained": untrained_control(model, settings.seed, random_gates=False),
        "untrained_random_gates": untrained_control(model, settings.seed, random_gates=True),
    }

    def quietly(name: str) -> Say:
        return lambda line: say(f"{name.replace('_', ' ')}: {line}")

    if pretrained.supports("l2t"):
        found = measure_l2t(pretrained, model, sentences, settings, say)
        arms["model"].update(found.estimates)
        examples = example_records(pretrained, sentences, found)
        for name, control in models.items():
            arms[name].update(measure_l2t(pretrained, control, few, settings, quietly(name)).estimates)
    else:
        notes.append("the model was not trained in mode l2t: text from embeddings is not evaluated")
    if pretrained.supports("t2l"):
        arms["model"].update(measure_t2l(pretrained, model, sentences, sentences.latents, settings, say).estimates)
        arms["floors"] = chance_baselines(sentences, model)
        for name, control in models.items():
            measured = measure_t2l(pretrained, control, few, sentences.latents, settings, quietly(name))
            arms[name].update(measured.estimates)
    else:
        notes.append("the model was not trained in mode t2l: embeddings from text are not evaluated")
    if pretrained.condition_dropout == 0:
        notes.append("trained with condition_dropout=0: its null latent was never trained, so gain_null says little")
    conditions = {
        "store": store.root.name,
        "num_sentences": len(sentences),
        "num_control_sentences": count,
        "num_text_tokens": int(sum(len(text) + 1 for text in sentences.tokens)),
        "nelbo_draws": settings.num_draws,
        "text_steps": settings.num_steps,
        "text_sampler": "confidence, greedy, lengths from the model (median of p(length | latent))",
        "latent_steps": settings.latent_steps,
        "guidance": settings.guidance,
        "presence_penalty": settings.presence_penalty,
        "seed": settings.seed,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.perf_counter() - started, 1),
        "notes": notes,
    }
    return EvaluationReport(conditions, arms, examples)


def example_records(
    pretrained: Pretrained, sentences: Sentences, found: DirectionResult, count: int = 10
) -> list[dict]:
    """Sentences spread evenly over the draw, not chosen by how well they went, beside what was written."""
    rows = np.unique(np.linspace(0, len(sentences) - 1, min(count, len(sentences))).astype(int)).tolist()
    written = pretrained.tokenizer.batch_decode([found.written[row] for row in rows], skip_special_tokens=True)
    return [
        {"sentence": sentences.texts[row], "written": text, "set_f1": round(float(found.f1[row]), 3)}
        for row, text in zip(rows, written)
    ]
