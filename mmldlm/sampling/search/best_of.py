"""Best of N: several texts a latent, of which a judge keeps the one whose embedding is nearest to
the latent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from mmldlm.sampling.pretrained import Pretrained
from mmldlm.sampling.search.accounting import SamplingCost
from mmldlm.sampling.search.judge import Judge, cosines
from mmldlm.sampling.text.length_rule import most_probable_lengths
from mmldlm.sampling.text.loop import TextSamples
from mmldlm.utils.counter_rng import candidate_seed

if TYPE_CHECKING:
    from mmldlm.tasks.text_task import TextTask

LENGTHS = 3
"""The most probable lengths that candidates have, of a task that fills given lengths."""
TEMPERATURES = (0.5, 0.7, 0.85, 1.0)


@dataclass(frozen=True)
class Candidate:
    """How the k-th text of every latent is written; a function of k and the task alone.

    Attributes:
        sampler: of the task.
        temperature: None: the sampler's own.
        length_rank: 0 is the most probable length; None: the task chooses the length.
    """

    sampler: str
    temperature: float | None = None
    length_rank: int | None = None


@dataclass
class FoundTexts:
    """The result of a search.

    Attributes:
        tokens: ids of the texts that were kept, without EOS.
        cosine: by the judge, of each text's embedding with its latent. [N] fp64
        score: what the search made larger: the cosine, of a correction with the log-ratios of its
            edits. [N] fp64
        calls: texts that the judge was given for each latent. [N] int64
        cost: of all of it.
    """

    tokens: list[list[int]]
    cosine: np.ndarray
    score: np.ndarray
    calls: np.ndarray
    cost: SamplingCost


def candidate(task: TextTask, k: int) -> Candidate:
    """Return how the k-th candidate is written: the task's default text first, then other lengths,
    then draws.
    """
    samplers = task.samplers["l2t"]
    if k == 0:
        return Candidate(samplers[0])
    if not task.fills_lengths:
        return Candidate("ancestral", TEMPERATURES[(k - 1) % len(TEMPERATURES)])
    rank, number = (k - 1) % LENGTHS, (k - 1) // LENGTHS
    if number == 0:
        return Candidate(samplers[0], None, rank)
    return Candidate("ancestral", TEMPERATURES[(number - 1) % len(TEMPERATURES)], rank)


def write_candidate(
    pretrained: Pretrained,
    latents: Tensor,
    k: int,
    lengths: Tensor | None,
    seed: int,
    options: dict[str, Any],
) -> TextSamples:
    """Write the k-th candidate of every latent; its draws are a function of (seed, index of the
    latent, k).

    Args:
        lengths: the most probable lengths of each latent, of a task that fills given lengths. [N,
            LENGTHS]
        options: of `TextTask.write_texts`.
    """
    plan = candidate(pretrained.task, k)
    unread = pretrained.task.unread_options("l2t", plan.sampler)
    given = {key: value for key, value in options.items() if key not in unread}
    if plan.temperature is not None:
        given.update(temperature=plan.temperature)
        if "presence_penalty" in given:  # that of greedy decoding, which repeats tokens
            given.update(presence_penalty=0.0)
    if plan.length_rank is not None:
        assert lengths is not None
        given.update(lengths=lengths[:, plan.length_rank])
    return pretrained.task.write_texts(
        pretrained, latents, sampler=plan.sampler, seed=candidate_seed(seed, k), **given
    )


def best_of(
    pretrained: Pretrained,
    latents: Tensor,
    judge: Judge,
    *,
    num_candidates: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> FoundTexts:
    """Write several texts a latent and keep the one that the judge finds nearest; references are
    never read.

    Args:
        latents: [N, D] (or [N, M, D]) in the encoder's space.
        judge: used for this call alone, so that its counts are those of this search.
        num_candidates: texts a latent; equal ones are judged once.
        seed: the candidates of a latent depend on the seed, its index and the candidate's number
            only.
        progress: called after every candidate with those done and in total.
        options: of `TextTask.write_texts`, the same for all candidates.

    Raises:
        MmldlmError: NaN logits or embeddings.
    """
    task, model, count = pretrained.task, pretrained.model, len(latents)
    targets, cost = latents.cpu().numpy(), SamplingCost(count)
    lengths = most_probable_lengths(model, latents, LENGTHS)[0] if task.fills_lengths else None
    texts: list[list[int]] = [[] for _ in range(count)]
    cosine, calls, depth = np.full(count, -np.inf), np.zeros(count, dtype=np.int64), 0
    seen: list[set[str]] = [set() for _ in range(count)]
    for k in range(num_candidates):
        samples = write_candidate(pretrained, latents, k, lengths, seed, options)
        cost.add_texts(task, model.config, samples)
        depth = max(depth, int(samples.passes.max()))
        strings = judge.strings(samples.tokens)
        fresh = [row for row in range(count) if strings[row] not in seen[row]]
        if fresh:
            found = cosines(judge.embed([samples.tokens[row] for row in fresh]), targets[fresh])
            for row, value in zip(fresh, found.tolist()):
                seen[row].add(strings[row])
                calls[row] += 1
                if value > cosine[row]:
                    cosine[row], texts[row] = value, samples.tokens[row]
        if progress is not None:
            progress(k + 1, num_candidates)
    cost.add_judge(judge)
    cost.depth = depth + 1
    return FoundTexts(texts, cosine, cosine, calls, cost)
