"""A store of glyphs as `mmldlm prepare` lays it out, in a tenth of a second: 16 pixels, patches of 4, gray."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mmldlm.data.images.codec import ImageCodec
from mmldlm.data.images.corpora.glyphs import CHARACTERS, FACES, draw
from mmldlm.data.prepare.tokenizer import load
from mmldlm.data.store.writers import StoreSplit
from mmldlm.utils.atomic_files import sha256_of

CODEC = ImageCodec(16, 4, 1, "pixels", 16, 16)


def make_image_store(root: Path, faces: int = 3, characters: str = CHARACTERS[:62:3]) -> Path:
    """Write a store of letters; every seventh (style, letter) pair is unseen."""
    import unicodedata

    texts, images = [], []
    for style in list(FACES)[:faces]:
        for character in characters:
            texts.append(f"{style} {unicodedata.name(character).lower()}")
            images.append(draw(style, character, CODEC.size, CODEC.channels))
    tokenizer = load("train", texts=texts, vocab_size=512)
    latents, groups = CODEC.encode(np.stack(images)), np.arange(len(texts))
    is_unseen, splits = np.arange(len(texts)) % 7 == 3, {}
    for split, rows in (("train", np.flatnonzero(~is_unseen)), ("validation", np.flatnonzero(is_unseen))):
        writer = StoreSplit(root, split, [CODEC.num_latents, CODEC.latent_dim], len(tokenizer))
        ids = [np.array(tokenizer(texts[row], add_special_tokens=False)["input_ids"]) for row in rows]
        writer.add([texts[row] for row in rows], ids, latents[rows])
        splits[split] = writer.close()
        np.save(root / split / "groups.npy", groups[rows])
    tokenizer.save_pretrained(root / "tokenizer")
    flat = latents[~is_unseen].reshape(-1, CODEC.latent_dim).astype(np.float64)
    keys = {key: getattr(tokenizer, f"{key}_token_id") for key in ("mask", "pad", "eos")}
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    manifest = {
        "format": "mmldlm-store",
        "version": 1,
        "kind": "image",
        "image": {"size": 16, "patch": 4, "channels": 1, "grid": [4, 4], "latents": "pixels", "source": "glyphs"},
        "latent_dim": CODEC.latent_dim,
        "latents_per_text": CODEC.num_latents,
        "latent_stats": {"mean": flat.mean(0).tolist(), "std": flat.std(0).tolist()},
        "tokenizer": {"name": "train", "vocab_size": len(tokenizer), **{f"{k}_token_id": v for k, v in keys.items()}},
        "encoder": {"name": CODEC.name, "normalize": False},
        "splits": splits,
        "files": {
            path.relative_to(root).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in files
        },
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root
