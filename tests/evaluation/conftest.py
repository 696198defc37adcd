"""A small real model and a store written by hand, so that no encoder is needed."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

MASK, PAD, EOS, VOCAB, DIM = 0, 1, 2, 32, 6


def write_store(
    root,
    num_samples: int,
    seed: int = 0,
    longest: int = 10,
    latents_per_text: int = 1,
    num_train: int = 0,
):
    """A packed store, without a training split by default: words `word0` .. and random unit
    latents.
    """
    splits = {"validation": num_samples} | ({"train": num_train} if num_train else {})
    files = {}
    for number, (split, count) in enumerate(splits.items()):
        files |= _write_split(root / split, count, seed + number, longest, latents_per_text)
    manifest = {
        "format": "mmldlm-store",
        "version": 1,
        "latent_dim": DIM,
        "encoder": {"name": "none", "normalize": True},
        "latent_stats": {
            "mean": [0.0] * DIM,
            "std": [DIM**-0.5] * DIM,
            "num_samples": num_samples,
        },
        "tokenizer": {
            "key": "t",
            "name": "t",
            "vocab_size": VOCAB,
            "mask_token_id": MASK,
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "unk_token_id": 3,
            "sha256": "x",
        },
        "splits": {split: {"num_samples": count} for split, count in splits.items()},
        "files": files,
    }
    if latents_per_text > 1:
        manifest["latents_per_text"] = latents_per_text
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def _write_split(folder, num_samples: int, seed: int, longest: int, latents_per_text: int):
    """Write the arrays of one split; return their entries of the manifest."""
    shape = (DIM,) if latents_per_text == 1 else (latents_per_text, DIM)
    rng = np.random.default_rng(seed)
    texts = [rng.integers(4, VOCAB, size=rng.integers(2, longest + 1)) for _ in range(num_samples)]
    sentences = [" ".join(f"word{token - 4}" for token in text).encode() for text in texts]
    latents = rng.standard_normal((num_samples, *shape)).astype(np.float32)
    latents /= np.linalg.norm(latents, axis=-1, keepdims=True)
    arrays = {
        "text": np.frombuffer(b"".join(sentences), dtype=np.uint8),
        "text_offsets": np.cumsum([0, *map(len, sentences)]),
        "tokens": np.concatenate(texts).astype(np.uint16),
        "token_offsets": np.cumsum([0, *map(len, texts)]),
        "latents": latents,
    }
    folder.mkdir(parents=True)
    files = {}
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        np.save(path, array)
        files[f"{folder.name}/{name}.npy"] = {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    return files


class Words:
    """Stands for a tokenizer where only decoding is wanted."""

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(f"word{token - 4}" for token in row) for row in rows]


def small_model(seed: int = 0, gates: float = 0.2, **shape):
    from mmldlm.models import MultimodalMMDiT
    from mmldlm.models.mmdit_config import ModelConfig

    torch.manual_seed(seed)
    values = {
        "hidden_size": 16,
        "n_blocks": 1,
        "n_heads": 2,
        "cond_dim": 16,
        "max_seq_len": 16,
        "tokens_per_latent": 2,
    }
    ids = {
        "vocab_size": VOCAB,
        "mask_token_id": MASK,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "latent_dim": DIM,
    }
    model = MultimodalMMDiT(ModelConfig(**{**values, **ids, **shape}))
    for name, parameter in model.named_parameters():
        if gates and ("modulation" in name or "to_latent" in name):
            nn.init.normal_(parameter, std=gates)
    model.set_latent_statistics(torch.zeros(DIM), torch.full((DIM,), DIM**-0.5))
    return model.eval()


@pytest.fixture
def pretrained():
    from mmldlm.tasks.text_task import Pretrained
    from mmldlm.tasks.translation.config import LatentDiffusionConfig, TextDiffusionConfig

    weights = {"unconditional": 0.0, "l2t": 0.5, "t2l": 0.5}
    return Pretrained(
        small_model(), Words(), TextDiffusionConfig(), LatentDiffusionConfig(), weights, 0.1
    )


@pytest.fixture
def store(tmp_path):
    from mmldlm.data.store import Store

    return Store(write_store(tmp_path / "store", 40), "validation")


@pytest.fixture(scope="session")
def make():
    return SimpleNamespace(
        store=write_store, model=small_model, MASK=MASK, PAD=PAD, EOS=EOS, VOCAB=VOCAB, DIM=DIM
    )
