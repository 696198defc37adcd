"""What `mmldlm evaluate` may be told: one settings class per suite, without torch.

A class has the options that its suite reads, with their defaults there; `--help`, the error for an
option that a suite does not read, and a call from Python follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mmldlm.inference.options import (
    IMAGE_GUIDANCE,
    IMAGE_STEPS,
    OF_IMAGES,
    SampleOptions,
)
from mmldlm.inference.search_options import SearchOptions
from mmldlm.sampling.settings import PRESENCE_PENALTY
from mmldlm.utils import option_types
from mmldlm.utils.settings import Settings, option, options_of, same_option

# Titles of the groups of --help.
OF_SAMPLERS = "samplers"
OF_EXTENT = "extent of the measurements"


@dataclass(frozen=True)
class _TextOptions(Settings):
    """Extent of the measurements of texts, and options of the samplers."""

    num_samples: int | None = option(
        None, "number of unseen sentences (default 1000, or all)", int, low=2, metavar="N"
    )
    num_steps: int | None = option(
        SampleOptions.num_steps,
        "most steps of l2t (default 64, as in mmldlm sample; images: 8)",
        int,
        low=1,
        group=OF_SAMPLERS,
    )
    sampler: str | None = option(
        None,
        "sampler of l2t, by its own settings (default: the task's first)",
        metavar="NAME",
        group=OF_SAMPLERS,
    )
    latent_steps: int | None = option(
        None,
        f"steps of t2l (default 1, or 10 for prediction epsilon; images: {IMAGE_STEPS}, of codes"
        " 12)",
        int,
        low=1,
        group=OF_SAMPLERS,
    )
    num_draws: int = option(
        2,
        "timesteps per text in the NELBO (default 2; images: 4)",
        int,
        low=1,
        group=OF_EXTENT,
    )
    control_samples: int = option(
        100,
        "sentences of the untrained controls (default 100)",
        int,
        low=2,
        group=OF_EXTENT,
    )
    guidance: float = option(
        1.0,
        "classifier-free guidance of both samplers (default 1: none); of images the scale measured"
        f" beside 1 (default {IMAGE_GUIDANCE:g})",
        float,
        group=OF_SAMPLERS,
    )
    presence_penalty: float = option(
        PRESENCE_PENALTY,
        "penalty of l2t on repeated tokens (default 1; images: 0)",
        float,
        group=OF_SAMPLERS,
    )


@dataclass(frozen=True)
class GainSettings(SearchOptions, _TextOptions):
    """Settings of the suite `conditioning_gain` for a model of texts.

    Attributes:
        num_samples: Unseen sentences; None is 1,000, or all if there are fewer.
        num_steps: Steps of l2t, as many as `mmldlm sample` takes; None for a task that takes no
            number of steps.
        sampler: Of l2t; None: the task's first.
        latent_steps: Denoising steps of t2l; None: `steps_given_text`.
        num_draws: Timesteps per sentence in the NELBO.
        control_samples: Number of the sentences that the two untrained controls use.
        guidance: Classifier-free guidance of both samplers.
        presence_penalty: Of l2t (see `sample_text`).
        seed: Of every draw.
        batch_size: Texts of full length per pass; None: the default token budget of each
            measurement.
    """

    batch_size: int | None = option(
        None,
        "texts of full length per pass (default: some thousand tokens)",
        int,
        low=1,
        metavar="N",
        group=OF_EXTENT,
    )
    seed: int = option(0, "seed of every draw (default 0)", type=option_types.seed)


@dataclass(frozen=True)
class ImageSettings(Settings):
    """Settings of the suite `conditioning_gain` for a model of images.

    Attributes:
        num_samples: Unseen images; None is 1,000, or all if there are fewer.
        num_steps: Passes that write a caption.
        latent_steps: Denoising steps of an image; None: 20, of codes 12.
        num_draws: Timesteps per caption in the NELBO, and draws of noise or masks per image.
        control_samples: Number of the images that the untrained controls use.
        guidance: The second scale of classifier-free guidance of images; the first is 1.
        presence_penalty: Of captions (see `sample_text`).
        seed: Of every draw.
        batch_size: Captions of full length per pass; None: the default of each measurement.
        clip: Folder of a CLIPModel that scores made images; None: no CLIP score.
        inception_weights: TorchScript file of the features of FID and KID; None: neither.
        vae: Folder of the autoencoder of the images; None: as prepared.
    """

    num_samples: int | None = same_option(GainSettings, "num_samples", None)
    num_steps: int = same_option(GainSettings, "num_steps", 8)
    latent_steps: int | None = same_option(GainSettings, "latent_steps", None)
    num_draws: int = same_option(GainSettings, "num_draws", 4)
    control_samples: int = same_option(GainSettings, "control_samples", 100)
    guidance: float = same_option(GainSettings, "guidance", IMAGE_GUIDANCE)
    presence_penalty: float = same_option(GainSettings, "presence_penalty", 0.0)
    seed: int = same_option(GainSettings, "seed", 0)
    batch_size: int | None = same_option(GainSettings, "batch_size", None)
    clip: str | None = option(
        None,
        "of images: also the CLIP score by this local CLIPModel with its processor",
        type=option_types.path,
        metavar="FOLDER",
        group=OF_IMAGES,
    )
    inception_weights: str | None = option(
        None,
        "of images: also FID and KID by this TorchScript feature network",
        type=option_types.path,
        metavar="FILE",
        group=OF_IMAGES,
    )
    vae: str | None = same_option(SampleOptions, "vae", None)


@dataclass(frozen=True)
class StsSettings(Settings):
    """Settings of the suite `stsb`.

    Attributes:
        latent_steps: Denoising steps of t2l; None: `steps_given_text`.
        guidance: Classifier-free guidance.
        seed: Of every draw.
        batch_size: Texts of full length per pass; None: the default token budget.
    """

    latent_steps: int | None = same_option(GainSettings, "latent_steps", None)
    guidance: float = same_option(GainSettings, "guidance", 1.0)
    seed: int = same_option(GainSettings, "seed", 0)
    batch_size: int | None = same_option(GainSettings, "batch_size", None)


SUITE_SETTINGS = (GainSettings, ImageSettings, StsSettings)
# Extents, which every suite accepts, though stsb reads a whole file.
_ANY = ("num_samples", "control_samples")


def unread_options(settings: type[Settings], given: Iterable[str]) -> list[str]:
    """Return the given options of other suites that a suite does not read."""
    return [key for key in given if key not in options_of(settings) and key not in _ANY]
