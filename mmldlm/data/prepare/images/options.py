"""The options of a preparation of images."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mmldlm.data.corpora.text_files import kind_of
from mmldlm.data.encoders.vae_files import VaeFiles, find_vae
from mmldlm.data.images.codebook import MAX_CODES
from mmldlm.data.images.corpora.corpus import DRAWN, EMOJI, GLYPHS
from mmldlm.data.images.corpora.tar_shards import is_pattern
from mmldlm.data.images.fit_codebook import FSQ_LEVELS
from mmldlm.data.images.pca import MAX_VALUES
from mmldlm.errors import UserError
from mmldlm.utils.paths import output_root

# Options that affect how the work is done, where files lie, or whether there is a result, but not
# the result.
_RUN_ONLY_OPTIONS = (
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
            key: value for key, value in asdict(self).items() if key not in _RUN_ONLY_OPTIONS
        }
        for key in ("corpus", "validation_corpus", "tokenizer"):
            if values[key] and (Path(values[key]).exists() or is_pattern(values[key])):
                values[key] = Path(values[key]).resolve().name
        if self.vae is not None and Path(self.vae).exists():
            values["latents"] = _VAE + Path(self.vae).resolve().name
        return {key: value for key, value in values.items() if value is not None}


def complete_options(options: ImageOptions) -> ImageOptions:
    """Return the options with the defaults of their corpus: small gray letters, else color images
    of 32 pixels.
    """
    is_glyphs, vae = options.drawn == GLYPHS, options.find_vae()
    if vae is not None:
        return _complete_for_vae(options, vae)
    size = options.image_size or (16 if is_glyphs else 32)
    has_codes = options.latents.startswith(
        "codes:"
    )  # the fewer values a code stands for, the sharper the image
    return replace(
        options,
        image_size=size,
        patch_size=options.patch_size or _default_patch(size, has_codes),
        latents=f"codes:kmeans:{DEFAULT_CODES}"
        if options.latents == "codes:kmeans"
        else options.latents,
        channels=options.channels or (1 if is_glyphs else 3),
    )


def _default_patch(size: int, has_codes: bool) -> int:
    if has_codes:
        return 4 if size <= 64 else 8
    return 4 if size <= 16 else 8 if size <= 64 else 16


def _complete_for_vae(options: ImageOptions, vae: VaeFiles) -> ImageOptions:
    """Return the options with the patch and the channels of an autoencoder.

    Raises:
        UserError: other ones were given.
    """
    for name, own in (("patch_size", vae.patch), ("channels", vae.channels)):
        if getattr(options, name) not in (None, own):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{flag} {own}, that of {options.latents}",
                str(getattr(options, name)),
                f"leave {flag} out",
            )
    size = options.image_size or 256
    return replace(options, image_size=size, patch_size=vae.patch, channels=vae.channels)


def check_options(options: ImageOptions) -> Path:
    """Check the values of completed options; return the output folder, links resolved.

    Raises:
        UserError: a value is out of range, unknown, or not read by this corpus.
    """
    for name in (
        "image_size",
        "patch_size",
        "max_samples",
        "validation_samples",
        "max_tokens",
        "batch_size",
    ):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(
                f"--{name.replace('_', '-')} of at least 1", str(value), "give a positive number"
            )
    size, patch = options.image_size, options.patch_size
    if size % patch:
        raise UserError(
            f"--image-size as a multiple of --patch-size={patch}",
            str(size),
            f"give {size // patch * patch or patch}",
        )
    if options.white is not None and not 1 <= options.white <= 65535:
        raise UserError(
            "--white from 1 to 65535",
            str(options.white),
            "give the largest value, 4095 for 12 bits",
        )
    if not 0 <= options.max_quarantined <= 1:
        raise UserError(
            "--max-quarantined from 0 to 1",
            str(options.max_quarantined),
            "give a share, such as 0.01",
        )
    _check_latents(options)
    corpus = Path(options.corpus)
    is_list = kind_of(corpus) == "jsonl" or corpus.suffix.lower() in (".json", ".csv")
    for name, readers, used in (
        ("faces", "the corpus glyphs", options.drawn == GLYPHS),
        ("font", "the corpus emoji", options.drawn == EMOJI),
        ("data_root", "a .json, .jsonl or .csv", is_list),
        ("white", "images from files", options.drawn is None),
        ("dtype", "--latents vae:NAME_OR_FOLDER", options.vae is not None),
        ("batch_size", "--latents vae:NAME_OR_FOLDER", options.vae is not None),
    ):
        if getattr(options, name) is not None and not used:
            flag = f"--{name.replace('_', '-')}"
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


def _check_latents(options: ImageOptions) -> None:
    if options.latents == "pixels" or options.vae is not None:
        return
    if options.latents.startswith("codes:"):
        _check_codes(options)
        return
    if not re.fullmatch(r"pca:[1-9][0-9]{0,5}", options.latents):
        expected = "--latents pixels, pca:M, vae:NAME_OR_FOLDER, codes:kmeans:Q or codes:fsq"
        raise UserError(
            expected,
            options.latents,
            "give one of them, such as pixels, pca:64 or codes:kmeans:512",
        )
    num_values, num_latents = (
        options.image_size**2 * options.channels,
        (options.image_size // options.patch_size) ** 2,
    )
    if num_values > MAX_VALUES:
        raise UserError(
            f"--latents pca:M for images of at most {MAX_VALUES:,} values",
            f"{num_values:,} (--image-size {options.image_size}, --channels {options.channels})",
            "give --latents pixels, or smaller images",
        )
    count = options.num_components
    nearest = max(num_latents, min(count, num_values) // num_latents * num_latents)
    if count % num_latents or count > num_values:
        raise UserError(
            f"pca:M with M a multiple of {num_latents} latents an image and at most {num_values}",
            options.latents,
            f"give pca:{nearest}, or another --patch-size",
        )


def _check_codes(options: ImageOptions) -> None:
    if not re.fullmatch(r"codes:(fsq|kmeans:[1-9][0-9]{0,4})", options.latents):
        fix = "give a number, such as codes:kmeans:512"
        raise UserError("--latents codes:kmeans:Q or codes:fsq", options.latents, fix)
    if options.num_codes is not None and not 2 <= options.num_codes <= MAX_CODES:
        raise UserError(
            f"--latents codes:kmeans:Q with Q from 2 to {MAX_CODES}",
            options.latents,
            "choose another Q",
        )
    values = options.patch_size**2 * options.channels
    if options.num_codes is None and values < len(FSQ_LEVELS):
        raise UserError(
            f"--latents codes:fsq with patches of at least {len(FSQ_LEVELS)} values",
            f"{values} (--patch-size {options.patch_size}, --channels {options.channels})",
            "give a larger --patch-size",
        )
