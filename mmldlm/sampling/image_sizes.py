"""Which of its image sizes a model makes and reads."""

from __future__ import annotations

from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.store import read_manifest
from mmldlm.errors import UserError
from mmldlm.sampling.pretrained import Pretrained


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
        size: side in pixels; None: that of the store `data`, or the one in use (of a loaded model
            the largest).

    Raises:
        UserError: another size than those of its training.
    """
    sizes, where = image_sizes(pretrained), "--image-size"
    if size is None and data is not None and len(sizes) > 1:
        size, where = (read_manifest(data).get("image") or {}).get("size"), f"images of {data}:"
    if size is None:
        return
    if size not in sizes:
        known = ", ".join(map(str, sizes)) or "none: it is a model of texts"
        fix = "choose one of them" if sizes else "leave --image-size out"
        raise UserError(f"a size that the model was trained on ({known})", f"{where} {size}", fix)
    if len(sizes) > 1:
        assert pretrained.image is not None
        codec, model = ImageCodec.open(pretrained.image).of_size(size), pretrained.model
        pretrained.image = codec.identity
        # No weight depends on them: positions are fixed (model.latent_grids). Unchecked, as they
        # change together.
        model.config = model.config.model_copy(
            update={"num_latents": codec.num_latents, "latent_grid": codec.grid}
        )
