"""Stores with the scaling of their latents, and what model and data must agree on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mmldlm.config.section import Section
from mmldlm.data.mixture import MixedStore
from mmldlm.data.run_data import StoreData, lengths_in_use, open_splits
from mmldlm.data.store import Store
from mmldlm.errors import UserError


@dataclass(kw_only=True)
class LatentData(StoreData):
    """Stores and the scaling of their latents.

    Attributes:
        config: Config of a task, with sections model, tokenizer and data (of stores).
        latent_mean: Mean, subtracted from a latent on its way into model space. [D] fp32
        latent_std: Standard deviation, by which the difference is divided. [D] fp32
    """

    config: Any
    latent_mean: np.ndarray
    latent_std: np.ndarray

    def shape(self) -> list[str]:
        """Return latent dimension and vocabulary size."""
        return [f"D={self.config.model.latent_dim}", f"V={self.config.model.vocab_size}"]


_Data = TypeVar("_Data", bound=LatentData)


def standard_scaling(store: Store | MixedStore) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation [D] fp32 of the training latents."""
    std = store.latent_std
    # A constant dimension carries nothing; dividing by its (near) zero std would only blow up
    # rounding.
    return store.latent_mean, np.where(std > 1e-6 * std.max(), std, 1.0).astype(np.float32)


def open_latent_data(
    kind: type[_Data],
    config: Any,
    scaling: Callable[[Store | MixedStore], tuple[np.ndarray, np.ndarray]] = standard_scaling,
    store_kind: str = "text",
) -> _Data:
    """Open both splits and fill in what they decide: latent_dim, num_latents, latent_grid,
    vocab_size, token ids.

    Args:
        kind: Class of the result.
        config: Config with sections model, tokenizer and data; a copy of it is filled in.
        scaling: Function that takes the training split to its mean and standard deviation [D].
        store_kind: Whose latents the task learns: text or image.

    Raises:
        UserError: no store, damaged store, unusable latents, or a config that contradicts the
            data.
    """
    max_seq_len = config.model.max_seq_len
    train, validation = open_splits(config.data, max_seq_len, store_kind)
    config = config.model_copy(deep=True)
    fill_from_store(config, train)
    train_lengths, validation_lengths = lengths_in_use(config.data, max_seq_len, train, validation)
    mean, std = scaling(train)
    return kind(
        config=config,
        train=train,
        validation=validation,
        train_lengths=train_lengths,
        validation_lengths=validation_lengths,
        notes=data_notes(max_seq_len, train, validation),
        latent_mean=mean,
        latent_std=std,
    )


def data_notes(
    max_seq_len: int, train: Store | MixedStore, validation: Store | MixedStore
) -> list[str]:
    """Return lines for the user about texts that were cut and about several latents per text."""
    notes = [
        f"{store.num_truncated:,} of {len(store):,} {name} texts cut to {max_seq_len - 1} tokens "
        "(data.long_texts=truncate)"
        for name, store in (("training", train), ("validation", validation))
        if store.num_truncated
    ]
    if train.latents_per_text > 1:
        notes.append(f"{train.latents_per_text} latents per text (model.num_latents)")
    return notes


def fill_from_store(config: Any, store: Store | MixedStore) -> None:
    """Set what the store decides; a config that contradicts it is an error."""
    model, tokenizer = config.model, store.manifest["tokenizer"]
    if store.num_codes is not None and "num_codes" not in type(model).model_fields:
        raise UserError(
            f"a store of values for task={config.task}",
            f"ids of {store.num_codes:,} codes in {store.root}",
            "train with task=image_codes (--config-name image_text_discrete), or prepare with"
            " --latents pixels",
        )
    if model.latent_dim not in (None, store.latent_dim):
        raise UserError(
            f"model.latent_dim={store.latent_dim}, the dimension of the latents in {store.root}",
            f"model.latent_dim={model.latent_dim}",
            "leave model.latent_dim unset, or prepare the data with an encoder of that dimension",
        )
    # 1 is the default, so a config that does not set num_latents fits every store.
    if model.num_latents not in (1, store.latents_per_text):
        raise UserError(
            f"model.num_latents={store.latents_per_text}, the latents of every text in"
            f" {store.root}",
            f"model.num_latents={model.num_latents}",
            "leave model.num_latents unset, or prepare with --latents-per-text"
            f" {model.num_latents}",
        )
    if config.tokenizer.name not in (None, tokenizer["name"], tokenizer.get("key")):
        raise UserError(
            f"tokenizer.name={tokenizer['name']}, with which {store.root} was prepared",
            f"tokenizer.name={config.tokenizer.name}",
            "leave tokenizer.name unset, or prepare again with --tokenizer"
            f" {config.tokenizer.name}",
        )
    if model.vocab_size is not None and model.vocab_size < tokenizer["vocab_size"]:
        raise UserError(
            f"model.vocab_size >= {tokenizer['vocab_size']}, the vocabulary of tokenizer"
            f" {tokenizer['name']}",
            f"model.vocab_size={model.vocab_size}",
            "leave model.vocab_size unset (a text head smaller than the vocabulary fails at its"
            " first rare token)",
        )
    for key in ("mask_token_id", "pad_token_id", "eos_token_id"):
        if getattr(model, key) not in (None, tokenizer[key]):
            raise UserError(
                f"model.{key}={tokenizer[key]}, that of tokenizer {tokenizer['name']}",
                f"model.{key}={getattr(model, key)}",
                f"leave model.{key} unset",
            )
        setattr(model, key, tokenizer[key])
    grid, grids = _grid_of(model, store), _grids_of(model, store)
    model.latent_dim, model.num_latents = store.latent_dim, store.latents_per_text
    # Other models have no positions of latents.
    if "latent_grid" in type(model).model_fields:
        model.latent_grid, model.latent_grids = grid, grids
        model.check_places()
    model.vocab_size = model.vocab_size or tokenizer["vocab_size"]


def _grids_of(model: Section, store: Store | MixedStore) -> list[list[int]] | None:
    """Return the grids of a mixture of images of several sizes; None: there is one size.

    Raises:
        UserError: model.latent_grids names others.
    """
    grids, wanted = getattr(store, "grids", None), getattr(model, "latent_grids", None)
    if wanted not in (None, grids):
        raise UserError(
            f"model.latent_grids={'null' if grids is None else grids} for the images of the"
            " stores",
            f"model.latent_grids={wanted}",
            "leave model.latent_grids unset, or train on the sizes of that model (data.mixture)",
        )
    return grids


def _grid_of(model: Section, store: Store | MixedStore) -> list[int] | None:
    """Return rows and columns of the latents in the store's images, or model.latent_grid where the
    store has none.

    Raises:
        UserError: model.latent_grid contradicts the store.
    """
    grid = (store.manifest.get("image") or {}).get("grid")
    wanted = getattr(model, "latent_grid", None)
    if wanted is None:
        return grid
    # Latents without places in an image may have an order: [1, N].
    fits = math.prod(wanted) == store.latents_per_text if grid is None else wanted == grid
    if not fits:
        raise UserError(
            f"model.latent_grid{'' if grid is None else f'={grid}'} for the"
            f" {store.latents_per_text} latents of each sample of {store.root}",
            f"model.latent_grid={wanted}",
            "leave model.latent_grid unset",
        )
    return wanted
