"""The data of a run: two splits, their lengths, and the config with what the data decides.

`StoreData` is that of a task that trains on prepared stores: opened, checked, and compared with
the config.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.config.schema import Config
from mmldlm.data.batch_plan import BatchPlan, MixtureOrder, Order, SpacedOrder, build_batch_plan
from mmldlm.data.codebook import check_ids
from mmldlm.data.config import StoreDataConfig
from mmldlm.data.image_codec import max_image_norm
from mmldlm.data.lengths import AnyLengths, Lengths
from mmldlm.data.mixture import MixedStore
from mmldlm.data.store import TOKENIZER_FOLDER, Store, check_latents
from mmldlm.errors import UserError

# Most rows whose latents are checked when a run opens a store, and their most values: an image has
# thousands; prepare and verify-data check all of them.
ROWS_CHECKED, VALUES_CHECKED = 50_000, 1 << 26
# In units of the root mean square norm of the training latents.
MAX_NORM_RATIO = 20.0


@dataclass(kw_only=True)
class RunData(ABC):
    """The data of a run.

    Attributes:
        config: Config with the keys filled in that the data decides.
        train: Training split, read by the task's collator.
        validation: Validation split.
        train_lengths: [N] int32 tokens of the training samples in use, of numpy or as Lengths.
        validation_lengths: [M] int32 tokens of the validation samples in use, likewise.
        source: File or folder that the data comes from, for the screen and for messages about bad
            samples.
        notes: Lines for the user.
    """

    config: Config
    train: Any
    validation: Any
    train_lengths: AnyLengths
    validation_lengths: AnyLengths
    source: str = "the task's data"
    notes: list[str] = field(default_factory=list)

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash of the content of the training split, which a resumed run must match."""

    def locate(self, split: Any, sample: int) -> tuple[str, int]:
        """Return the file or folder of a sample, and its row in it, to report a bad one.

        Args:
            split: Split of the sample, self.train or self.validation.
        """
        return self.source, sample

    def training_plan(self, global_batch: int) -> BatchPlan:
        """Return the batch plan of training."""
        data, seed = self.config.data, self.config.training.seed
        return build_batch_plan(
            data.batching,
            self.train_lengths,
            global_batch,
            seed,
            data.bucket_batches,
            order=self._order(global_batch),
        )

    def _order(self, global_batch: int) -> Order | None:
        """Return the order of the training samples; None: reshuffled in every epoch."""
        return None

    def validation_orders(self, count: int) -> list[Order]:
        """Return which validation samples an evaluation of `count` uses; samples of two orders
        share no batch.
        """
        return [SpacedOrder(count, len(self.validation_lengths))]

    def describe(self) -> str:
        """Return one line for the screen."""
        return (
            f"{len(self.train_lengths):,} training and {len(self.validation_lengths):,} validation"
            f" samples from {self.source}, {int(self.train_lengths.sum()):,} tokens"
        )

    def shape(self) -> list[str]:
        """Return the dimensions that the data decides, for preflight: for example ["D=384",
        "V=30522"].
        """
        return []

    def files_to_keep(self) -> dict[str, Path]:
        """Files to copy into every checkpoint: path below the checkpoint -> path now (for example
        a tokenizer).
        """
        return {}


@dataclass(kw_only=True)
class StoreData(RunData):
    """Both splits of one store, or of a mixture of stores. Lengths count the EOS token."""

    train: Store | MixedStore
    validation: Store | MixedStore
    train_lengths: Lengths
    validation_lengths: Lengths

    def __post_init__(self):
        self.source = " + ".join(self.config.data.roots)

    def max_latent_norm(self) -> float:
        """Return the norm above which a latent is a corrupted row, not an unusual one."""
        if self.train.kind == "image":
            return max_image_norm(self.train.manifest)
        mean, std = self.train.latent_mean, self.train.latent_std
        return MAX_NORM_RATIO * float(np.sqrt((np.square(mean) + np.square(std)).sum()))

    def fingerprint(self) -> str:
        """SHA-256 of the files and weights of the training split."""
        stores = self.train.stores if isinstance(self.train, MixedStore) else [self.train]
        files = [
            {
                name: entry
                for name, entry in store.manifest["files"].items()
                # The lengths follow from the rest, and older stores have none.
                if name.startswith("train/") and name != "train/lengths.npy"
            }
            for store in stores
        ]
        weights = (
            list(map(float, self.train.weights)) if isinstance(self.train, MixedStore) else [1.0]
        )
        return hashlib.sha256(json.dumps([files, weights], sort_keys=True).encode()).hexdigest()

    def locate(self, split: Store | MixedStore, sample: int) -> tuple[str, int]:
        """Return the folder of a sample's split, and its row in it."""
        folder, row = split.locate(sample)
        return str(folder), row

    def _order(self, global_batch: int) -> Order | None:
        if not isinstance(self.train, MixedStore):
            return None
        counts = [len(store) for store in self.train.stores]
        run = 1 if self.train.grids is None else global_batch
        return MixtureOrder(counts, self.train.weights, self.config.training.seed, run)

    def validation_orders(self, count: int) -> list[Order]:
        orders = super().validation_orders(count)
        if not isinstance(self.validation, MixedStore) or self.validation.grids is None:
            return orders
        chosen, first = orders[0].ids(np.arange(count), 0), 0
        orders = []
        for store in self.validation.stores:
            num_chosen = int(((chosen >= first) & (chosen < first + len(store))).sum())
            orders += [SpacedOrder(num_chosen, len(store), first)] if num_chosen else []
            first += len(store)
        return orders

    def describe(self) -> str:
        """Return one line for the screen."""
        return (
            f"{len(self.train_lengths):,} training and {len(self.validation_lengths):,} validation"
            f" texts from {self.source}, {int(self.train_lengths.sum()):,} tokens, latents of"
            f" {self.train.latent_dim}"
        )

    def files_to_keep(self) -> dict[str, Path]:
        """The tokenizer's files."""
        folder = self.train.root / TOKENIZER_FOLDER
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return {f"{TOKENIZER_FOLDER}/{path.relative_to(folder)}": path for path in files}


# Kind of a store -> what else to do with it.
_OTHER_TASK = {
    "image": "train it with task=image_text (--config-name image_text_quick)",
    "text": (
        "train it with task=translation, or prepare images (mmldlm prepare glyphs --output-dir"
        " DIR)"
    ),
}


def check_store_kind(store: Store, kind: str) -> None:
    """Check that a store holds what a task learns.

    Args:
        kind: Kind of the store, text or image.

    Raises:
        UserError: it holds the other.
    """
    store_kind = store.manifest.get("kind", "text")
    if store_kind != kind:
        fix = _OTHER_TASK.get(store_kind, "prepare the data again")
        raise UserError(f"a store of {kind}s in {store.root}", f"a store of {store_kind}s", fix)


def open_splits(
    config: StoreDataConfig, max_seq_len: int, kind: str = "text"
) -> tuple[Store | MixedStore, Store | MixedStore]:
    """Open and check the training and the validation split.

    Args:
        max_seq_len: Longest text in tokens, EOS included.
        kind: What the task learns, text or image.

    Raises:
        UserError: no store, one of another kind, a damaged or empty store, unusable latents.
    """
    if not config.roots:
        raise UserError(
            "data.latent_data_root: the folder of a prepared store",
            "no data.latent_data_root",
            "make one with `mmldlm prepare CORPUS --output-dir DIR`, then add"
            " data.latent_data_root=DIR",
        )
    max_tokens = max_seq_len - 1 if config.long_texts == "truncate" else None
    splits = {
        split: [Store(root, split, config.verify, max_tokens) for root in config.roots]
        for split in ("train", "validation")
    }
    for store in (store for stores in splits.values() for store in stores):
        check_store_kind(store, kind)
        if len(store) == 0:
            raise UserError(
                f"samples in split {store.split} of {store.root}",
                "none",
                "prepare the store from a larger corpus",
            )
        num_values = store.latents_per_text * store.latent_dim
        num_rows = max(min(ROWS_CHECKED, VALUES_CHECKED // num_values), 1)
        for first, block in store.latent_blocks(num_rows):
            where = f"{store.root}/{store.split}"
            check_latents(block, where, store.latent_dim, first, store.kind == "image")
            if store.num_codes is not None:
                check_ids(block, store.num_codes, where, first)
    if config.mixture is None:
        return splits["train"][0], splits["validation"][0]
    weights = list(config.mixture.values())
    train, validation = (MixedStore(stores, weights) for stores in splits.values())
    return train, validation


def lengths_in_use(
    config: StoreDataConfig,
    max_seq_len: int,
    train: Store | MixedStore,
    validation: Store | MixedStore,
) -> tuple[Lengths, Lengths]:
    """Return the lengths, EOS included, of the samples of both splits within the config's limits.

    Raises:
        UserError: a text is longer than max_seq_len.
    """
    lengths = [part + 1 for part in config.limit_samples(train.lengths, validation.lengths)]
    longest = max(part.max() for part in lengths)
    if longest > max_seq_len:
        raise UserError(
            f"texts of at most model.max_seq_len={max_seq_len} tokens, EOS included",
            f"one of {longest} in {train.root}",
            f"set model.max_seq_len={longest} or more, data.long_texts=truncate, or prepare with"
            f" --max-tokens {max_seq_len - 1}",
        )
    return lengths[0], lengths[1]
