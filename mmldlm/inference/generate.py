"""The kinds of `mmldlm sample` for texts and embeddings: text from latents, latents from text, or
both without a condition.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from mmldlm.data.run_data import check_store_kind
from mmldlm.errors import UserError
from mmldlm.inference.inputs import (
    check_latent_shape,
    encode_texts,
    given_texts,
    read_latents,
    reason_without_encoder,
    tokenize_texts,
    unknown_tokens,
)
from mmldlm.inference.options import READERS, SampleOptions
from mmldlm.inference.search import open_judge, run_search
from mmldlm.inference.search_options import OWN_CHOICES
from mmldlm.sampling.judge import FoundTexts, cosines
from mmldlm.sampling.latents import LatentSolver, sample_latents, steps_given_text
from mmldlm.sampling.records import (
    Recorder,
    SamplingInterrupted,
    TextSamples,
    finished_part,
)
from mmldlm.sampling.settings import BY_CERTAINTY, PRESENCE_PENALTY, STRATEGY_OPTIONS
from mmldlm.sampling.strategies import STRATEGIES
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.formatting import count_noun
from mmldlm.utils.progress import ProgressBar
from mmldlm.utils.settings import flag

# Options that samplers of texts do not read.
LATENT_OPTIONS = frozenset({"method", "solver", "eta", "guidance_interval"})


@dataclass
class Samples:
    """The result of one call.

    Attributes:
        records: One JSON-ready record per sample.
        latents: Sampled latents, [N, D] or [N, M, D]; None for texts from latents.
        images: Images that were generated or read, [N, S, S, C] uint8; None for a model of texts.
        real_images: Images of a store to the captions of t2i, [N, S, S, C] uint8; None without a
            store.
        extra: Further entries of settings.json.
        num_missing: Samples that an interrupt left out (`keep`).
        is_interrupted: Whether an interrupt ended the call; then samples, or what was to be
            measured of them, may be missing.
    """

    records: list[dict[str, Any]]
    latents: np.ndarray | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    images: np.ndarray | None = None
    real_images: np.ndarray | None = None
    num_missing: int = 0
    is_interrupted: bool = False

    def keep(self, finished: list[int] | None) -> Samples:
        """Leave out the samples that an interrupt left unfinished; None: all are finished."""
        if finished is None:
            return self
        self.is_interrupted, self.num_missing = True, len(self.records) - len(finished)
        self.records = [self.records[row] for row in finished]
        if self.latents is not None:  # a latent for each sample
            self.latents = self.latents[finished]
            for i, record in enumerate(self.records):
                record["latent"] = i
        if self.images is not None:
            self.images = self.images[finished]
        if self.real_images is not None:
            self.real_images = self.real_images[finished]
        return self

    def complete(self) -> Samples:
        """Return the samples; raise the interrupt that ended the call."""
        if self.is_interrupted:
            raise KeyboardInterrupt
        return self


def sample_l2t(
    pretrained: Pretrained,
    options: SampleOptions,
    progress: ProgressBar,
    recorder: Recorder | None = None,
) -> Samples:
    """Sample texts from latents; the recorder sees every pass (a sampler that
    `records_passes`).
    """
    references, latents, num_unknown = read_l2t_input(pretrained, options, progress)
    # The `write_texts` of a task may have no argument recorder.
    more = {} if recorder is None else {"recorder": recorder}
    samples = write_from_latents(pretrained, options, references, latents, progress, **more)
    for record in samples.records if num_unknown else ():
        record["num_unknown"] = num_unknown[record["latent"]]
    return samples


def write_from_latents(
    pretrained: Pretrained,
    options: SampleOptions,
    references: list[str] | None,
    latents: np.ndarray,
    progress: ProgressBar,
    **more: Any,
) -> Samples:
    """Sample texts from latents [N, D] (or [N, M, D]), with the texts that they belong to, if
    known.

    Args:
        more: Further options of the task's `write_texts`.
    """
    pretrained.check_condition_timestep(options.condition_timestep or 0.0)
    count = options.num_samples or len(latents)
    source = np.arange(count) % len(latents)
    if count > len(latents):
        options = drawn_if_repeated(options)
    penalty = options.presence_penalty
    if penalty is None:
        is_greedy = options.sampler in BY_CERTAINTY and not options.temperature
        penalty = PRESENCE_PENALTY if is_greedy else 0.0
    options = dataclasses.replace(options, presence_penalty=penalty)
    condition, found_texts = torch.from_numpy(latents[source]), None
    if options.way is None:
        steps = "" if options.num_steps is None else f" in at most {options.num_steps} steps"
        more["progress"] = progress.start(f"writing {count_noun(count, 'text')}{steps}")
        write = partial(_write_texts, pretrained, condition, options, **more)
        samples, finished = finished_part(write)
        records, extra = _text_records(pretrained, samples.tokens), _costs(samples)
    else:
        search = partial(_search_texts, pretrained, condition, options, len(latents), progress)
        found_texts, finished = finished_part(search)
        records = _text_records(pretrained, found_texts.tokens)
        extra = {"cost_per_sample": found_texts.cost.per_text()}
    for i, (record, row) in enumerate(zip(records, source.tolist())):
        record["latent"] = row
        if references is not None:
            record["reference"] = references[row]
        if found_texts is not None:
            record["judge_cosine"] = float(found_texts.cosine[i])
            record["judge_calls"] = int(found_texts.calls[i])
    return Samples(records, None, extra if finished is None else {}).keep(finished)


def drawn_if_repeated(options: SampleOptions) -> SampleOptions:
    """Return the options of several samples of one condition, which are the same ones without
    draws.
    """
    temperature = 1.0 if options.temperature is None else options.temperature
    return dataclasses.replace(options, temperature=temperature)


def _search_texts(
    pretrained: Pretrained,
    latents: torch.Tensor,
    options: SampleOptions,
    num_latents: int,
    progress: ProgressBar,
) -> FoundTexts:
    """Search the text of each latent (--search)."""
    if len(latents) > num_latents:
        raise UserError(
            f"--num-samples of at most the {count_noun(num_latents, 'embedding')}: a search"
            " returns one text for each",
            str(len(latents)),
            "lower --num-samples, or omit --search",
        )
    judge = open_judge(options, pretrained)
    writing = {
        key: value
        for key, value in _writing_options(pretrained, options).items()
        if key not in OWN_CHOICES
    }
    message = f"{options.describe_search()}, for {count_noun(num_latents, 'embedding')}"
    return run_search(
        options,
        pretrained,
        latents,
        judge,
        seed=options.seed,
        progress=progress.start(message),
        **writing,
    )


def _writing_options(pretrained: Pretrained, options: SampleOptions) -> dict[str, Any]:
    """Return the options that the task's sampler of texts reads."""
    known = READERS.keys() & pretrained.task.sampling_options - LATENT_OPTIONS
    return {key: getattr(options, key) for key in sorted(known)}


def _write_texts(
    pretrained: Pretrained,
    latents: torch.Tensor | None,
    options: SampleOptions,
    **more: Any,
) -> TextSamples:
    """Call the task's sampler with the options that it reads."""
    writing_options = _writing_options(pretrained, options)
    return pretrained.task.write_texts(
        pretrained, latents, seed=options.seed, **writing_options, **more
    )


def read_l2t_input(
    pretrained: Pretrained, options: SampleOptions, progress: ProgressBar
) -> tuple[list[str] | None, np.ndarray, list[int]]:
    """Return the reference texts, if any, the latents, and of given texts the tokens unknown to
    the encoder.
    """
    if options.latent_file is not None:
        return None, read_latents(options.latent_file, pretrained), []
    if options.data:
        from mmldlm.data.store import Store, check_latents

        store = Store(options.data, "validation")
        ids = list(range(min(options.num_samples or len(store), len(store))))
        check_store_kind(store, "text" if pretrained.image is None else "image")
        check_latent_shape(store, pretrained.model.config)
        latents = store.get(ids).latents
        check_latents(latents, f"{options.data}/validation", zero_ok=store.kind == "image")
        return store.texts(ids), latents, []
    texts = given_texts(options.text, options.text_file)
    message = f"embedding {count_noun(len(texts), 'text')} with the encoder"
    num_unknown: list[int] = []
    return (
        texts,
        encode_texts(texts, pretrained, progress.start(message), num_unknown),
        num_unknown,
    )


def sample_t2l(pretrained: Pretrained, options: SampleOptions, progress: ProgressBar) -> Samples:
    """Sample latents from texts; compare them with the encoder's if the encoder is available."""
    samples = sample_text_latents(pretrained, options, progress)
    if samples.is_interrupted:
        return samples
    assert samples.latents is not None
    texts = [record["text"] for record in samples.records]
    try:
        found = _encoder_cosines(pretrained, texts, samples.latents, progress)
    except KeyboardInterrupt:  # the samples are finished
        samples.is_interrupted = True
        return samples
    if found is None:
        return samples
    for record, cosine in zip(samples.records, found):
        record["cosine"] = cosine
    samples.extra["mean_cosine_with_encoder"] = float(np.mean(found))
    return samples


def sample_text_latents(
    pretrained: Pretrained,
    options: SampleOptions,
    progress: ProgressBar,
    *,
    truncate: bool = False,
    **more: Any,
) -> Samples:
    """Sample latents from texts.

    Args:
        truncate: Whether to cut texts that are too long for the model; else they are refused.
        more: Further options of `sample_latents`.
    """
    steps = options.num_steps or steps_given_text(pretrained.latent_diffusion)
    method, eta, guidance = options.method, options.eta, options.guidance
    assert method is not None and eta is not None and guidance is not None
    # The solver refuses what it does not have.
    LatentSolver(pretrained.latent_diffusion, steps, method, eta)
    if steps == 1 and (eta != 0 or method != "ddim"):
        raise UserError(
            "--num-steps of at least 2 with --eta or another --method than ddim",
            "1 step (the default given a text), which all methods take alike",
            "add --num-steps 10, or omit these options",
        )
    texts = given_texts(options.text, options.text_file)
    ids = tokenize_texts(texts, pretrained, truncate)
    unknown = unknown_tokens(texts, ids, pretrained)
    message = f"embedding {count_noun(len(texts), 'text')} in {count_noun(steps, 'step')}"
    call = partial(
        sample_latents,
        pretrained.model,
        ids,
        diffusion=pretrained.latent_diffusion,
        steps=steps,
        method=method,
        eta=eta,
        guidance=guidance,
        guidance_interval=options.guidance_interval,
        renormalize=pretrained.renormalize,
        clamp=pretrained.clamp_x0,
        unit=pretrained.renormalize,
        seed=options.seed,
        progress=progress.start(message),
        **more,
    )
    latents, finished = finished_part(call)
    records: list[dict[str, Any]] = [
        {
            "index": i,
            "text": text,
            "num_tokens": len(ids[i]),
            "num_unknown": unknown[i],
            "latent": i,
            "norm": norm,
        }
        for i, (text, norm) in enumerate(zip(texts, latents.norm(dim=-1).tolist()))
    ]
    extra = {"num_steps": steps}
    return Samples(records, latents.numpy(), extra).keep(finished)


def _encoder_cosines(
    pretrained: Pretrained, texts: list[str], sampled: np.ndarray, progress: ProgressBar
) -> list[float] | None:
    """Return the cosine of each sampled latent with the encoder's (the mean over a text's
    latents).

    None without the encoder: the samples are valid without this comparison.
    """
    try:
        message = f"embedding {count_noun(len(texts), 'text')} with the encoder, to compare"
        encoded = encode_texts(texts, pretrained, progress.start(message))
    except (UserError, ImportError, OSError) as error:
        print(
            f"no cosine with the encoder's embedding: {reason_without_encoder(error)}",
            file=sys.stderr,
        )
        return None
    return cosines(sampled, encoded).tolist()


def sample_unconditional(
    pretrained: Pretrained,
    options: SampleOptions,
    progress: ProgressBar,
    recorder: Recorder | None = None,
) -> Samples:
    """Sample pairs of text and latent; of a task that predicts no latents, texts alone.

    The recorder as in l2t.
    """
    if pretrained.latent_config is None:
        message = f"writing {count_noun(options.num_samples or 0, 'text')}"
        if options.sampler in BY_CERTAINTY:
            options = drawn_if_repeated(options)
        call = partial(
            _write_texts,
            pretrained,
            None,
            options,
            num_samples=options.num_samples,
            progress=progress.start(message),
            **({} if recorder is None else {"recorder": recorder}),
        )
        samples, finished = finished_part(call)
        records, extra = _text_records(pretrained, samples.tokens), _costs(samples)
        return Samples(records, None, extra if finished is None else {}).keep(finished)
    method = choose_method(pretrained, options.method)
    if method == "joint" and (options.condition_timestep or 0) > 0:
        fix = "omit it, or add --method chain"
        raise UserError(
            "--condition-timestep with --method chain", "method joint, which has no condition", fix
        )
    pretrained.check_condition_timestep(options.condition_timestep or 0.0)
    sample = _sample_together if method == "joint" else _sample_chain
    (samples, latents), finished = finished_part(
        partial(sample, pretrained, options, progress, recorder)
    )
    records = _text_records(pretrained, samples.tokens)
    for i, record in enumerate(records):
        record.update(latent=i, way=method)
    extra = {"way": method, **(_costs(samples) if finished is None else {})}
    return Samples(records, latents.numpy(), extra).keep(finished)


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


def _sample_together(
    pretrained: Pretrained,
    options: SampleOptions,
    progress: ProgressBar,
    recorder: Recorder | None,
) -> tuple[TextSamples, torch.Tensor]:
    count, steps = options.num_samples, options.num_steps
    assert options.sampler is not None
    reads = STRATEGIES[options.sampler].option_names()
    strategy_options = [
        key for key in STRATEGY_OPTIONS - {"num_steps"} if getattr(options, key) is not None
    ]
    if "num_steps" not in reads or strategy_options:
        description = ", ".join([f"--sampler {options.sampler}", *map(flag, strategy_options)])
        expected = (
            "a sampler by --num-steps alone with method joint, in which text and embedding share"
            " the steps"
        )
        raise UserError(expected, description, "add --method chain, or choose another --sampler")
    latents = "embeddings" if pretrained.image is None else "images"
    # A task that predicts latents, and so has `draw_pairs`.
    task: Any = pretrained.task
    return task.draw_pairs(
        pretrained,
        count,
        steps=steps,
        sampler=options.sampler,
        temperature=options.temperature,
        top_p=options.top_p,
        solver=options.solver,
        seed=options.seed,
        progress=progress.start(f"sampling {count} texts and {latents} together in {steps} steps"),
        recorder=recorder,
    )


def _sample_chain(
    pretrained: Pretrained,
    options: SampleOptions,
    progress: ProgressBar,
    recorder: Recorder | None,
) -> tuple[TextSamples, torch.Tensor]:
    count, steps = options.num_samples, options.num_steps
    what = "embeddings" if pretrained.image is None else "images"
    # A task that predicts latents, and so has `draw_latents`.
    task: Any = pretrained.task
    call = partial(
        task.draw_latents,
        pretrained,
        count,
        steps=steps,
        solver=options.solver,
        seed=options.seed,
        progress=progress.start(f"sampling {count} {what} in {steps} steps"),
    )
    latents, drawn = finished_part(call)
    if drawn is not None:  # none of them has its text
        raise KeyboardInterrupt
    assert options.sampler is not None
    if "num_steps" not in STRATEGIES[options.sampler].option_names():
        options = dataclasses.replace(options, num_steps=None)
    more: dict[str, Any] = {} if recorder is None else {"recorder": recorder}
    more["progress"] = progress.start("writing their texts")
    samples, written = finished_part(partial(_write_texts, pretrained, latents, options, **more))
    if written is not None:
        raise SamplingInterrupted(written, (samples, latents))
    return samples, latents


def start_trace(pretrained: Pretrained, sampler: str) -> Recorder:
    """Return the recorder of --trace.

    Raises:
        UserError: the sampler does not show its passes.
    """
    task = pretrained.task
    if not task.records_passes(sampler):
        known = dict.fromkeys(
            name for names in task.samplers.values() for name in names if task.records_passes(name)
        )
        raise UserError(
            "--trace with a sampler that shows its passes",
            f"--sampler {sampler} of task={task.name}",
            f"add --sampler {' or '.join(known)}" if known else "omit --trace",
        )
    return Recorder(pretrained.model.config.mask_token_id)


def _costs(samples: TextSamples) -> dict[str, Any]:
    """Return what the texts cost: rows of the model per text, and passes one after the other."""
    passes = samples.passes.double()
    return {
        "forward_passes_per_sample": samples.num_rows / len(samples.tokens),
        "passes": {"mean": float(passes.mean()), "maximum": int(passes.max())},
    }


def _text_records(pretrained: Pretrained, tokens: list[list[int]]) -> list[dict[str, Any]]:
    texts = pretrained.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return [
        {"index": i, "text": text, "num_tokens": len(ids)}
        for i, (text, ids) in enumerate(zip(texts, tokens))
    ]
