"""Evaluate a model of images in both directions, beside floors and untrained controls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mmldlm.data.store import Store
from mmldlm.evaluation import metrics
from mmldlm.evaluation.directions import TextResult, likelihood_estimates, measure_likelihood
from mmldlm.evaluation.gain import untrained_controls
from mmldlm.evaluation.image_figures import (
    Gallery,
    TrainingImages,
    group_ids,
    nearest,
    picture_estimates,
)
from mmldlm.evaluation.image_likelihood import (
    bit_estimates,
    code_bits,
    frequency_estimates,
    x0_errors,
    x0_estimates,
)
from mmldlm.evaluation.image_report import ImageReport
from mmldlm.evaluation.named_weights import NamedWeights
from mmldlm.evaluation.sentences import (
    Log,
    Sentences,
    batch_budget,
    choose_sentences,
    prefixed,
    spread,
)
from mmldlm.evaluation.settings import ImageSettings
from mmldlm.evaluation.statistics import Estimate, mean, ratio
from mmldlm.evaluation.texts import written_records
from mmldlm.inference.images import codec_of, make_images, open_image_store, use_image_size
from mmldlm.inference.options import IMAGE_STEPS, NUM_LENGTHS
from mmldlm.sampling.model import Model
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.formatting import count_noun

Estimates = dict[str, Estimate]
Arms = dict[str, Estimates]


def evaluate_images(
    pretrained: Pretrained, root: str, settings: ImageSettings | None = None, log: Log = print
) -> ImageReport:
    """Measure captions of images and images of captions, for the model and for two untrained
    controls.

    Args:
        root: Store of images, of one of the model's sizes; its validation split was not used in
            training.

    Raises:
        UserError: not a store of images, or of other images than the model reads, or weights of
            another kind.
        MmldlmError: NaN predictions.
    """
    started, task, model = time.perf_counter(), pretrained.task, pretrained.model
    settings = settings or ImageSettings()
    if pretrained.condition_dropout == 0:  # guidance needs a trained null caption
        settings = replace(settings, guidance=1.0)
    if settings.latent_steps is None:
        steps = IMAGE_STEPS if task.t2i_steps is None else task.t2i_steps
        settings = replace(settings, latent_steps=steps)
    if settings.vae is not None:
        pretrained.vae = settings.vae
    weights = NamedWeights(pretrained, settings.clip, settings.inception_weights, settings.seed)
    use_image_size(pretrained, data=root)
    codec = codec_of(pretrained)
    store = open_image_store(root, codec)
    sentences = choose_sentences(store, model, settings.num_samples, settings.seed)
    images = codec.decode(sentences.latents)
    weights.set_real(images, sentences)
    groups = None if store.groups is None else np.asarray(store.groups)[sentences.rows]
    training = TrainingImages(store, codec)
    gallery = Gallery(images, group_ids(groups, images, sentences.tokens), training.mean())
    names = training.names(images, groups, sentences)
    near_rows, near_distances = nearest(images, training.blocks())
    arms: Arms = {"model": {}}
    shown = spread(len(sentences), 24)
    examples: list[dict[str, Any]] = [{"caption": sentences.texts[row]} for row in shown]
    pictures = {"real": images}
    if pretrained.supports("l2t"):
        captions = measure_i2t(pretrained, model, sentences, names, settings, log)
        arms["model"] |= captions.estimates
        arms["nearest_training_image"] = caption_estimates(
            training.captions(near_rows), sentences, names
        )
        records = written_records(pretrained, sentences, captions.written, shown)
        examples = [example | record for example, record in zip(examples, records)]
    if pretrained.supports("t2l"):
        arms["model"] |= measure_x0(pretrained, model, sentences, settings, log)
        if pretrained.num_ids is not None:
            blocks = training.store.latent_blocks(training.limit)
            arms["code_frequencies"] = frequency_estimates(blocks, sentences, pretrained.num_ids)
        scales = {"guidance_1": 1.0}
        if settings.guidance != 1:
            scales["guidance_2"] = settings.guidance
        for name, scale in scales.items():
            estimates, made = measure_t2i(
                pretrained, model, sentences, gallery, settings, scale, log
            )
            copies = copy_estimates(made, near_distances, sentences, training)
            arms[name] = estimates | copies | weights.estimates(made)
            pictures[f"guidance {scale:g}"] = made
    # A split lists similar images one after the other.
    rows = spread(len(sentences), settings.control_samples)
    few, few_images = sentences.part(rows, settings.seed), gallery.part(rows)
    for name, control in untrained_controls(model, settings.seed):
        say, arms[name] = prefixed(log, name), {}
        if pretrained.supports("l2t"):
            own_names = [names[row] for row in rows]
            own = measure_i2t(pretrained, control, few, own_names, settings, say)
            arms[name] |= own.estimates
        if pretrained.supports("t2l"):
            arms[name] |= measure_x0(pretrained, control, few, settings, say)
            arms[name] |= measure_t2i(pretrained, control, few, few_images, settings, 1.0, say)[0]
        del control  # before the next one is made: one at a time beside the model
    conditions = _conditions(pretrained, store, sentences, gallery, settings) | {
        "seconds": round(time.perf_counter() - started, 1),
        **weights.conditions,
        "notes": _notes(pretrained, store) + weights.notes(len(sentences)),
    }
    pictures = {name: found[shown] for name, found in pictures.items()}
    return ImageReport(conditions, arms, examples, pictures)


def _notes(pretrained: Pretrained, store: Store) -> list[str]:
    """Return the limits that training and data set to the measurements."""
    notes = []
    if not pretrained.supports("l2t"):
        notes.append("the model was not trained in mode i2t: captions are not evaluated")
    if not pretrained.supports("t2l"):
        notes.append("the model was not trained in mode t2i: made images are not evaluated")
    if pretrained.condition_dropout == 0:
        notes.append(
            "trained with condition_dropout=0: gain_null is not informative, and guidance is 1"
        )
    if store.groups is None:
        notes.append("the store has no groups: only images of equal pixels are hits of each other")
    if pretrained.num_ids is not None:
        found = codebook_psnr(store)
        notes.append(
            "real images are those that the codebook renders"
            + (
                ""
                if found is None
                else f": their PSNR to the original ones, {found:.1f} dB, bounds every made image"
            )
        )
    return notes


def codebook_psnr(store: Store) -> float | None:
    """Return the PSNR in dB of the validation images that codes render, as measured at
    preparation; None: unknown.
    """
    return store.manifest["image"].get("codebook_statistics", {}).get("validation", {}).get("psnr")


def _conditions(
    pretrained: Pretrained,
    store: Store,
    sentences: Sentences,
    gallery: Gallery,
    settings: ImageSettings,
) -> dict[str, Any]:
    codec = codec_of(pretrained)
    codes = {} if pretrained.num_ids is None else {"codebook_psnr": codebook_psnr(store)}
    return {
        **codes,
        "store": store.root.name,
        "num_images": len(sentences),
        "num_groups": len(np.unique(gallery.groups)),
        "num_control_images": min(settings.control_samples, len(sentences)),
        "image": (
            f"{codec.size} x {codec.size} x {codec.channels}, {codec.name}, {codec.num_latents}"
            " latents"
        ),
        "nelbo_draws": settings.num_draws,
        "caption_passes": settings.num_steps,
        "caption_lengths": NUM_LENGTHS,
        "image_steps": settings.latent_steps,
        "guidance": settings.guidance,
        "presence_penalty": settings.presence_penalty,
        "chance_recall_at_5": round(gallery.chance_recall(5), 4),
        "seed": settings.seed,
        "num_parameters": sum(parameter.numel() for parameter in pretrained.model.parameters()),
    }


def measure_i2t(
    pretrained: Pretrained,
    model: Model,
    sentences: Sentences,
    names: Sequence[set],
    settings: ImageSettings,
    log: Log,
) -> TextResult:
    """Measure NELBO and written captions.

    Args:
        names: N sets of captions, as tuples of ids, that images of equal pixels or of one group
            have.
    """
    arm, latents = replace(pretrained, model=model), torch.from_numpy(sentences.latents)
    likelihood = measure_likelihood(arm, sentences, latents, settings, log)
    progress = log(
        f"writing {count_noun(len(sentences), 'caption')} in {NUM_LENGTHS} lengths each"
    )
    samples = pretrained.task.write_texts(
        arm,
        latents,
        sampler=pretrained.task.samplers["l2t"][0],
        num_steps=settings.num_steps,
        num_lengths=NUM_LENGTHS,
        presence_penalty=settings.presence_penalty,
        seed=settings.seed,
        progress=progress,
        **batch_budget(model, settings.batch_size),
    )
    estimates = likelihood_estimates(likelihood) | caption_estimates(
        samples.tokens, sentences, names
    )
    return TextResult(estimates, samples.tokens)


def caption_estimates(
    written: list[list[int]], sentences: Sentences, names: Sequence[set]
) -> Estimates:
    """Compare written captions with the right ones, and with those of other images."""
    other = [written[row] for row in sentences.shuffled_index]
    right, shuffled = (metrics.token_f1(texts, sentences.tokens) for texts in (written, other))
    lengths = np.array([len(text) for text in written]) == [len(text) for text in sentences.tokens]

    def is_name(texts: list[list[int]]) -> np.ndarray:
        return np.array([tuple(text) in known for text, known in zip(texts, names, strict=True)])

    return {
        "exact": mean(metrics.exact_match(written, sentences.tokens), "share"),
        "exact_shuffled": mean(metrics.exact_match(other, sentences.tokens), "share"),
        "exact_up_to_pixels": mean(is_name(written), "share"),
        "exact_up_to_pixels_shuffled": mean(is_name(other), "share"),
        "f1_right": mean(right, "share"),
        "f1_shuffled": mean(shuffled, "share"),
        "f1_gap": mean(right - shuffled, "share"),
        "length_right": mean(lengths, "share"),
    }


def measure_t2i(
    pretrained: Pretrained,
    model: Model,
    sentences: Sentences,
    gallery: Gallery,
    settings: ImageSettings,
    guidance: float,
    log: Log,
) -> tuple[Estimates, np.ndarray]:
    """Make an image of every caption and compare it with the real one; return the estimates and
    the images [N, S, S, C] uint8.
    """
    arm, codec = replace(pretrained, model=model), codec_of(pretrained)
    assert settings.latent_steps is not None
    words = f"{count_noun(len(sentences), 'image')} in {count_noun(settings.latent_steps, 'step')}"
    _, images = make_images(
        arm,
        sentences.tokens,
        steps=settings.latent_steps,
        guidance=guidance,
        seed=settings.seed,
        progress=log(f"making {words}, guidance {guidance:g}"),
        **batch_budget(model, settings.batch_size),
    )
    patch = codec.patch if codec.grid is not None else None
    return picture_estimates(images, sentences.shuffled_index, gallery, patch), images


def measure_x0(
    pretrained: Pretrained,
    model: Model,
    sentences: Sentences,
    settings: ImageSettings,
    log: Log,
) -> Estimates:
    """Measure the error of the predicted clean image by noise level, with the right, no and
    another caption.

    Of a model of codes, the bits per code instead.
    """
    if pretrained.num_ids is not None:
        progress = log(
            f"bits per code of {count_noun(len(sentences), 'image')}, right / null / shuffled"
            " caption"
        )
        bits = code_bits(
            model, sentences, draws=settings.num_draws, seed=settings.seed, progress=progress
        )
        return bit_estimates(bits)
    errors = x0_errors(
        replace(pretrained, model=model),
        sentences,
        draws=settings.num_draws,
        seed=settings.seed,
        progress=log(
            f"x0 error of {count_noun(len(sentences), 'image')}, right / null / shuffled caption"
        ),
    )
    return x0_estimates(errors)


def copy_estimates(
    made: np.ndarray, real_distances: np.ndarray, sentences: Sentences, training: TrainingImages
) -> Estimates:
    """Compare made images with the nearest training images: copies are nearer to these than real
    unseen images are.

    Args:
        made: [N, S, S, C] uint8.
        real_distances: [N] of the real unseen images to their nearest training images.
    """
    rows, distances = nearest(made, training.blocks())
    known = training.captions(rows)
    right = metrics.token_f1(known, sentences.tokens)
    shuffled = metrics.token_f1([known[row] for row in sentences.shuffled_index], sentences.tokens)
    copy_ratio = {"copy_ratio": ratio(distances, real_distances, "made / real")}
    return {
        # Where all unseen images are in the training split, too, nothing can be told.
        **(copy_ratio if real_distances.any() else {}),
        "identical_copies": mean(distances == 0, "share"),
        "nearest_training_f1_gap": mean(right - shuffled, "share"),
    }
