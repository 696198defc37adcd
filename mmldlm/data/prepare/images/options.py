"""The options of a preparation of images."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mmldlm.data.images.corpora.corpus import GLYPHS
from mmldlm.data.images.pca import MAX_VALUES
from mmldlm.errors import UserError

# Options that affect how the work is done, or where files lie, but not the result.
_RUN_ONLY_OPTIONS = ("output_dir", "force", "cache_dir", "data_root")


@dataclass
class ImageOptions:
    """The options of `mmldlm prepare` for images; each field is the option of the same name, None its default."""

    output_dir: str
    corpus: str = GLYPHS
    validation_corpus: str | None = None
    image_size: int | None = None
    patch_size: int | None = None
    channels: int | None = None
    latents: str = "pixels"
    faces: int | None = None
    data_root: str | None = None
    max_samples: int | None = None
    validation_samples: int | None = None
    keep_duplicates: bool = False
    max_quarantined: float = 0.01
    tokenizer: str | None = None
    vocab_size: int = 8192
    cache_dir: str | None = None
    add_mask_token: bool = False
    seed: int = 0
    force: bool = False

    @property
    def num_components(self) -> int | None:
        """M of `pca:M`; None for pixels."""
        return None if self.latents == "pixels" else int(self.latents.split(":")[1])

    @property
    def is_glyphs(self) -> bool:
        """Whether the corpus is drawn, not read."""
        return self.corpus == GLYPHS and not Path(GLYPHS).exists()

    def identity(self) -> dict[str, Any]:
        """Return the options that affect the result, without the folders of this machine."""
        values = {key: value for key, value in asdict(self).items() if key not in _RUN_ONLY_OPTIONS}
        for key in ("corpus", "validation_corpus", "tokenizer"):
            if values[key] and Path(values[key]).exists():
                values[key] = Path(values[key]).resolve().name
        return {key: value for key, value in values.items() if value is not None}


def complete_options(options: ImageOptions) -> ImageOptions:
    """Return the options with the defaults of their corpus: small gray letters, else color images of 32 pixels."""
    size = options.image_size or (16 if options.is_glyphs else 32)
    return replace(
        options,
        image_size=size,
        patch_size=options.patch_size or (4 if size <= 16 else 8 if size <= 64 else 16),
        channels=options.channels or (1 if options.is_glyphs else 3),
    )


def check_options(options: ImageOptions) -> Path:
    """Check the values of completed options; return the absolute output folder.

    Raises:
        UserError: a value is out of range, unknown, or not read by this corpus.
    """
    for name in ("image_size", "patch_size", "max_samples", "validation_samples"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} of at least 1", str(value), "give a positive number")
    size, patch = options.image_size, options.patch_size
    if size % patch:
        raise UserError(
            f"--image-size as a multiple of --patch-size={patch}", str(size), f"give {size // patch * patch or patch}"
        )
    if not 0 <= options.max_quarantined <= 1:
        raise UserError("--max-quarantined from 0 to 1", str(options.max_quarantined), "give a share, such as 0.01")
    _check_latents(options)
    for name, used in (("faces", options.is_glyphs), ("data_root", str(options.corpus).endswith((".json", ".jsonl")))):
        if getattr(options, name) is not None and not used:
            flag = f"--{name.replace('_', '-')}"
            readers = "the corpus glyphs" if name == "faces" else "a .json or .jsonl"
            raise UserError(f"{flag} with {readers}", f"the corpus {options.corpus}", f"leave {flag} out")
    if options.is_glyphs and options.validation_corpus:
        raise UserError("glyphs without --validation-corpus", options.validation_corpus, "leave the option out")
    return Path(os.path.abspath(options.output_dir))


def _check_latents(options: ImageOptions) -> None:
    if options.latents == "pixels":
        return
    if not re.fullmatch(r"pca:[1-9][0-9]{0,5}", options.latents):
        raise UserError("--latents pixels or pca:M", options.latents, "give pixels, or a number, such as pca:64")
    num_values, num_latents = options.image_size**2 * options.channels, (options.image_size // options.patch_size) ** 2
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
