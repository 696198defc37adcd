"""Evaluate a model of images in both directions, beside floors and untrained controls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from mmldlm.data.store import Store
from mmldlm.evaluation import metrics
from mmldlm.evaluation.directions import likelihood_estimates, measure_likelihood
from mmldlm.evaluation.gain import untrained_control
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
from mmldlm.evaluation.sentences import Log, Sentences, batch_budget, choose_sentences
from mmldlm.evaluation.settings import GainSettings, ImageSettings
from mmldlm.evaluation.statistics import Estimate, mean, proportion
from mmldlm.inference.images import codec_of, make_images, open_image_store, use_image_size
from mmldlm.inference.options import IMAGE_STEPS, NUM_LENGTHS
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.formatting import count_noun

Arms = dict[str, dict[str, Estimate]]


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
    started, task = time.perf_counter(), pretrained.task
    settings = settings or ImageSettings()
    if settings.latent_steps is None:
        steps = IMAGE_STEPS if task.t2i_steps is None else task.t2i_steps
        settings = replace(settings, latent_steps=steps)
    if settings.vae is not None:
        pretrained.vae = settings.vae
    weights = NamedWeights(pretrained, settings.clip, settings.inception_weights, settings.seed)
    use_image_size(pretrained, data=root)
    codec = codec_of(pretrained)
    store = open_image_store(root, codec)
    sentences = choose_sentences(store, pretrained.model, settings.num_samples, settings.seed)
    images = codec.decode(sentences.latents)
    weights.set_real(images, sentences)
    groups = None if store.groups is None else np.asarray(store.groups)[sentences.rows]
    training = TrainingImages(store, codec)
    gallery = Gallery(images, group_ids(groups, images, sentences.tokens), training.mean())
    names = training.names(images, groups, sentences)
    arms: Arms = {"model": {}, "untrained": {}, "untrained_random_gates": {}}
    near_rows, near_distances = nearest(images, training.blocks())
    captions = None
    if pretrained.supports("l2t"):
        captions = measure_i2t(pretrained, pretrained.model, sentences, names, settings, log)
        arms["model"] |= captions.estimates
        arms["nearest_training_image"] = floor_estimates(sentences, names, near_rows, training)
    shown = examples(pretrained, sentences, captions)
    pictures = {"real": images}
    if pretrained.supports("t2l"):
        arms["model"] |= measure_x0(pretrained, pretrained.model, sentences, settings, log)
        if pretrained.num_ids is not None:
            blocks = training.store.latent_blocks(training.limit)
            arms["code_frequencies"] = frequency_estimates(blocks, sentences, pretrained.num_ids)
        for name, made in _make_pictures(pretrained, sentences, gallery, settings, log).items():
            arms[name] = made.estimates | copy_estimates(
                made.images, near_distances, sentences, training
            )
            arms[name] |= weights.estimates(made.images)
            pictures[
                name.replace("_", " ")
                if name == "guidance_1"
                else f"guidance {settings.guidance:g}"
            ] = made.images
    _add_controls(arms, pretrained, sentences, gallery, names, settings, log)
    conditions = _conditions(pretrained, store, sentences, gallery, settings) | {
        "seconds": round(time.perf_counter() - started, 1),
        **weights.conditions(),
        "notes": _notes(pretrained, store) + weights.notes(len(sentences)),
    }
    own = [entry.pop("row") for entry in shown]
    return ImageReport(
        conditions, arms, shown, {name: found[own] for name, found in pictures.items()}
    )


def _make_pictures(
    pretrained: Pretrained,
    sentences: Sentences,
    gallery: Gallery,
    settings: ImageSettings,
    log: Log,
) -> dict[str, Pictures]:
    """Return what was made at guidance 1 and, if a null caption was trained, at the second one."""
    scales = {"guidance_1": 1.0}
    if pretrained.condition_dropout != 0 and settings.guidance != 1:
        scales["guidance_2"] = settings.guidance
    return {
        name: measure_t2i(pretrained, pretrained.model, sentences, gallery, settings, scale, log)
        for name, scale in scales.items()
    }


def _add_controls(
    arms: Arms,
    pretrained: Pretrained,
    sentences: Sentences,
    gallery: Gallery,
    names: list[set],
    settings: ImageSettings,
    log: Log,
) -> None:
    """Measure the untrained controls on the first of the images."""
    count = min(settings.control_samples, len(sentences))
    own, first = sentences.first(count, settings.seed), gallery.first(count)
    for name, has_gates in (("untrained", False), ("untrained_random_gates", True)):
        control = untrained_control(pretrained.model, settings.seed, random_gates=has_gates)

        def say(line: str, name: str = name):
            return log(f"{name.replace('_', ' ')}: {line}")

        if pretrained.supports("l2t"):
            arms[name] |= measure_i2t(
                pretrained, control, own, names[:count], settings, say
            ).estimates
        if pretrained.supports("t2l"):
            arms[name] |= measure_x0(pretrained, control, own, settings, say)
            arms[name] |= measure_t2i(
                pretrained, control, own, first, settings, 1.0, say
            ).estimates


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
        "chance_recall_at_5": round(5 / len(np.unique(gallery.groups)), 4),
        "seed": settings.seed,
        "num_parameters": sum(parameter.numel() for parameter in pretrained.model.parameters()),
    }


Estimates = dict[str, Estimate]


@dataclass
class Captions:
    """The measurements of i2t.

    Attributes:
        estimates: Estimates by name.
        written: Token ids of the captions.
        f1: [N] set-F1 of their words.
    """

    estimates: Estimates = field(default_factory=dict)
    written: list[list[int]] = field(default_factory=list)
    f1: np.ndarray | None = None


def measure_i2t(
    pretrained: Pretrained,
    model: nn.Module,
    sentences: Sentences,
    names: Sequence[set],
    settings: ImageSettings,
    log: Log,
) -> Captions:
    """Measure NELBO and written captions.

    Args:
        names: N sets of captions, as tuples of ids, that images of equal pixels or of one group
            have.
    """
    arm, latents = replace(pretrained, model=model), torch.from_numpy(sentences.latents)
    likelihood = measure_likelihood(arm, sentences, latents, _text_settings(settings), log)
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
    return Captions(estimates, samples.tokens, metrics.token_f1(samples.tokens, sentences.tokens))


def _text_settings(settings: ImageSettings) -> GainSettings:
    return GainSettings(
        num_draws=settings.num_draws, seed=settings.seed, batch_size=settings.batch_size
    )


def caption_estimates(
    written: list[list[int]], sentences: Sentences, names: Sequence[set]
) -> Estimates:
    """Compare written captions with the right ones, and with those of other images."""
    other = [written[row] for row in sentences.shuffled_index]
    right, shuffled = (metrics.token_f1(texts, sentences.tokens) for texts in (written, other))
    lengths = np.array([len(text) for text in written]) == [len(text) for text in sentences.tokens]
    return {
        "exact": proportion(metrics.exact_match(written, sentences.tokens), "share"),
        "exact_shuffled": proportion(metrics.exact_match(other, sentences.tokens), "share"),
        "exact_up_to_pixels": proportion(_any_match(written, names), "share"),
        "exact_up_to_pixels_shuffled": proportion(_any_match(other, names), "share"),
        "f1_right": mean(right, "share"),
        "f1_shuffled": mean(shuffled, "share"),
        "f1_gap": mean(right - shuffled, "share"),
        "length_right": proportion(lengths, "share"),
    }


def _any_match(written: list[list[int]], names: Sequence[set]) -> np.ndarray:
    return np.array([tuple(text) in known for text, known in zip(written, names, strict=True)])


def floor_estimates(
    sentences: Sentences, names: Sequence[set], rows: np.ndarray, training: TrainingImages
) -> Estimates:
    """Score the caption of the nearest training image, by its row [N], instead of a
    written one.
    """
    return caption_estimates(training.captions(rows), sentences, names)


@dataclass
class Pictures:
    """The measurements of t2i at one guidance.

    Attributes:
        estimates: Estimates by name.
        images: [N, S, S, C] uint8.
    """

    estimates: Estimates
    images: np.ndarray


def measure_t2i(
    pretrained: Pretrained,
    model: nn.Module,
    sentences: Sentences,
    gallery: Gallery,
    settings: ImageSettings,
    guidance: float,
    log: Log,
) -> Pictures:
    """Make an image of every caption and compare it with the real one."""
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
    return Pictures(picture_estimates(images, sentences.shuffled_index, gallery, patch), images)


def measure_x0(
    pretrained: Pretrained,
    model: nn.Module,
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
    typical = max(float(real_distances.mean()), 1e-12)
    return {
        "copy_ratio": mean(distances / typical, "made / real"),
        "identical_copies": proportion(distances < 1e-4, "share"),
        "nearest_training_f1_gap": mean(right - shuffled, "share"),
    }


def examples(
    pretrained: Pretrained, sentences: Sentences, captions: Captions | None, count: int = 24
) -> list[dict[str, Any]]:
    """Return rows and captions of some images, spread evenly over the draw and not chosen by
    quality.
    """
    rows = np.unique(
        np.linspace(0, len(sentences) - 1, min(count, len(sentences))).astype(int)
    ).tolist()
    found: list[dict[str, Any]] = [{"row": row, "caption": sentences.texts[row]} for row in rows]
    if captions is not None and captions.f1 is not None:
        texts = pretrained.tokenizer.batch_decode(
            [captions.written[row] for row in rows], skip_special_tokens=True
        )
        for entry, text in zip(found, texts):
            entry |= {"written": text, "set_f1": round(float(captions.f1[entry["row"]]), 3)}
    return found
