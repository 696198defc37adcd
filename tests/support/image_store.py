"""A store of glyphs as `mmldlm prepare` lays it out, in a tenth of a second: gray, 16 pixels or
more, patches of 4.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from mmldlm.data import CODEBOOK
from mmldlm.data.corpora.drawn_images import CHARACTERS, FACES
from mmldlm.data.corpora.drawn_images import draw_glyph as draw
from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.images import to_patches
from mmldlm.data.prepare.fit_codec import fit_kmeans
from mmldlm.data.prepare.tokenizer import load
from mmldlm.data.writers import StoreSplit
from mmldlm.utils.atomic_files import sha256_of

CODEC = ImageCodec(16, 4, 1, "pixels", 16, 16)


def make_image_store(
    root: Path,
    faces: int = 3,
    characters: str = CHARACTERS[:62:3],
    codes: int | None = None,
    size: int = 16,
) -> Path:
    """Write a store of letters, as pixels or as k-means codes; every seventh (style, letter) pair
    is unseen.
    """
    import unicodedata

    root.mkdir(parents=True, exist_ok=True)
    texts, images = [], []
    for style in list(FACES)[:faces]:
        for character in characters:
            texts.append(f"{style} {unicodedata.name(character).lower()}")
            images.append(draw(style, character, size, CODEC.channels))
    tokenizer = load("train", texts=texts, vocab_size=512)
    codec = CODEC.of_size(size) if codes is None else _code_codec(root, np.stack(images), codes)
    latents, groups = codec.encode(np.stack(images)), np.arange(len(texts))
    is_unseen, splits = np.arange(len(texts)) % 7 == 3, {}
    for split, rows in (
        ("train", np.flatnonzero(~is_unseen)),
        ("validation", np.flatnonzero(is_unseen)),
    ):
        shape, dtype = (
            [codec.num_latents, codec.latent_dim],
            np.float32 if codes is None else np.uint16,
        )
        writer = StoreSplit(root, split, shape, len(tokenizer), latent_dtype=dtype)
        ids = [
            np.array(tokenizer(texts[row], add_special_tokens=False)["input_ids"]) for row in rows
        ]
        writer.add([texts[row] for row in rows], ids, latents[rows])
        splits[split] = writer.close()
        np.save(root / split / "groups.npy", groups[rows])
    tokenizer.save_pretrained(root / "tokenizer")
    flat = latents[~is_unseen].reshape(-1, codec.latent_dim).astype(np.float64)
    own = (
        {"latents": "pixels"}
        if codes is None
        else {"latents": "codes", "codes": codes, "codebook": "kmeans"}
    )
    statistics = {"mean": flat.mean(0).tolist(), "std": flat.std(0).tolist()}
    keys = {key: getattr(tokenizer, f"{key}_token_id") for key in ("mask", "pad", "eos")}
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    manifest = {
        "format": "mmldlm-store",
        "version": 1,
        "kind": "image",
        "image": {
            "size": size,
            "patch": 4,
            "channels": 1,
            "grid": codec.grid,
            "source": "glyphs",
            **own,
        },
        "latent_dim": codec.latent_dim,
        "latents_per_text": codec.num_latents,
        "latent_stats": statistics if codes is None else None,
        "tokenizer": {
            "name": "train",
            "vocab_size": len(tokenizer),
            **{f"{k}_token_id": v for k, v in keys.items()},
        },
        "encoder": {"name": codec.name, "normalize": False},
        "splits": splits,
        "files": {
            path.relative_to(root).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": sha256_of(path),
            }
            for path in files
        },
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def _code_codec(root: Path, images: np.ndarray, codes: int) -> ImageCodec:
    """A codec whose codebook lies in the store."""
    codebook = fit_kmeans(
        to_patches(images, CODEC.patch).reshape(-1, CODEC.latent_dim), codes, seed=0
    )
    np.save(root / CODEBOOK, codebook.as_float32())
    return ImageCodec(16, 4, 1, "codes", 16, 1, codebook=replace(codebook, file=root / CODEBOOK))
