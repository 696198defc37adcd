"""Measure a model of images in each direction: captions from images (i2t) and images from captions
(t2i).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from mmldlm.evaluation.directions import Settings as TextSettings
from mmldlm.evaluation.directions import likelihood_estimates, measure_likelihood
from mmldlm.evaluation.images.code_bits import bit_estimates, code_bits
from mmldlm.evaluation.images.figures import Gallery, nearest, picture_estimates
from mmldlm.evaluation.images.settings import ImageSettings
from mmldlm.evaluation.images.training_images import TrainingImages
from mmldlm.evaluation.images.x0_error import x0_errors, x0_estimates
from mmldlm.evaluation.metrics import text_overlap
from mmldlm.evaluation.sentences import Sentences
from mmldlm.evaluation.statistics import Estimate, mean, proportion
from mmldlm.evaluation.suite import Log, batch_budget
from mmldlm.sampling.images import codec_of, make_images
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.utils.formatting import count_noun

Estimates = dict[str, Estimate]


@dataclass
class Captions:
    """The measurements of i2t.

    Attributes:
        estimates: by name.
        written: ids of the captions.
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
        f"writing {count_noun(len(sentences), 'caption')} in {settings.num_lengths} lengths each"
    )
    samples = pretrained.task.write_texts(
        arm,
        latents,
        sampler=pretrained.task.samplers["l2t"][0],
        num_steps=settings.num_steps,
        num_lengths=settings.num_lengths,
        presence_penalty=settings.presence_penalty,
        seed=settings.seed,
        progress=progress,
        **batch_budget(model, settings.batch_size),
    )
    estimates = likelihood_estimates(likelihood) | caption_estimates(
        samples.tokens, sentences, names
    )
    return Captions(
        estimates, samples.tokens, text_overlap.token_f1(samples.tokens, sentences.tokens)
    )


def _text_settings(settings: ImageSettings) -> TextSettings:
    return TextSettings(
        num_draws=settings.num_draws, seed=settings.seed, batch_size=settings.batch_size
    )


def caption_estimates(
    written: list[list[int]], sentences: Sentences, names: Sequence[set]
) -> Estimates:
    """Compare written captions with the right ones, and with those of other images."""
    other = [written[row] for row in sentences.shuffled_index]
    right, shuffled = (
        text_overlap.token_f1(texts, sentences.tokens) for texts in (written, other)
    )
    lengths = np.array([len(text) for text in written]) == [len(text) for text in sentences.tokens]
    return {
        "exact": proportion(text_overlap.exact_match(written, sentences.tokens), "share"),
        "exact_shuffled": proportion(text_overlap.exact_match(other, sentences.tokens), "share"),
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
        estimates: by name.
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
    right = text_overlap.token_f1(known, sentences.tokens)
    shuffled = text_overlap.token_f1(
        [known[row] for row in sentences.shuffled_index], sentences.tokens
    )
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
