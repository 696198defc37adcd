"""The options of `mmldlm sample`, each declared once, without torch.

`SampleOptions` says of every option its type, bounds and help, which kinds of samples read it, and
its default in each. The command line, the checks, settings.json and a call from Python
(`inference.sample.sample`) follow.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from mmldlm.errors import UserError
from mmldlm.inference.search_options import SearchOptions
from mmldlm.sampling.settings import (
    ETAS,
    MASKED_SAMPLERS,
    MAX_TRACED_TEXTS,
    SOLVERS,
    BeamSettings,
    CertaintySettings,
    DrawSettings,
    StepSettings,
    ThresholdSettings,
)
from mmldlm.utils import option_types
from mmldlm.utils.settings import (
    Option,
    OptionGroups,
    Settings,
    flag,
    flags,
    option,
    options_of,
    same_option,
)

if TYPE_CHECKING:
    import numpy as np

IMAGE_STEPS = 20
"""Default number of denoising steps of an image.

One, which is enough for an embedding, gives a blur.
"""
IMAGE_GUIDANCE = 2.0
NUM_LENGTHS = 3
"""Number of lengths in which a caption is written: the model reads the length from the mean patch
alone.
"""

KINDS = {
    "l2t": "text from embeddings",
    "t2l": "embeddings from text",
    "unconditional": "text and embeddings without a condition",
    "t2i": "images from captions",
    "i2t": "captions from images",
    "joint": "images and captions without a condition",
}
IMAGE_KINDS = {"t2i": "t2l", "i2t": "l2t", "joint": "unconditional"}
"""Kind of samples of a model of images -> the kind whose model and samplers it shares."""
SOURCES = {
    "l2t": ("latent_file", "text", "text_file", "data"),
    "t2l": ("text", "text_file"),
    "unconditional": (),
    "i2t": ("image", "latent_file", "data"),
    "t2i": ("text", "text_file", "data"),
    "joint": (),
}
"""Kind of samples -> the options of which exactly one is given."""
JOINT_METHODS = ("joint", "chain")
METHODS = {"t2l": SOLVERS, "t2i": SOLVERS, "unconditional": JOINT_METHODS, "joint": JOINT_METHODS}
"""Kind of samples -> values of --method."""
# Titles of the groups of --help, beside those of samplers (`sampling/settings.py`).
OF_SOURCES = "sources, of which one is named"
OF_LATENTS = "guidance and solvers"
OF_IMAGES = "models of images"
_SEED = Option("seed of every draw", int, 0, option_types.MAX_SEED)
_ETA = Option("noise of DDIM as a number", float, 0, 1)


def eta_value(word: str) -> float | str:
    """Return the value of --eta: a number from 0 to 1, or one of ETAS."""
    return word if word in ETAS else option_types.number(0, 1)(word)


def _read_by(reads: Mapping[str, Any], of_texts: bool = False) -> dict[str, Any]:
    """Return the metadata of a field: the kinds that read it, with its default in each.

    A kind of images reads what the kind of texts reads whose model it shares.

    Args:
        of_texts: Captions of images do not read it: it needs an encoder of texts.
    """
    reads = dict(reads)
    for word, kind in IMAGE_KINDS.items():
        if kind in reads and not (of_texts and word == "i2t"):
            reads.setdefault(word, reads[kind])
    return {"reads": reads}


def _of_kinds(
    help: str,
    number: type | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    reads: Mapping[str, Any],
    default: Any = None,
    of_texts: bool = False,
    by_task: bool = False,
    group: str | None = None,
    **arguments: Any,
) -> Any:
    """Return an option of some kinds of samples.

    Args:
        default: Where no kind is named, of an option that l2t does not read.
        reads, of_texts: See `_read_by`.
        by_task: Whether the task of a checkpoint may lack the option.
        help, number, low, high, group, arguments: See `option`.
    """
    metadata = {**_read_by(reads, of_texts), "by_task": by_task}
    default = reads.get("l2t", default)
    return option(default, help, number, low, high, metadata, group, **arguments)


def _of_sampler(settings: type, key: str, **reads: Any) -> Any:
    """Return an option that is declared in the settings of a sampler.

    Args:
        reads: Kind of samples -> default of `mmldlm sample`; None: the sampler's own.
    """
    return same_option(settings, key, reads.get("l2t"), {**_read_by(reads), "by_task": True})


@dataclass(frozen=True)
class _SamplerOptions(Settings):
    """Inputs, and options of the samplers.

    A call from Python may give an array as `latent_file`, and pictures (PIL or uint8 [H, W] or
    [H, W, C]) among the files of `image`.

    `by_task`: the task of a checkpoint may lack the option (`TextTask.sampling_options`).
    """

    image: list[Any] | None = _of_kinds(
        "images, read as `mmldlm prepare` reads them",
        group=OF_SOURCES,
        reads={"i2t": None},
        type=option_types.path,
        nargs="+",
        metavar="FILE",
    )
    vae: str | None = _of_kinds(
        "of images as vae:NAME: folder of the autoencoder (default: as prepared)",
        group=OF_IMAGES,
        reads={"t2i": None, "i2t": None, "joint": None},
        type=option_types.path,
        metavar="FOLDER",
    )
    image_size: int | None = _of_kinds(
        "side of the images, of a model of several sizes (default: that of --data, else the"
        " largest)",
        int,
        1,
        group=OF_IMAGES,
        reads={"t2i": None, "i2t": None, "joint": None},
        metavar="PIXELS",
    )
    latent_file: str | np.ndarray | None = _of_kinds(
        "embeddings [D] or [N, D] in the encoder's space",
        group=OF_SOURCES,
        reads={"l2t": None},
        type=option_types.path,
        metavar="X.npy",
    )
    data: str | None = _of_kinds(
        "validation samples of a store: embeddings, images, or (t2i) captions",
        group=OF_SOURCES,
        reads={"l2t": None, "t2i": None},
        type=option_types.path,
        metavar="STORE",
    )
    text: list[str] | None = _of_kinds(
        "texts (l2t: embedded with the encoder of the training data)",
        group=OF_SOURCES,
        reads={"l2t": None, "t2l": None},
        of_texts=True,
        nargs="+",
        metavar="TEXT",
    )
    text_file: str | None = _of_kinds(
        "texts, one per line",
        group=OF_SOURCES,
        reads={"l2t": None, "t2l": None},
        of_texts=True,
        type=option_types.path,
        metavar="FILE",
    )
    num_samples: int | None = _of_kinds(
        "number of samples (l2t: default one per embedding; i2t, t2i: one per image, caption)",
        int,
        1,
        1 << 24,
        reads={"l2t": None, "unconditional": 10, "t2i": None},
        metavar="N",
    )
    num_steps: int | None = _of_sampler(
        StepSettings, "num_steps", l2t=64, t2l=None, unconditional=64, t2i=IMAGE_STEPS
    )
    sampler: str | None = _of_kinds(
        f"text sampler; of masked diffusion {' or '.join(MASKED_SAMPLERS)} (default: l2t"
        " confidence, unconditional ancestral); a name that the model's task lacks is refused with"
        " those that it has",
        reads={"l2t": None, "unconditional": None, "t2i": None},
        by_task=True,
    )
    temperature: float | None = _of_sampler(
        DrawSettings, "temperature", l2t=None, unconditional=None, t2i=None
    )
    top_p: float | None = _of_sampler(DrawSettings, "top_p", l2t=1.0, unconditional=1.0, t2i=1.0)
    guidance: float | None = _of_kinds(
        "scale of classifier-free guidance, 1: none",
        float,
        group=OF_LATENTS,
        reads={"l2t": 1.0, "t2l": 1.0, "t2i": IMAGE_GUIDANCE},
        by_task=True,
    )
    guidance_interval: list[float] | None = _of_kinds(
        "guide only at timesteps (1 noise, 0 data) from LOW to HIGH (default: at all)",
        float,
        group=OF_LATENTS,
        reads={"t2l": None, "t2i": None},
        by_task=True,
        nargs=2,
        metavar=("LOW", "HIGH"),
    )
    presence_penalty: float | None = _of_sampler(
        DrawSettings, "presence_penalty", l2t=None, i2t=0.0
    )
    spacing: float | None = _of_sampler(CertaintySettings, "spacing", l2t=None, unconditional=None)
    distinct: bool | None = _of_sampler(
        CertaintySettings, "distinct", l2t=None, unconditional=None
    )
    threshold: float | None = _of_sampler(
        ThresholdSettings, "threshold", l2t=None, unconditional=None
    )
    num_beams: int | None = _of_sampler(BeamSettings, "num_beams", l2t=None, unconditional=None)
    method: str | None = _of_kinds(
        "t2l: solver, ddim, dpm++2m, or heun for a rectified-flow model; unconditional: joint or"
        " chain (default: what the model was trained for)",
        group=OF_LATENTS,
        reads={"t2l": "ddim", "unconditional": None},
        by_task=True,
    )
    solver: str | None = _of_kinds(
        "solver of the embeddings",
        group=OF_LATENTS,
        reads={"unconditional": "ddim"},
        by_task=True,
        choices=("ddim", "dpm++2m"),
    )
    condition_timestep: float | None = _of_kinds(
        "noise the embedding to this timestep for the text, for embeddings that no encoder made (a"
        " model of training.l2t_condition_noise; unconditional: --method chain)",
        float,
        0,
        1,
        group=OF_LATENTS,
        reads={"l2t": 0.0, "unconditional": 0.0},
        by_task=True,
        metavar="T",
    )
    eta: float | str | None = _of_kinds(
        "noise of DDIM: 0 none, 1 ancestral, bridge that of a model of schedule=decoupled",
        group=OF_LATENTS,
        default=0.0,
        reads={"t2l": 0.0},
        by_task=True,
        type=eta_value,
        metavar="ETA",
    )
    trace: str | None = _of_kinds(
        f"also write a page that plays, pass by pass, how the first {MAX_TRACED_TEXTS} texts were"
        " written",
        reads={"l2t": None, "unconditional": None},
        type=option_types.path,
        metavar="FILE.html",
    )


@dataclass(frozen=True)
class SampleOptions(SearchOptions, _SamplerOptions):
    """Options of `mmldlm sample`, as in its --help; None where the kind does not use one.

    Raises:
        UserError: A number out of range, or options of a search that do not fit together.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _SEED.check("seed", self.seed)
        if self.eta not in ETAS:
            _ETA.check("eta", self.eta)

    @classmethod
    def resolve(cls, kind: str, given: Mapping[str, Any], seed: int = 0) -> SampleOptions:
        """Return the options of a kind of samples, with its defaults for those that are not given.

        Raises:
            UserError: an option that this kind does not read, not exactly one source, or a value
                out of range.
        """
        check_read(kind, given)
        if sources := SOURCES[kind]:
            named = [key for key in sources if key in given]
            if len(named) != 1:
                raise UserError(
                    f"exactly one of {' or '.join(map(flag, sources))}",
                    flags(named) or "none of them",
                    "name one source of input",
                )
        method = given.get("method")
        if method is not None and method not in METHODS[kind]:
            expected = f"--method {' or '.join(METHODS[kind])} for `sample {kind}`"
            raise UserError(expected, method, "choose one of them")
        return cls(**defaults_of(kind) | dict(given), seed=seed)


READERS: dict[str, dict[str, Any]] = {
    field.name: field.metadata.get("reads", {"l2t": None})
    for field in fields(SampleOptions)
    if field.name in options_of(SampleOptions)
}
"""Option -> the kinds that read it, with its default in each."""
TASK_OPTIONS = tuple(
    field.name for field in fields(SampleOptions) if field.metadata.get("by_task")
)
"""Options that a task may lack, also in a kind that it has (`TextTask.sampling_options`)."""


def defaults_of(kind: str) -> dict[str, Any]:
    """Return the default of every option in a kind of samples; None where it is not read."""
    return {key: reads.get(kind) for key, reads in READERS.items()}


def check_read(kind: str, given: Collection[str]) -> None:
    """Raise a UserError for options that a kind of samples does not read."""
    if unread := [key for key in given if kind not in READERS.get(key, ())]:
        known = flags(key for key, reads in READERS.items() if kind in reads)
        raise UserError(f"options of `sample {kind}`: {known}", flags(unread), "omit them")


def add_sample_options(parser: argparse.ArgumentParser, kind: str | None) -> None:
    """Add the options of one kind of samples, or of all; without a value they are None."""
    groups = OptionGroups(parser)
    for key, one in options_of(SampleOptions).items():
        arguments, reads = one.parser_arguments(), READERS[key]
        if kind is None:
            values = ", ".join(
                f"{name} {value}" for name, value in reads.items() if value is not None
            )
            readers = "" if len(reads) == len(KINDS) else f"{', '.join(reads)}: "
            arguments["help"] = readers + one.help + (f" (default: {values})" if values else "")
        elif kind not in reads:
            continue
        elif reads[kind] is not None:
            arguments["help"] += f" (default {reads[kind]})"
        if key == "method" and kind in METHODS:
            arguments["choices"] = METHODS[kind]
        groups[one.group].add_argument(flag(key), **arguments)
