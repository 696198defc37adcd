"""Cut a store in two whose training texts do not overlap: one to train on, one for a judge."""

from __future__ import annotations

import shutil
from pathlib import Path

BLOCK = 4096


def cut(store: str, arms: Path, judge: Path, every: int = 4) -> None:
    """Write every `every`-th training text to the store `judge`, the others to `arms`; both keep
    the validation split.

    Latent statistics stay those of the whole.
    """
    import numpy as np

    from mmldlm.data.store import Store

    whole = Store(store, "train")
    rows = np.arange(len(whole))
    for folder, chosen in ((arms, rows[rows % every != 0]), (judge, rows[rows % every == 0])):
        _write(whole, chosen, folder)


def _write(whole, rows, folder: Path) -> None:
    from mmldlm.data.manifest import MANIFEST
    from mmldlm.data.store import TOKENIZER_FOLDER, Store, latent_shape
    from mmldlm.data.writers import StoreSplit
    from mmldlm.utils.atomic_files import list_files, write_json

    manifest = dict(whole.manifest)
    split = StoreSplit(
        folder, "train", latent_shape(manifest), manifest["tokenizer"]["vocab_size"]
    )
    for start in range(0, len(rows), BLOCK):
        part = rows[start : start + BLOCK]
        found = whole.get(part)
        split.add(whole.texts(part), found.tokens, found.latents)
    manifest["splits"] = {**manifest["splits"], "train": split.close()}
    for name in ("validation", TOKENIZER_FOLDER):
        shutil.copytree(whole.root / name, folder / name)
    manifest["files"] = list_files(folder)
    write_json(folder / MANIFEST, manifest)
    assert len(Store(folder, "train")) == manifest["splits"]["train"]["num_samples"]
