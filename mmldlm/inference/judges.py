"""Judges of texts, and the best of several texts by a judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mmldlm.data.encoders.encoder import Encoder
from mmldlm.data.sentences import split_into_parts
from mmldlm.errors import UserError
from mmldlm.inference.inputs import encoder_identity, reason_without_encoder
from mmldlm.sampling.decoding import most_probable_lengths
from mmldlm.sampling.judge import FoundTexts, Judge, SamplingCost, cosines
from mmldlm.sampling.latents import latent_shape, sample_latents, steps_given_text
from mmldlm.sampling.model import device_of
from mmldlm.sampling.records import TextSamples, keeping_finished
from mmldlm.tasks.text_task import Pretrained, TextTask
from mmldlm.utils.counter_rng import candidate_seed

Ids = Sequence[int]


class EncoderJudge(Judge):
    """The encoder of the model's training latents itself.

    Raises:
        UserError: it is not known or not available, or its latents have another dimension than the
            model's.
    """

    name = "encoder"

    def __init__(self, pretrained: Pretrained):
        super().__init__(pretrained.tokenizer, latent_shape(pretrained.model.config))
        expected = "the encoder of the model's latents, which judges the texts of --search"
        try:
            self._encoder = Encoder.from_identity(
                encoder_identity(pretrained), device=str(device_of(pretrained.model))
            )
        except (UserError, ImportError, OSError) as error:
            fix = (
                "install that encoder, or add --judge t2l, the model's own estimate of embeddings"
            )
            raise UserError(expected, reason_without_encoder(error), fix) from error
        dims, encoder_dims = pretrained.model.config.latent_dim, self._encoder.latent_dim
        if dims != encoder_dims:
            raise UserError(
                f"an encoder of {dims} dimensions, those of the model's latents",
                f"{encoder_dims} dimensions from {self._encoder.source}",
                'correct "encoder" in the config.json of the model, or add --judge t2l',
            )

    def _embed(self, texts: Sequence[Ids]) -> np.ndarray:
        count = max(self._shape[:-1], default=1)
        # `embed` leaves out the texts that are too short for their parts.
        parts = [
            part for text in self.strings(texts) for part in split_into_parts(text, count) or ()
        ]
        lengths = self._encoder.num_tokens(parts)
        self.num_tokens += sum(lengths)
        self.flops += self._encoder.forward_flops(lengths)
        return self._encoder.encode(parts).reshape(len(texts), *self._shape)


class T2lJudge(Judge):
    """The model's own estimate of a text's embedding, where the encoder is missing: worse, and
    without other weights.

    Raises:
        UserError: the model estimates no embeddings from texts.
    """

    name = "t2l"

    def __init__(self, pretrained: Pretrained):
        super().__init__(pretrained.tokenizer, latent_shape(pretrained.model.config))
        self._pretrained = pretrained
        if not estimates_embeddings(pretrained):
            raise UserError(
                "a model that estimates embeddings from texts, for --judge t2l",
                f"task={pretrained.task.name}, trained without mode t2l",
                "omit --judge and install the encoder of the model's latents",
            )

    def _embed(self, texts: Sequence[Ids]) -> np.ndarray:
        pretrained, lengths = self._pretrained, [len(text) + 1 for text in texts]
        config, steps = pretrained.model.config, steps_given_text(pretrained.latent_diffusion)
        self.num_tokens += sum(lengths)
        # A task of masked diffusion, as all that estimate embeddings.
        task: Any = pretrained.task
        self.flops += steps * sum(task.pass_flops(config, length, 0) for length in lengths)
        return estimate_embeddings(pretrained, texts)


def estimates_embeddings(pretrained: Pretrained) -> bool:
    """Whether the model was trained to estimate embeddings from texts."""
    return "t2l" in pretrained.task.samplers and pretrained.supports("t2l")


def estimate_embeddings(
    pretrained: Pretrained, texts: Sequence[Ids], batch_tokens: int = 4096
) -> np.ndarray:
    """The model's estimates [N, D] (or [N, M, D]) fp32 of the embeddings of texts, a function of
    each text alone.

    Raises:
        MmldlmError: NaN or infinite estimates.
    """
    return sample_latents(
        pretrained.model, texts, diffusion=pretrained.latent_diffusion,
        steps=steps_given_text(pretrained.latent_diffusion), renormalize=pretrained.renormalize,
        clamp=pretrained.clamp_x0, unit=pretrained.renormalize, draw_indices=[0] * len(texts),
        batch_tokens=batch_tokens,
    ).numpy()  # fmt: skip


LENGTHS = 3
"""The most probable lengths that candidates have, of a task that fills given lengths."""
TEMPERATURES = (0.5, 0.7, 0.85, 1.0)


@dataclass(frozen=True)
class Candidate:
    """How the k-th text of every latent is written; a function of k and the task alone.

    Attributes:
        sampler: Sampler of the task.
        temperature: Temperature of the draws; None: the sampler's own.
        length_rank: Rank of the length, 0 the most probable; None: the task chooses the length.
    """

    sampler: str
    temperature: float | None = None
    length_rank: int | None = None


def candidate(task: TextTask, k: int) -> Candidate:
    """Return how the k-th candidate is written: the task's default text first, then other lengths,
    then draws.
    """
    samplers = task.samplers["l2t"]
    if k == 0:
        return Candidate(samplers[0])
    if not task.fills_lengths:
        return Candidate("ancestral", TEMPERATURES[(k - 1) % len(TEMPERATURES)])
    rank, turn = (k - 1) % LENGTHS, (k - 1) // LENGTHS
    if turn == 0:
        return Candidate(samplers[0], None, rank)
    return Candidate("ancestral", TEMPERATURES[(turn - 1) % len(TEMPERATURES)], rank)


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
        lengths: The most probable lengths of each latent, [N, LENGTHS]; None for a task that does
            not fill given lengths.
        options: Options of `TextTask.write_texts`.
    """
    plan = candidate(pretrained.task, k)
    unread = pretrained.task.unread_options("l2t", plan.sampler)
    writing = {key: value for key, value in options.items() if key not in unread}
    if plan.sampler != "ancestral":
        # The others, as they are used here, draw nothing.
        writing.pop("top_p", None)
    if plan.temperature is not None:
        writing["temperature"] = plan.temperature
        if "presence_penalty" in writing:
            # The penalty is that of greedy decoding, which repeats tokens; draws do not.
            writing["presence_penalty"] = 0.0
    if plan.length_rank is not None:
        assert lengths is not None
        writing["lengths"] = lengths[:, plan.length_rank]
    return pretrained.task.write_texts(
        pretrained, latents, sampler=plan.sampler, seed=candidate_seed(seed, k), **writing
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
    """Write several texts per latent and keep the one that the judge finds nearest; references
    are never read.

    Args:
        latents: Latents in the encoder's space. [N, D] or [N, M, D]
        judge: A judge of this call alone, so that its counts are those of this search.
        num_candidates: Texts per latent; equal ones are judged once.
        seed: Seed of the draws; a candidate depends on it, on the index of its latent and on its
            own number only.
        progress: Callback after every candidate, with those done and in total.
        options: Options of `TextTask.write_texts`, the same for all candidates.

    Raises:
        MmldlmError: NaN logits or embeddings.
    """
    task, model, count = pretrained.task, pretrained.model, len(latents)
    targets, cost = latents.cpu().numpy(), SamplingCost(count)
    lengths = most_probable_lengths(model, latents, LENGTHS)[0] if task.fills_lengths else None
    texts: list[list[int]] = [[] for _ in range(count)]
    cosine, calls, depth = np.full(count, -np.inf), np.zeros(count, dtype=np.int64), 0
    found = FoundTexts(texts, cosine, cosine, calls, cost)
    seen: list[set[str]] = [set() for _ in range(count)]
    with keeping_finished(found) as finished:
        for k in range(num_candidates):
            samples = write_candidate(pretrained, latents, k, lengths, seed, options)
            cost.add_texts(samples, task.writing_flops(model.config, samples))
            depth = max(depth, int(samples.passes.max()))
            strings = judge.strings(samples.tokens)
            fresh = [row for row in range(count) if strings[row] not in seen[row]]
            if fresh:
                embedded = judge.embed([samples.tokens[row] for row in fresh])
                for row, value in zip(fresh, cosines(embedded, targets[fresh]).tolist()):
                    seen[row].add(strings[row])
                    calls[row] += 1
                    if value > cosine[row]:
                        cosine[row], texts[row] = value, samples.tokens[row]
            if progress is not None:
                progress(k + 1, num_candidates)
        # Every text may change until the last candidate.
        finished += range(count)
    cost.add_judge(judge)
    cost.depth = depth + 1
    return found
