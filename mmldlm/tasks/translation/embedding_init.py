"""Token embeddings to start from: those of the encoder that made the latents, where it shares the text's tokenizer."""

from __future__ import annotations

import numpy as np

from mmldlm.data.encoders.download import find_model_folder
from mmldlm.data.store.store import Store
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import sha256_of

# Standard deviation of a component, as that of random token embeddings.
_STD = 0.02


def encoder_token_embeddings(store: Store, hidden_size: int) -> np.ndarray:
    """The encoder's input embeddings, rotated to their principal components and cut or zero-filled to the model's
    width.

    A token's meaning to the encoder is then known from the first step, in both directions: what a latent says of its
    words, and what words make of a latent.

    Returns:
        [V, hidden_size] fp32, centred, standard deviation 0.02 over the filled components. A function of the weights
        alone
        (signs fixed by each component's largest entry), so every rank makes the same.

    Raises:
        UserError: the store's tokenizer is not the encoder's own, or the encoder here is another than the store's.
    """
    from safetensors import safe_open

    encoder, tokenizer = store.manifest["encoder"], store.manifest["tokenizer"]
    if tokenizer["name"] != encoder["name"]:
        raise UserError(
            f"a store tokenized by what encoder {encoder['name']} ships, for model.token_embedding_init=encoder",
            f"tokenizer {tokenizer['name']} in {store.root}",
            f"prepare with --tokenizer {encoder['name']}, or set model.token_embedding_init=random",
        )
    path = find_model_folder(encoder["name"])[0] / "model.safetensors"
    if sha256_of(path) != encoder["weights_sha256"]:
        raise UserError(
            f"the weights of encoder {encoder['name']} with which {store.root} was prepared",
            f"others in {path.parent}",
            "install the same release, or set model.token_embedding_init=random",
        )
    with safe_open(path, framework="numpy") as file:
        name = next(key for key in file.keys() if key.endswith("word_embeddings.weight"))
        table = file.get_tensor(name).astype(np.float64)
    if len(table) > tokenizer["vocab_size"]:
        raise UserError(
            f"{len(table)} tokens, as encoder {encoder['name']} has", f"{tokenizer['vocab_size']} in {store.root}",
            "set model.token_embedding_init=random",
        )  # fmt: skip
    table -= table.mean(0)
    _, directions = np.linalg.eigh(table.T @ table)  # ascending
    directions = directions[:, ::-1][:, :hidden_size]
    largest = np.abs(directions).argmax(0)
    directions = directions * np.sign(directions[largest, np.arange(directions.shape[1])])
    projected = table @ directions
    embeddings = np.zeros((tokenizer["vocab_size"], hidden_size), dtype=np.float32)
    embeddings[: len(table), : projected.shape[1]] = projected * (_STD / projected.std())
    return embeddings
