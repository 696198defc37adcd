"""Images from captions, captions from images, and pairs: what differs from embeddings and
texts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.image_codec import HINTS, ImageCodec
from mmldlm.data.run_data import check_store_kind
from mmldlm.data.store import Store, read_manifest
from mmldlm.errors import UserError
from mmldlm.inference.generate import (
    Samples,
    drawn_if_repeated,
    read_l2t_input,
    sample_unconditional,
    write_from_latents,
)
from mmldlm.inference.inputs import given_texts, tokenize_texts, unknown_tokens
from mmldlm.inference.options import NUM_LENGTHS, SampleOptions
from mmldlm.sampling.records import Recorder, SamplingInterrupted, finished_part
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.formatting import count_noun
from mmldlm.utils.progress import ProgressBar, ProgressCallback

FOLDER, SHEET = "images", "sheet.png"
# Pattern of the files of `write_pictures`, besides the sheet.
EACH_PICTURE = f"{FOLDER}/[0-9]*.png"
MAX_ON_SHEET = 96


def codec_of(pretrained: Pretrained) -> ImageCodec:
    """Return what turns the latents of a model into pixels.

    Raises:
        UserError: the model was not trained on images, its files are damaged, or its autoencoder
            is not there.
    """
    if pretrained.image is None:
        raise UserError(
            "a model of images (task=image_text)",
            f"{pretrained.folder or 'a model'} of task={pretrained.task.name}",
            "use another checkpoint, or sample l2t, t2l or unconditional",
        )
    device = str(next(pretrained.model.parameters()).device)
    return ImageCodec.open(pretrained.image, pretrained.config_folder).ready(
        pretrained.vae, device
    )


def make_images(
    pretrained: Pretrained,
    captions: list[list[int]],
    *,
    steps: int,
    guidance: float = 1.0,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample one image per caption of ids without EOS.

    Args:
        options: Further options of the task's `draw_images`.

    Returns:
        latents [B, N, D] fp32 (of ids [B, N, 1] int64) and images [B, S, S, C] uint8.
    """
    # A task of images, and so has `draw_images`.
    task: Any = pretrained.task
    call = partial(
        task.draw_images,
        pretrained,
        captions,
        steps=steps,
        guidance=guidance,
        seed=seed,
        progress=progress,
        **options,
    )
    drawn, finished = finished_part(call)
    latents, codec = drawn.numpy(), codec_of(pretrained)
    if finished is None:
        return latents, codec.decode(latents)
    decoded = codec.decode(latents[finished])  # the others would keep the user waiting
    images = np.zeros((len(latents), *decoded.shape[1:]), decoded.dtype)
    images[finished] = decoded
    raise SamplingInterrupted(finished, (latents, images))


def open_image_store(root: str, codec: ImageCodec) -> Store:
    """Open the validation split of a store of images that a model can read.

    Raises:
        UserError: a store of texts, or images of another size or kind.
    """
    store = Store(root, "validation")
    check_store_kind(store, "image")
    model_identity = codec.identity
    store_identity = ImageCodec.open(store.manifest, store.root).identity
    if wrong := [
        key
        for key in model_identity
        if model_identity[key] != store_identity.get(key) and key not in HINTS
    ]:
        raise UserError(
            "images as the model was trained on:"
            f" {', '.join(f'{key} {model_identity[key]}' for key in wrong)}",
            f"{', '.join(f'{key} {store_identity.get(key)}' for key in wrong)} in {store.root}",
            "name the store of its training, or prepare images in the same way",
        )
    return store


def sample_t2i(pretrained: Pretrained, options: SampleOptions, progress: ProgressBar) -> Samples:
    """Sample images from captions: given ones, or those of a store's validation split."""
    codec = codec_of(pretrained)
    real = None
    if options.data:
        store = open_image_store(options.data, codec)
        count = min(options.num_samples or len(store), len(store))
        # Spread over the store, because neighbors are alike.
        rows = np.linspace(0, len(store) - 1, count).round().astype(np.int64).tolist()
        texts = store.texts(rows)
        real = codec.decode(store.get(rows).latents)
    else:
        texts = given_texts(options.text, options.text_file)
    source = np.arange(options.num_samples or len(texts)) % len(texts)
    ids = tokenize_texts(texts, pretrained)
    num_unknown = [] if options.data else unknown_tokens(texts, ids, pretrained)
    task: Any = pretrained.task
    if "temperature" in task.t2i_options and len(source) > len(texts):
        options = drawn_if_repeated(options)
    steps, guidance = options.num_steps, options.guidance
    assert steps is not None and guidance is not None
    message = f"making {count_noun(len(source), 'image')} in {count_noun(steps, 'step')}"
    call = partial(
        make_images,
        pretrained,
        [ids[row] for row in source],
        steps=steps,
        guidance=guidance,
        guidance_interval=options.guidance_interval,
        seed=options.seed,
        progress=progress.start(message),
        **{key: getattr(options, key) for key in task.t2i_options},
    )
    (latents, images), finished = finished_part(call)
    records = [
        {
            "index": i,
            "text": texts[row],
            "num_tokens": len(ids[row]),
            "latent": i,
            "image": _name(i),
        }
        for i, row in enumerate(source.tolist())
    ]
    for record, row in zip(records, source.tolist() if num_unknown else ()):
        record["num_unknown"] = num_unknown[row]
    real_images = None if real is None else real[source]
    return Samples(records, latents, {}, images, real_images).keep(finished)


def sample_i2t(
    pretrained: Pretrained,
    options: SampleOptions,
    progress: ProgressBar,
    recorder: Recorder | None = None,
) -> Samples:
    """Write captions of images: of files, of a store's validation split, or of a file of
    latents.
    """
    codec = codec_of(pretrained)
    references: list[str] | None = None
    if options.image:
        images = np.stack([_read(source, codec) for source in options.image])
        latents = codec.encode(images)
    else:
        if options.data:
            open_image_store(options.data, codec)
        references, latents, _ = read_l2t_input(pretrained, options, progress)
        images = codec.decode(latents)
    # A text that is watched is written once, in the median length.
    lengths = {"num_lengths": NUM_LENGTHS} if recorder is None else {}
    more = lengths if recorder is None else {"recorder": recorder}
    samples = write_from_latents(pretrained, options, references, latents, progress, **more)
    samples.extra |= lengths
    for record in samples.records:
        if options.image:
            record["image"] = options.image[record["latent"]]
    samples.images = images[[record["latent"] for record in samples.records]]
    return samples


def _read(source: Any, codec: ImageCodec) -> np.ndarray:
    """Read a file, or fit a picture (PIL or an array) as files are."""
    from mmldlm.data.images import UnreadableImage, fit_picture, read_image

    if not isinstance(source, (str, Path)):
        return fit_picture(source, codec.size, codec.channels)
    try:
        return read_image(Path(source), codec.size, codec.channels)
    except UnreadableImage as error:
        raise UserError(
            f"an image in {source}", str(error), "name a file that Pillow reads as one picture"
        ) from None


def sample_pairs(
    pretrained: Pretrained,
    options: SampleOptions,
    progress: ProgressBar,
    recorder: Recorder | None = None,
) -> Samples:
    """Sample pairs of image and caption."""
    codec = codec_of(pretrained)
    samples = sample_unconditional(pretrained, options, progress, recorder)
    assert samples.latents is not None
    samples.images = codec.decode(samples.latents)
    for record in samples.records:
        record["image"] = _name(record["index"])
    return samples


def _name(index: int) -> str:
    return f"{FOLDER}/{index:06d}.png"


def write_pictures(samples: Samples, out: Path, keeps_each: bool) -> None:
    """Write a sheet of the images with their captions and, with keeps_each, one PNG per image.

    Made images of a store's captions stand on the sheet left of the store's own.

    Args:
        samples: Samples whose `images` are set.
        out: An existing folder without pictures.
    """
    from PIL import Image

    from mmldlm.data.images import contact_sheet

    assert samples.images is not None
    count = min(len(samples.images), MAX_ON_SHEET)
    captions = [record["text"] for record in samples.records[:count]]
    shown = samples.images[:count]
    if samples.real_images is not None:
        shown = np.concatenate([shown, samples.real_images[:count]], axis=2)
    contact_sheet(shown, captions, out / SHEET)
    folder = out / FOLDER
    if not keeps_each:
        return
    folder.mkdir(exist_ok=True)
    for record, image in zip(samples.records, samples.images):
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(
            out / record["image"]
        )


def image_sizes(pretrained: Pretrained) -> list[int]:
    """Return the sides in pixels of the images that a model was trained on, the smallest first; of
    texts none.
    """
    if pretrained.image is None:
        return []
    grids = getattr(pretrained.model.config, "latent_grids", None)
    return (
        [pretrained.image["size"]]
        if grids is None
        else [rows * pretrained.image["patch"] for rows, _ in grids]
    )


def use_image_size(
    pretrained: Pretrained, size: int | None = None, data: str | None = None
) -> None:
    """Let a model make and read images of one of its sizes: changes its codec and its model's
    config.

    Args:
        size: Side in pixels; None: that of the store `data`, or the largest.

    Raises:
        UserError: another size than those of its training.
    """
    sizes, where = image_sizes(pretrained), "--image-size"
    if size is None and data is not None and len(sizes) > 1:
        size, where = (read_manifest(data).get("image") or {}).get("size"), f"images of {data}:"
    if size is None:
        if not sizes:
            return
        # An earlier call may have left another one in use.
        size = sizes[-1]
    if size not in sizes:
        known = ", ".join(map(str, sizes)) or "none: it is a model of texts"
        fix = "choose one of them" if sizes else "leave --image-size out"
        raise UserError(f"a size that the model was trained on ({known})", f"{where} {size}", fix)
    assert pretrained.image is not None
    if size != pretrained.image["size"]:
        codec, model = ImageCodec.open(pretrained.image).of_size(size), pretrained.model
        pretrained.image = codec.identity
        # No weight depends on them: positions are fixed (model.latent_grids). Unchecked, as they
        # change together.
        model.config = model.config.model_copy(
            update={"num_latents": codec.num_latents, "latent_grid": codec.grid}
        )
