"""The weights that a run starts from: a function of config and data, equal on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmldlm.data.encoders.model_files import find_model_folder, name_to_load, read_tokenizer
from mmldlm.data.encoders.sentence_transformer import transformer_folder
from mmldlm.data.mixture import MixedStore
from mmldlm.data.store import Store, load_tokenizer
from mmldlm.errors import UserError
from mmldlm.models.plain import PlainTransformer
from mmldlm.tasks.latent_data import LatentData
from mmldlm.utils.atomic_files import sha256_of

# Number of texts, spread over the split, in which tokens are counted: enough to rank them.
COUNTED_TEXTS = 65_536
# Occurrences added to every token.
UNSEEN = 0.1
# Standard deviation of a component, as that of random token embeddings.
_STD = 0.02
# Of a vocabulary. Where the encoder knows fewer, most texts would start from zeros.
LEAST_SPELLED = 0.5


def counted_texts(num_texts: int) -> np.ndarray:
    """Rows of a split of so many texts in which tokens are counted: all, or COUNTED_TEXTS spread
    over it.
    """
    return np.unique(np.linspace(0, num_texts - 1, min(num_texts, COUNTED_TEXTS)).astype(np.int64))


def token_counts(data: LatentData) -> np.ndarray:
    """Occurrences [V] of each token in `counted_texts` of the training split, EOS included."""
    spread = counted_texts(len(data.train_lengths))
    tokens = np.concatenate(data.train.tokens(spread))
    counts = np.bincount(tokens, minlength=data.config.model.vocab_size)
    counts[data.config.model.eos_token_id] += len(spread)
    return counts


def log_token_frequencies(data: LatentData) -> np.ndarray:
    """[V] fp32 log probabilities of tokens without a context."""
    counts = token_counts(data) + UNSEEN
    return np.log(counts / counts.sum()).astype(np.float32)


def log_length_frequencies(data: LatentData) -> np.ndarray:
    """[max_seq_len] fp32 log probabilities of lengths 1 .. max_seq_len."""
    counts = np.ones(data.config.model.max_seq_len)
    for lengths in data.train_lengths.blocks():
        counts += np.bincount(lengths - 1, minlength=len(counts))
    return np.log(counts / counts.sum()).astype(np.float32)


def encoder_token_embeddings(store: Store | MixedStore, hidden_size: int) -> np.ndarray:
    """The encoder's input embeddings, rotated to their principal components and cut or zero-filled
    to the model's width.

    A token's meaning to the encoder is then known from the first step, in both directions: what a
    latent says of its words, and what words make of a latent.

    Returns:
        [V, hidden_size] fp32, centred, standard deviation 0.02 over the filled components of the
        encoder's tokens. A token of another tokenizer has the mean of the tokens that spell it,
        zeros where the encoder cannot spell it. A function of weights and tokenizers alone (signs
        fixed by each component's largest entry), so every rank makes the same.

    Raises:
        UserError: the encoder here is another than the store's, or knows too few of its tokens.
    """
    from safetensors import safe_open

    encoder, tokenizer = store.manifest["encoder"], store.manifest["tokenizer"]
    path = transformer_folder(find_model_folder(name_to_load(encoder))[0]) / "model.safetensors"
    if not path.is_file():
        raise UserError(
            f"the weights of encoder {encoder['name']} in one file, {path}",
            "no such file",
            "set model.token_embedding_init=random",
        )
    # `mmldlm pack --encoder` records a name alone.
    if encoder.get("weights_sha256") not in (None, sha256_of(path)):
        raise UserError(
            f"the weights of encoder {encoder['name']} with which {store.root} was prepared",
            f"others in {path.parent}",
            "install the same release, or set model.token_embedding_init=random",
        )
    with safe_open(path, framework="numpy") as file:
        name = next(key for key in file.keys() if key.endswith("word_embeddings.weight"))
        table = file.get_tensor(name).astype(np.float64)
    table -= table.mean(0)
    # Eigenvalues ascend.
    _, directions = np.linalg.eigh(table.T @ table)
    directions = directions[:, ::-1][:, :hidden_size]
    largest = np.abs(directions).argmax(0)
    directions = directions * np.sign(directions[largest, np.arange(directions.shape[1])])
    projected = table @ directions
    projected *= _STD / projected.std()
    embeddings = np.zeros((tokenizer["vocab_size"], hidden_size), dtype=np.float32)
    for token, pieces in _pieces(store, path.parent, len(table)).items():
        embeddings[token, : projected.shape[1]] = projected[pieces].mean(0)
    return embeddings


def _pieces(store: Store | MixedStore, encoder_folder: Path, count: int) -> dict[int, list[int]]:
    """`spellings` of the store's tokens by the `count` tokens of its encoder."""
    encoder, tokenizer = store.manifest["encoder"], store.manifest["tokenizer"]
    if tokenizer["name"] == encoder["name"]:
        if count > tokenizer["vocab_size"]:
            raise UserError(
                f"{count} tokens, as encoder {encoder['name']} has",
                f"{tokenizer['vocab_size']} in {store.root}",
                "set model.token_embedding_init=random",
            )
        return {token: [token] for token in range(count)}
    theirs = read_tokenizer(
        encoder_folder, f"the encoder's tokenizer in {encoder_folder}", "install it again"
    )
    pieces = spellings(load_tokenizer(store.root), theirs)
    if len(pieces) < LEAST_SPELLED * tokenizer["vocab_size"]:
        raise UserError(
            f"a tokenizer of which encoder {encoder['name']} can spell most tokens, for "
            "model.token_embedding_init=encoder",
            f"{len(pieces)} of {tokenizer['vocab_size']} in {store.root}",
            f"prepare with --tokenizer {encoder['name']}, or set"
            " model.token_embedding_init=random",
        )
    return pieces


def spellings(own: Any, theirs: Any) -> dict[int, list[int]]:
    """The tokens of another tokenizer that spell each token of this one; special tokens stand for
    each other.

    Args:
        own, theirs: Fast Hugging Face tokenizers of the model and of the table.

    Returns:
        Without tokens that the other one cannot spell.
    """
    vocabulary, specials = theirs.get_vocab(), set(own.all_special_ids)
    end = theirs.sep_token_id if theirs.eos_token_id is None else theirs.eos_token_id
    alike = {
        own.mask_token_id: theirs.mask_token_id, own.pad_token_id: theirs.pad_token_id,
        own.unk_token_id: theirs.unk_token_id, own.eos_token_id: end,
    }  # fmt: skip
    spelling = {
        token_id: [other] for token_id, other in alike.items() if None not in (token_id, other)
    }
    for token, token_id in own.get_vocab().items():
        if token_id in specials:
            continue
        # The same string, as "##ing" in two WordPiece vocabularies.
        if token in vocabulary:
            spelling[token_id] = [vocabulary[token]]
            continue
        text = own.decode([token_id]).removeprefix("##").strip()
        pieces = theirs(text, add_special_tokens=False)["input_ids"]
        if pieces and theirs.unk_token_id not in pieces:
            spelling[token_id] = pieces
    return spelling


def set_first_weights(model: Any, data: LatentData) -> None:
    """Set what the data decides of a seeded model: latent statistics, and as the config says token
    embeddings and output biases.

    Args:
        model: MultimodalMMDiT or PlainTransformer.
    """
    config = data.config.model
    mean, std = torch.from_numpy(data.latent_mean), torch.from_numpy(data.latent_std)
    model.set_latent_statistics(mean, std)
    if config.token_embedding_init == "encoder":
        embeddings = torch.from_numpy(encoder_token_embeddings(data.train, config.hidden_size))
        is_plain = isinstance(model, PlainTransformer)
        owner = model if is_plain else model.text_encoder
        owner.token_embedding.weight.data[: len(embeddings)].copy_(embeddings)
    if config.output_bias_init == "frequency":
        model.text_head.bias.data.copy_(torch.from_numpy(log_token_frequencies(data)))
        if model.length_head is not None:
            model.length_head[-1].bias.data.copy_(torch.from_numpy(log_length_frequencies(data)))
