"""Hypotheses of a store without a model: each sample's words in reverse, with the next sample's
latent.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from mmldlm.data.manifest import sample_checksums
from mmldlm.data.store import Store, read_manifest
from mmldlm.data.writers import StoreSplit
from mmldlm.tasks.corrector.hypotheses import HYPOTHESES_VERSION
from mmldlm.utils.atomic_files import list_files, write_json


def make_hypotheses(store: Path, folder: Path) -> Path:
    """Write hypotheses for all but every third sample, in the layout of `mmldlm hypotheses`."""
    manifest, summaries = read_manifest(store), {}
    for split in manifest["splits"]:
        samples = Store(store, split)
        rows = np.array([row for row in range(len(samples)) if row % 3])
        found = samples.get(rows)
        writer = StoreSplit(
            folder, split, [samples.latent_dim], manifest["tokenizer"]["vocab_size"], True
        )
        writer.add(
            samples.texts(rows),
            [ids[::-1] for ids in found.tokens],
            np.roll(found.latents, 1, 0),
            rows,
        )
        summaries[split] = writer.close()
    shutil.copytree(store / "tokenizer", folder / "tokenizer")
    manifest |= {
        "splits": summaries,
        "hypotheses": {"of": sample_checksums(manifest), "version": HYPOTHESES_VERSION},
    }
    write_json(folder / "manifest.json", manifest | {"files": list_files(folder)})
    return folder
