"""Evaluate a model of images in both directions, beside floors and untrained controls."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mmldlm.data.store import Store
from mmldlm.evaluation.conditioning_gain import untrained_control
from mmldlm.evaluation.images.code_bits import frequency_estimates
from mmldlm.evaluation.images.directions import (
    Pictures,
    copy_estimates,
    examples,
    floor_estimates,
    measure_i2t,
    measure_t2i,
    measure_x0,
)
from mmldlm.evaluation.images.figures import Gallery, group_ids, nearest
from mmldlm.evaluation.images.named_weights import NamedWeights
from mmldlm.evaluation.images.report import ImageReport
from mmldlm.evaluation.images.settings import ImageSettings
from mmldlm.evaluation.images.training_images import TrainingImages
from mmldlm.evaluation.sentences import Sentences, choose_sentences
from mmldlm.evaluation.statistics import Estimate
from mmldlm.evaluation.suite import Log
from mmldlm.sampling.image_sizes import use_image_size
from mmldlm.sampling.images import codec_of, open_image_store
from mmldlm.sampling.pretrained import Pretrained

Arms = dict[str, dict[str, Estimate]]


def evaluate_images(
    pretrained: Pretrained, root: str, settings: ImageSettings | None = None, log: Log = print
) -> ImageReport:
    """Measure captions of images and images of captions, for the model and for two untrained
    controls.

    Args:
        root: a store of images, of one of the model's sizes; its validation split was not used in
            training.

    Raises:
        UserError: not a store of images, or of other images than the model reads, or weights of
            another kind.
        MmldlmError: NaN predictions.
    """
    settings, started = (
        (settings or ImageSettings()).fitted(pretrained.task),
        time.perf_counter(),
    )
    weights = NamedWeights(settings, pretrained)
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
        "caption_lengths": settings.num_lengths,
        "image_steps": settings.latent_steps,
        "guidance": settings.guidance,
        "presence_penalty": settings.presence_penalty,
        "chance_recall_at_5": round(5 / len(np.unique(gallery.groups)), 4),
        "seed": settings.seed,
        "num_parameters": sum(parameter.numel() for parameter in pretrained.model.parameters()),
    }
