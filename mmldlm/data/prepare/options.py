"""The options of a preparation, of texts or of images, and their form in the manifest."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mmldlm.data.codebook import FSQ_LEVELS, MAX_CODES
from mmldlm.data.corpora.image_lists import DRAWN, EMOJI, GLYPHS
from mmldlm.data.corpora.tables import TABLES
from mmldlm.data.corpora.tar_shards import is_pattern
from mmldlm.data.corpora.text_corpus import DEFAULT_CORPUS
from mmldlm.data.corpora.text_files import kind_of
from mmldlm.data.encoders.model_files import VaeFiles, find_vae
from mmldlm.data.writers import LAYOUTS, MAX_IMAGE_SIZE, MAX_LATENTS
from mmldlm.errors import UserError
from mmldlm.utils import option_types
from mmldlm.utils.paths import output_root, without_folders

OVERLONG = ("drop", "truncate", "chunk")
# Largest number of values of an image for pca: the covariance has one row per value and is
# decomposed as a whole.
MAX_PCA_VALUES = 4096
# Options that affect how the work is done, or whether there is a result, but not the result.
_RUN_ONLY_OPTIONS = (
    "output_dir",
    "force",
    "cache_dir",
    "retries",
    "compile",
    "max_quarantined",
)
# Options that affect how the work is done, where files lie, or whether there is a result, but not
# the result.
_RUN_ONLY_IMAGE_OPTIONS = (
    "output_dir",
    "force",
    "cache_dir",
    "data_root",
    "font",
    "max_quarantined",
    "batch_size",
)
_VAE = "vae:"
DEFAULT_CODES = 512
NUMBERS: dict[str, Callable[[str], float]] = {
    "seed": option_types.seed,
    **dict.fromkeys(
        (
            "max_samples",
            "validation_samples",
            "max_documents",
            "min_tokens",
            "max_tokens",
            "vocab_size",
            "batch_tokens",
            "batch_size",
            "latent_dim",
            "latents_per_text",
            "max_length",
            "patch_size",
            "faces",
        ),
        option_types.count,
    ),
    "retries": option_types.size,
    "max_quarantined": option_types.number(0, 1),
    "image_size": option_types.integer(1, MAX_IMAGE_SIZE),
    "white": option_types.integer(1, 65_535),
}
"""Types of the options that are numbers, on the command line and in a call from Python."""


@dataclass
class PrepareOptions:
    """The options of `mmldlm prepare`; each field is the option of the same name."""

    output_dir: str
    corpus: str = DEFAULT_CORPUS
    validation_corpus: str | None = None
    encoder: str = "minilm"
    tokenizer: str = "minilm"
    cache_dir: str | None = None
    vocab_size: int = 8192
    add_mask_token: bool = False
    text_field: str | None = None
    max_samples: int | None = None
    validation_samples: int | None = None
    min_tokens: int = 3
    max_tokens: int = 62
    overlong: str | None = None
    keep_duplicates: bool = False
    batch_tokens: int | None = None
    seed: int = 0
    force: bool = False
    datasets: list[str] | None = None
    sentences: bool = False
    max_documents: int | None = None
    latent_dim: int | None = None
    pooling: str | None = None
    prefix: str | None = None
    normalize: bool | None = None
    max_length: int | None = None
    dtype: str | None = None
    batch_size: int | None = None
    compile: bool = False
    layout: str = "store"
    retries: int = 2
    max_quarantined: float = 0.01
    latents_per_text: int = 1
    whole_files: bool = False

    def identity(self) -> dict[str, Any]:
        """Return the options that affect the result: those in every manifest, and those that were
        set.
        """
        defaults = PrepareOptions("")
        always = list(PrepareOptions.__dataclass_fields__)[1:17]
        values = {
            key: value
            for key, value in asdict(self).items()
            if key not in _RUN_ONLY_OPTIONS and (key in always or value != getattr(defaults, key))
        }
        for key in ("corpus", "validation_corpus", "tokenizer", "encoder"):
            if values.get(key):
                values[key] = without_folders(values[key])
        if "datasets" in values:
            values["datasets"] = list(map(without_folders, values["datasets"]))
        return values

    def encoder_options(self) -> dict[str, Any]:
        """Return the keyword arguments of Encoder, without its name and device."""
        names = ["batch_tokens", "latent_dim", "dtype", "batch_size", "compile", "cache_dir"]
        names += ["pooling", "prefix", "normalize", "max_length"]
        return {name: getattr(self, name) for name in names}


def diff_options(recorded: dict[str, Any], requested: dict[str, Any]) -> list[str]:
    """Describe each option in which two identities differ, with both values; missing options have
    their default.
    """
    defaults = PrepareOptions("")
    lines = []
    for key in dict.fromkeys([*recorded, *requested]):
        if key in _RUN_ONLY_OPTIONS:  # recorded by an earlier version
            continue
        before, now = (
            values.get(key, getattr(defaults, key, None)) for values in (recorded, requested)
        )
        if before != now:
            name = "CORPUS" if key == "corpus" else _flag(key)
            lines.append(f"{name} was {_format_value(before)}, now {_format_value(now)}")
    return lines


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "not given" if value is None else str(value)


def check_options(options: PrepareOptions) -> Path:
    """Check the values of options for texts; return the output folder, links resolved.

    Raises:
        UserError: a value is out of range or unknown.
    """
    _check_numbers(options)
    if options.min_tokens > options.max_tokens:
        raise UserError(
            "--min-tokens <= --max-tokens",
            f"{options.min_tokens} and {options.max_tokens}",
            "change one of them",
        )
    if options.latents_per_text > options.max_tokens:
        raise UserError(
            f"--latents-per-text of at most --max-tokens={options.max_tokens}",
            str(options.latents_per_text),
            "give fewer latents, or longer texts with --max-tokens",
        )
    for name, allowed in (("overlong", (None, *OVERLONG)), ("layout", LAYOUTS)):
        value = getattr(options, name)
        if value not in allowed:
            raise UserError(
                f"--{name} among: {', '.join(filter(None, allowed))}",
                str(value),
                "choose one of these",
            )
    if options.datasets and options.corpus != DEFAULT_CORPUS:
        raise UserError(
            "a CORPUS or --datasets",
            f"both: {options.corpus} and {' '.join(options.datasets)}",
            "drop one of them",
        )
    return output_root(options.output_dir)


def _check_numbers(options: PrepareOptions | ImageOptions) -> None:
    for name, number in NUMBERS.items():
        value = getattr(options, name, None)
        try:
            if value is not None:
                number(str(value))
        except argparse.ArgumentTypeError as error:
            _, expected = str(error).split(": ", 1)
            fix = "give a number in this range"
            raise UserError(f"{_flag(name)} as {expected}", str(value), fix) from error


def _flag(name: str) -> str:
    """Return the option on the command line that sets a field."""
    return f"--{name.replace('_', '-')}"


@dataclass
class ImageOptions:
    """The options of `mmldlm prepare` for images; each field is the option of the same name, None
    its default.
    """

    output_dir: str
    corpus: str = GLYPHS
    validation_corpus: str | None = None
    image_size: int | None = None
    patch_size: int | None = None
    channels: int | None = None
    latents: str = "pixels"
    faces: int | None = None
    font: str | None = None
    data_root: str | None = None
    white: int | None = None
    max_samples: int | None = None
    validation_samples: int | None = None
    keep_duplicates: bool = False
    max_tokens: int = 62
    max_quarantined: float = 0.01
    tokenizer: str | None = None
    vocab_size: int = 8192
    dtype: str | None = None
    batch_size: int | None = None
    cache_dir: str | None = None
    add_mask_token: bool = False
    seed: int = 0
    force: bool = False

    @property
    def num_components(self) -> int | None:
        """M of `pca:M`; None for others."""
        return int(self.latents.split(":")[1]) if self.latents.startswith("pca:") else None

    @property
    def num_codes(self) -> int | None:
        """Q of `codes:kmeans:Q`; None for others."""
        return int(self.latents.split(":")[2]) if self.latents.startswith("codes:kmeans") else None

    @property
    def vae(self) -> str | None:
        """Name or folder of `vae:NAME_OR_FOLDER`; None for others."""
        return self.latents.removeprefix(_VAE) if self.latents.startswith(_VAE) else None

    def find_vae(self) -> VaeFiles | None:
        """Return the autoencoder of `vae:NAME_OR_FOLDER`; None for others.

        Raises:
            UserError: it is not there, or not an autoencoder.
        """
        return None if self.vae is None else find_vae(self.vae, self.cache_dir)

    @property
    def drawn(self) -> str | None:
        """The name of a corpus that is drawn, not read from files; None for another."""
        return self.corpus if self.corpus in DRAWN and not Path(self.corpus).exists() else None

    def identity(self) -> dict[str, Any]:
        """Return the options that affect the result, without the folders of this machine."""
        values = {
            key: value for key, value in asdict(self).items() if key not in _RUN_ONLY_IMAGE_OPTIONS
        }
        for key in ("corpus", "validation_corpus", "tokenizer"):
            if values[key]:
                is_shards = is_pattern(values[key])
                values[key] = Path(values[key]).name if is_shards else without_folders(values[key])
        if self.vae is not None:
            values["latents"] = _VAE + without_folders(self.vae)
        return {key: value for key, value in values.items() if value is not None}


_SHAPE = ("image_size", "patch_size", "channels")


@dataclass
class CompleteImageOptions(ImageOptions):
    """Options of which the shape of an image and of its patches is known (`complete_options`)."""

    image_size: int = field(kw_only=True)
    patch_size: int = field(kw_only=True)
    channels: int = field(kw_only=True)


def complete_options(options: ImageOptions) -> CompleteImageOptions:
    """Return the options with the defaults of their corpus: small gray letters, else color images
    of 32 pixels.
    """
    is_glyphs, vae = options.drawn == GLYPHS, options.find_vae()
    if vae is not None:
        return _complete_for_vae(options, vae)
    size = options.image_size or (16 if is_glyphs else 32)
    if options.latents.startswith("codes:"):
        # The fewer values a code stands for, the sharper the image.
        patch = 4 if size <= 64 else 8
    else:
        patch = 4 if size <= 16 else 8 if size <= 64 else 16
    if options.latents == "codes:kmeans":
        options = replace(options, latents=f"codes:kmeans:{DEFAULT_CODES}")
    channels = options.channels or (1 if is_glyphs else 3)
    return _with_shape(options, size, options.patch_size or patch, channels)


def _with_shape(
    options: ImageOptions, size: int, patch: int, channels: int
) -> CompleteImageOptions:
    others = {key: value for key, value in vars(options).items() if key not in _SHAPE}
    return CompleteImageOptions(**others, image_size=size, patch_size=patch, channels=channels)


def _complete_for_vae(options: ImageOptions, vae: VaeFiles) -> CompleteImageOptions:
    """Return the options with the patch and the channels of an autoencoder.

    Raises:
        UserError: other ones were given.
    """
    for name, required in (("patch_size", vae.patch), ("channels", vae.channels)):
        if getattr(options, name) not in (None, required):
            flag = _flag(name)
            raise UserError(
                f"{flag} {required}, that of {options.latents}",
                str(getattr(options, name)),
                f"leave {flag} out",
            )
    return _with_shape(options, options.image_size or 256, vae.patch, vae.channels)


def check_image_options(options: CompleteImageOptions) -> Path:
    """Check the values of completed options for images; return the output folder, links resolved.

    Raises:
        UserError: a value is out of range, unknown, or not read by this corpus.
    """
    _check_numbers(options)
    size, patch = options.image_size, options.patch_size
    if size % patch:
        raise UserError(
            f"--image-size as a multiple of --patch-size={patch}",
            str(size),
            f"give {size // patch * patch or patch}",
        )
    if (size // patch) ** 2 > MAX_LATENTS:
        raise UserError(
            f"--image-size and --patch-size with at most {MAX_LATENTS:,} patches of an image",
            f"{(size // patch) ** 2:,} (--image-size {size}, --patch-size {patch})",
            "give a larger --patch-size",
        )
    _check_latents(options)
    corpus = Path(options.corpus)
    is_list = kind_of(corpus) in ("jsonl", *TABLES) or corpus.suffix.lower() == ".json"
    for name, readers, used in (
        ("faces", "the corpus glyphs", options.drawn == GLYPHS),
        ("font", "the corpus emoji", options.drawn == EMOJI),
        ("data_root", "a .json, .jsonl, .csv or .tsv", is_list),
        ("white", "images from files", options.drawn is None),
        ("dtype", "--latents vae:NAME_OR_FOLDER", options.vae is not None),
        ("batch_size", "--latents vae:NAME_OR_FOLDER", options.vae is not None),
    ):
        if getattr(options, name) is not None and not used:
            flag = _flag(name)
            found = f"the corpus {options.corpus}, --latents {options.latents}"
            raise UserError(f"{flag} with {readers}", found, f"leave {flag} out")
    if options.dtype not in (None, "fp32", "bf16"):
        raise UserError(
            "--dtype fp32 or bf16 for an autoencoder", options.dtype, "give one of them"
        )
    if options.drawn and options.validation_corpus:
        raise UserError(
            f"{options.drawn} without --validation-corpus",
            options.validation_corpus,
            "leave it out",
        )
    return output_root(options.output_dir)


def _check_latents(options: CompleteImageOptions) -> None:
    """Check --latents of completed options.

    Raises:
        UserError: an unknown kind, or one that these images do not have.
    """
    forms = r"pixels|vae:.*|pca:[1-9][0-9]{0,5}|codes:fsq|codes:kmeans:[1-9][0-9]{0,4}"
    if not re.fullmatch(forms, options.latents):
        expected = "--latents pixels, pca:M, vae:NAME_OR_FOLDER, codes:kmeans:Q or codes:fsq"
        fix = "give one of them, such as pixels, pca:64 or codes:kmeans:512"
        raise UserError(expected, options.latents, fix)
    if options.num_components is not None:
        _check_components(options, options.num_components)
    if options.num_codes is not None and not 2 <= options.num_codes <= MAX_CODES:
        raise UserError(
            f"--latents codes:kmeans:Q with Q from 2 to {MAX_CODES}",
            options.latents,
            "choose another Q",
        )
    values = options.patch_size**2 * options.channels
    if options.latents == "codes:fsq" and values < len(FSQ_LEVELS):
        raise UserError(
            f"--latents codes:fsq with patches of at least {len(FSQ_LEVELS)} values",
            f"{values} (--patch-size {options.patch_size}, --channels {options.channels})",
            "give a larger --patch-size",
        )


def _check_components(options: CompleteImageOptions, count: int) -> None:
    """Check the number M of `pca:M`."""
    num_values = options.image_size**2 * options.channels
    num_latents = (options.image_size // options.patch_size) ** 2
    if num_values > MAX_PCA_VALUES:
        raise UserError(
            f"--latents pca:M for images of at most {MAX_PCA_VALUES:,} values",
            f"{num_values:,} (--image-size {options.image_size}, --channels {options.channels})",
            "give --latents pixels, or smaller images",
        )
    if count % num_latents or count > num_values:
        raise UserError(
            f"pca:M with M a multiple of {num_latents} latents an image and at most {num_values}",
            options.latents,
            f"give such a multiple (pca:{num_latents} is the smallest), or another --patch-size",
        )
