"""Make the codec of a store from its training images: nothing, principal components, or a
codebook.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console

from mmldlm.data.images.codebook import CODEBOOK, Codebook
from mmldlm.data.images.codec import BASIS, ImageCodec
from mmldlm.data.images.fit_codebook import distinct_patches, fit_fsq, fit_kmeans
from mmldlm.data.images.patches import to_patches
from mmldlm.data.images.pca import fit_components
from mmldlm.data.prepare.images.options import ImageOptions
from mmldlm.data.prepare.images.publish_stage import ImageSplit
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import atomic_file

_PCA_IMAGES = 16_384  # more do not change the components
_CODE_PATCHES, _PATCHES_A_CODE = 1 << 17, 8  # nor more patches 512 codes


def fit_codec(
    options: ImageOptions, train: ImageSplit, folder: Path, console: Console
) -> ImageCodec:
    """Return the codec of completed options; its file, if it has one, is written into `folder`.

    A function of the images and their order alone, so that any number of ranks prepares the same
    bytes.

    Raises:
        UserError: too few images for the components or codes.
    """
    num_latents = (options.image_size // options.patch_size) ** 2
    values = options.patch_size**2 * options.channels
    shape = {"size": options.image_size, "patch": options.patch_size, "channels": options.channels}
    shape["num_latents"] = num_latents
    if options.latents == "pixels":
        return ImageCodec(**shape, latents="pixels", latent_dim=values)
    if options.num_components is not None:
        path, basis = folder / BASIS, _fit_basis(options, train, console)
        _write(path, basis)
        dim = options.num_components // num_latents
        return ImageCodec(**shape, latents="pca", latent_dim=dim, basis=basis, basis_file=path)
    with console.status("fitting the codes of patches"):
        codebook = _fit_codebook(options, train)
    _write(folder / CODEBOOK, codebook.as_float32())
    codebook = Codebook(codebook.kind, codebook.values, folder / CODEBOOK)
    return ImageCodec(**shape, latents="codes", latent_dim=1, codebook=codebook)


def _fit_basis(options: ImageOptions, train: ImageSplit, console: Console) -> np.ndarray:
    count = options.num_components
    assert count is not None
    if len(train.rows) <= count:
        raise UserError(
            f"more training images than the {count} components of --latents {options.latents}",
            f"{len(train.rows)}",
            "give fewer components, or --latents pixels",
        )
    step = -(-len(train.rows) // _PCA_IMAGES)
    blocks = train.shards.blocks(train.rows[::step])
    with console.status(f"fitting {count} principal components"):
        basis, kept = fit_components(
            ((images / 127.5 - 1).astype(np.float32) for _, images in blocks), count
        )
    console.print(f"{options.latents} keeps {kept:.1%} of the variance of the training images")
    return basis


def _fit_codebook(options: ImageOptions, train: ImageSplit) -> Codebook:
    num_latents = (options.image_size // options.patch_size) ** 2
    step = -(
        -len(train.rows)
        * num_latents
        // max(_CODE_PATCHES, _PATCHES_A_CODE * (options.num_codes or 0))
    )
    images = [images for _, images in train.shards.blocks(train.rows[::step])]
    patches = to_patches(np.concatenate(images), options.patch_size)
    patches = patches.reshape(-1, patches.shape[-1])
    if options.num_codes is None:
        return fit_fsq(patches)
    num_distinct = len(distinct_patches(patches)[0])
    if num_distinct < options.num_codes:
        raise UserError(
            f"at least {options.num_codes} different patches for --latents {options.latents}",
            f"{num_distinct:,}",
            f"give codes:kmeans:{num_distinct} or fewer, a larger --patch-size, or more images",
        )
    return fit_kmeans(patches, options.num_codes, options.seed)


def _write(path: Path, array: np.ndarray) -> None:
    with atomic_file(path) as file:
        np.save(file, array)
