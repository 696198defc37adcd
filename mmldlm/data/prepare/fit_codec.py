"""Make the codec of a store from its training images: nothing, principal components, or a
codebook.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mmldlm.data import BASIS, CODEBOOK
from mmldlm.data.codebook import FSQ_LEVELS, Codebook, exact_dtype, nearest_codes
from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.images import to_patches
from mmldlm.data.prepare.options import CompleteImageOptions
from mmldlm.data.prepare.read import ImageShards
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import atomic_file

# More images do not change the components, nor do more patches change 512 codes.
_PCA_IMAGES = 16_384
_CODE_PATCHES, _PATCHES_A_CODE = 1 << 17, 8
_ITERATIONS = 40
# Fraction of the patches beyond each end of the levels.
_MARGIN = 0.01


def fit_codec(
    options: CompleteImageOptions,
    shards: ImageShards,
    rows: np.ndarray,
    folder: Path,
    console: Console,
) -> ImageCodec:
    """Return the codec of completed options; its file, if it has one, is written into `folder`.

    A function of the images and their order alone, so that any number of ranks prepares the same
    bytes.

    Args:
        shards: Images of the corpus.
        rows: Rows of the training images.

    Raises:
        UserError: too few images for the components or codes.
    """
    num_latents = (options.image_size // options.patch_size) ** 2
    values = options.patch_size**2 * options.channels
    shape = options.image_size, options.patch_size, options.channels
    if options.latents == "pixels":
        return ImageCodec(*shape, "pixels", num_latents, values)
    if options.num_components is not None:
        path, basis = folder / BASIS, _fit_basis(options, shards, rows, console)
        _write(path, basis)
        dim = options.num_components // num_latents
        return ImageCodec(*shape, "pca", num_latents, dim, basis=basis, basis_file=path)
    with console.status("fitting the codes of patches"):
        codebook = _fit_codebook(options, shards, rows)
    _write(folder / CODEBOOK, codebook.as_float32())
    codebook = Codebook(codebook.kind, codebook.values, folder / CODEBOOK)
    return ImageCodec(*shape, "codes", num_latents, 1, codebook=codebook)


def _fit_basis(
    options: CompleteImageOptions, shards: ImageShards, rows: np.ndarray, console: Console
) -> np.ndarray:
    count = options.num_components
    assert count is not None
    if len(rows) <= count:
        raise UserError(
            f"more training images than the {count} components of --latents {options.latents}",
            f"{len(rows)}",
            "give fewer components, or --latents pixels",
        )
    step = -(-len(rows) // _PCA_IMAGES)
    blocks = shards.blocks(rows[::step])
    with console.status(f"fitting {count} principal components"):
        basis, explained = fit_components(
            ((images / 127.5 - 1).astype(np.float32) for _, images in blocks), count
        )
    console.print(
        f"{options.latents} keeps {explained:.1%} of the variance of the training images"
    )
    return basis


def _fit_codebook(
    options: CompleteImageOptions, shards: ImageShards, rows: np.ndarray
) -> Codebook:
    num_latents = (options.image_size // options.patch_size) ** 2
    step = -(
        -len(rows) * num_latents // max(_CODE_PATCHES, _PATCHES_A_CODE * (options.num_codes or 0))
    )
    images = [images for _, images in shards.blocks(rows[::step])]
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


def fit_kmeans(patches: np.ndarray, count: int, seed: int) -> Codebook:
    """Fit Lloyd's k-means (1982) from k-means++ (Arthur and Vassilvitskii, SODA 2007), in whole
    numbers.

    Distances and sums are exact, so the codes do not depend on threads or machine. A code without
    a patch moves to the patch that is worst served.

    Args:
        patches: Patches, uint8 [M, D], with at least `count` distinct ones (`distinct_patches`).
        count: Number of codes Q.
        seed: Seed of the first codes.
    """
    points, weights = distinct_patches(patches)
    assert len(points) >= count
    codes = _first_codes(
        points, weights, count, np.random.Generator(np.random.Philox(key=[seed, 0xC0DE]))
    )
    for _ in range(_ITERATIONS):
        ids, distances = nearest_codes(points, codes)
        sizes = np.bincount(ids, weights, count)
        sums = np.stack([np.bincount(ids, weights * column, count) for column in points.T], axis=1)
        means = np.rint(sums / np.maximum(sizes, 1)[:, None]).astype(np.uint8)
        empty = np.flatnonzero(sizes == 0)
        means[empty] = points[np.argsort(-weights * distances, kind="stable")[: len(empty)]]
        if (means == codes).all():
            break
        codes = means
    return Codebook("kmeans", codes)


def distinct_patches(patches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct patches uint8 [n, D] and how often each occurs fp64 [n]."""
    rows = np.ascontiguousarray(patches)
    keys = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return rows[first], counts.astype(np.float64)


def _first_codes(
    points: np.ndarray, weights: np.ndarray, count: int, draws: np.random.Generator
) -> np.ndarray:
    """Draw codes among the patches, each with probability of its frequency times its distance to
    the earlier ones.
    """
    table = points.astype(exact_dtype(points.shape[1]))
    lengths = np.square(table).sum(1)

    def distances_to(row: int) -> np.ndarray:
        return (lengths - 2 * table @ table[row] + lengths[row]).astype(np.float64)

    chosen = [
        int(np.searchsorted(np.cumsum(weights), draws.random() * weights.sum(), side="right"))
    ]
    distances = distances_to(chosen[0])
    while len(chosen) < count:
        scores = np.cumsum(weights * distances)
        chosen.append(int(np.searchsorted(scores, draws.random() * scores[-1], side="right")))
        distances = np.minimum(distances, distances_to(chosen[-1]))
    return points[chosen]


def fit_fsq(patches: np.ndarray) -> Codebook:
    """Place codes on a grid of the four largest principal components (after FSQ, Mentzer et al.,
    arXiv 2309.15505).

    8, 5, 5 and 5 even levels from the 1st to the 99th percentile of each component, instead of
    FSQ's learned ones.

    Args:
        patches: Patches, uint8 [M, D] with D of at least 4.
    """
    flat = patches.astype(np.float64)
    mean = flat.mean(0)
    _, vectors = np.linalg.eigh(flat.T @ flat / len(flat) - np.outer(mean, mean))
    components = vectors[:, ::-1][:, : len(FSQ_LEVELS)].T
    components *= np.sign(components[np.arange(len(components)), np.abs(components).argmax(1)])[
        :, None
    ]
    ends = np.quantile((flat - mean) @ components.T, [_MARGIN, 1 - _MARGIN], axis=0)
    levels = [np.linspace(low, high, count) for low, high, count in zip(*ends, FSQ_LEVELS)]
    grid = np.array(list(product(*levels)))
    return Codebook("fsq", np.clip(np.rint(mean + grid @ components), 0, 255).astype(np.uint8))


def fit_components(blocks: Iterable[np.ndarray], count: int) -> tuple[np.ndarray, float]:
    """Fit the components of largest variance (Hotelling, 1933).

    Args:
        blocks: Images float32 [B, S, S, C].
        count: Number of components M, below the number of images.

    Returns:
        float32 [M + 1, S * S * C], the mean and then the components, each with its largest entry
        positive; and the fraction of the variance that they explain.
    """
    num = 0
    total: Any = 0.0
    products: Any = 0.0
    for block in blocks:
        flat = block.reshape(len(block), -1).astype(np.float64)
        num, total, products = num + len(flat), total + flat.sum(0), products + flat.T @ flat
    mean = total / num
    variances, vectors = np.linalg.eigh(products / num - np.outer(mean, mean))
    order = np.argsort(variances)[::-1][:count]
    components = vectors[:, order].T
    largest = components[np.arange(len(components)), np.abs(components).argmax(1)]
    components *= np.sign(largest)[:, None]
    explained = float(variances[order].sum() / max(variances.clip(0).sum(), 1e-12))
    return np.concatenate([mean[None], components]).astype(np.float32), explained
