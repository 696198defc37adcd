"""A run's config against its data: what the store decides is filled in, what contradicts it is an error."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

import numpy as np

from mmldlm.config.resume_compat import decided_freeze
from mmldlm.config.schema import Config
from mmldlm.data.batching.batch_plan import BatchPlan, MixtureOrder, build_batch_plan
from mmldlm.data.store.mixture import MixedStore
from mmldlm.data.store.store import Store, check_latents
from mmldlm.errors import UserError

# Rows whose latents are looked at when a run opens a store; prepare and verify-data look at all of them.
ROWS_CHECKED = 50_000
MAX_NORM_RATIO = 20.0  # times the root mean square norm of the training latents


@dataclass
class RunData:
    """The data of a run.

    Attributes:
        config: with model.latent_dim, vocab_size, the token ids and training.freeze=auto filled in.
        train, validation: the two splits. train_lengths, validation_lengths: [N] int32 tokens, EOS included, of the
            rows in use. latent_mean, latent_std: [D] fp32 scaling into model space. notes: what the user should read.
    """

    config: Config
    train: Store | MixedStore
    validation: Store | MixedStore
    train_lengths: np.ndarray
    validation_lengths: np.ndarray
    latent_mean: np.ndarray
    latent_std: np.ndarray
    notes: list[str] = field(default_factory=list)

    def max_latent_norm(self) -> float:
        """Beyond this norm a latent is a corrupted row, not an unusual one."""
        mean, std = self.train.latent_mean, self.train.latent_std
        return MAX_NORM_RATIO * float(np.sqrt((np.square(mean) + np.square(std)).sum()))

    def fingerprint(self) -> str:
        """SHA-256 of what the training split is made of, wherever it lies: a resume must find the same."""
        stores = self.train.stores if isinstance(self.train, MixedStore) else [self.train]
        files = [
            {name: entry for name, entry in store.manifest["files"].items() if name.startswith("train/")}
            for store in stores
        ]
        weights = list(map(float, self.train.weights)) if isinstance(self.train, MixedStore) else [1.0]
        return hashlib.sha256(json.dumps([files, weights], sort_keys=True).encode()).hexdigest()

    def training_plan(self, global_batch: int) -> BatchPlan:
        """The batch plan of training."""
        data, seed = self.config.data, self.config.training.seed
        order = None
        if isinstance(self.train, MixedStore):
            order = MixtureOrder([len(store) for store in self.train.stores], self.train.weights, seed)
        return build_batch_plan(data.batching, self.train_lengths, global_batch, seed, data.bucket_batches, order=order)


def open_data(config: Config) -> RunData:
    """Open both splits and settle everything that model and data must agree on.

    Raises:
        UserError: no store, damaged store, unusable latents, or a config that contradicts the data.
    """
    roots = config.data.mixture or {config.data.latent_data_root: 1.0}
    if None in roots:
        raise UserError(
            "data.latent_data_root: the folder of a prepared store",
            "no data.latent_data_root",
            "make one with `mmldlm prepare CORPUS --output-dir DIR`, then add data.latent_data_root=DIR",
        )
    max_tokens = config.model.max_seq_len - 1 if config.data.overlong == "truncate" else None
    splits = {
        split: [Store(root, split, config.data.verify, max_tokens) for root in roots]
        for split in ("train", "validation")
    }
    for store in (store for stores in splits.values() for store in stores):
        if len(store) == 0:
            raise UserError(
                f"samples in split {store.split} of {store.root}", "none", "prepare the store from a larger corpus"
            )
        for first, block in store.latent_blocks(ROWS_CHECKED):
            check_latents(block, f"{store.root}/{store.split}", store.latent_dim, first)
    if config.data.mixture is None:
        train, validation = splits["train"][0], splits["validation"][0]
    else:
        train, validation = (MixedStore(stores, list(roots.values())) for stores in splits.values())
    config = config.model_copy(deep=True)
    fill_from_store(config, train)
    config.training.freeze = decided_freeze(config)
    most = config.data.max_validation_samples  # auto: the evaluation chooses (it knows the global batch)
    limits = (config.data.max_train_samples, None if most == "auto" else most)
    lengths = [store.lengths[:limit] + 1 for store, limit in zip((train, validation), limits)]
    longest = int(max(part.max() for part in lengths))
    if longest > config.model.max_seq_len:
        raise UserError(
            f"texts of at most model.max_seq_len={config.model.max_seq_len} tokens, EOS included",
            f"one of {longest} in {train.root}",
            f"set model.max_seq_len={longest} or more, data.overlong=truncate, or prepare with --max-tokens "
            f"{config.model.max_seq_len - 1}",
        )
    notes = [
        f"{store.num_truncated:,} of {len(store):,} {name} texts cut to {max_tokens} tokens (data.overlong=truncate)"
        for name, store in (("training", train), ("validation", validation))
        if store.num_truncated
    ]
    if train.latents_per_text > 1:
        notes.append(f"{train.latents_per_text} latents a text (model.max_latents)")
    mean, std = _scaling(config, train)
    return RunData(config, train, validation, lengths[0], lengths[1], mean, std, notes)


def fill_from_store(config: Config, store: Store | MixedStore) -> None:
    model, tokenizer = config.model, store.manifest["tokenizer"]
    if model.latent_dim not in (None, store.latent_dim):
        raise UserError(
            f"model.latent_dim={store.latent_dim}, the dimension of the latents in {store.root}",
            f"model.latent_dim={model.latent_dim}",
            "leave model.latent_dim unset, or prepare the data with an encoder of that dimension",
        )
    if model.max_latents not in (1, store.latents_per_text):  # 1 is what every config says
        raise UserError(
            f"model.max_latents={store.latents_per_text}, the latents of every text in {store.root}",
            f"model.max_latents={model.max_latents}",
            f"leave model.max_latents unset, or prepare with --latents-per-text {model.max_latents}",
        )
    if config.tokenizer.name not in (None, tokenizer["name"], tokenizer.get("key")):
        raise UserError(
            f"tokenizer.name={tokenizer['name']}, with which {store.root} was prepared",
            f"tokenizer.name={config.tokenizer.name}",
            f"leave tokenizer.name unset, or prepare again with --tokenizer {config.tokenizer.name}",
        )
    if model.vocab_size is not None and model.vocab_size < tokenizer["vocab_size"]:
        raise UserError(
            f"model.vocab_size >= {tokenizer['vocab_size']}, the vocabulary of tokenizer {tokenizer['name']}",
            f"model.vocab_size={model.vocab_size}",
            "leave model.vocab_size unset (a text head smaller than the vocabulary fails at its first rare token)",
        )
    for key in ("mask_token_id", "pad_token_id", "eos_token_id"):
        if getattr(model, key) not in (None, tokenizer[key]):
            raise UserError(
                f"model.{key}={tokenizer[key]}, that of tokenizer {tokenizer['name']}",
                f"model.{key}={getattr(model, key)}",
                f"leave model.{key} unset",
            )
        setattr(model, key, tokenizer[key])
    model.latent_dim, model.max_latents = store.latent_dim, store.latents_per_text
    model.vocab_size = model.vocab_size or tokenizer["vocab_size"]


def _scaling(config: Config, store: Store | MixedStore) -> tuple[np.ndarray, np.ndarray]:
    dim = store.latent_dim
    if config.latent_diffusion.scaling == "none":
        return np.zeros(dim, np.float32), np.ones(dim, np.float32)
    if config.latent_diffusion.scaling == "sqrt_d":
        return np.zeros(dim, np.float32), np.full(dim, dim**-0.5, np.float32)
    std = store.latent_std
    # A constant dimension carries nothing; dividing by its (near) zero std would only blow up rounding.
    return store.latent_mean, np.where(std > 1e-6 * std.max(), std, 1.0).astype(np.float32)
