"""A store with NaN latents that no start finds: a start looks at some 50,000 rows, and the NaN lie
between these.
"""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path

import numpy as np

from mmldlm.data.run_data import ROWS_CHECKED
from mmldlm.data.store import Store, read_manifest
from mmldlm.utils.atomic_files import list_files, write_json

BAD_SHARE = 0.015  # of the samples: one every eight batches of eight


def plant_nan(source: Path, folder: Path, chance: random.Random) -> tuple[Path, frozenset[int]]:
    """Repeat a small store's training samples until a start leaves rows out, and make some of
    those NaN.

    Returns:
        The new store, and its rows that are NaN.
    """
    store, train = folder / "store", folder / "store" / "train"
    shutil.copytree(source, store)
    manifest = read_manifest(store)
    split = manifest["splits"]["train"]
    times = math.ceil(1.2 * ROWS_CHECKED / split["num_samples"])
    for name in ("latents", "text", "tokens", "lengths"):
        rows = np.load(train / f"{name}.npy")
        np.save(train / f"{name}.npy", np.concatenate([rows] * times))
    for name in ("text", "token"):
        offsets = np.load(train / f"{name}_offsets.npy")
        parts = [offsets[:-1] + n * offsets[-1] for n in range(times)]
        np.save(train / f"{name}_offsets.npy", np.concatenate([*parts, offsets[-1:] * times]))
    split["num_samples"] *= times
    split["num_tokens"] *= times
    num_rows = split["num_samples"]
    manifest["files"] = list_files(store)
    manifest["files"].pop("manifest.json")
    write_json(store / "manifest.json", manifest)
    checked = {
        first + n
        for first, block in Store(store, "train").latent_blocks(ROWS_CHECKED)
        for n in range(len(block))
    }
    bad = chance.sample(sorted(set(range(num_rows)) - checked), int(BAD_SHARE * num_rows))
    latents = np.load(train / "latents.npy", mmap_mode="r+")
    latents[bad, 3] = math.nan
    latents.flush()
    return store, frozenset(bad)
