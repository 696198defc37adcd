"""A CLIPModel of random weights and a feature network, saved as users would name them."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn


def save_clip(folder: Path) -> Path:
    """Write a CLIPModel of 8-d embeddings, 32-px images and texts of 16 characters with its
    processor; return it.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import (
        CLIPConfig,
        CLIPImageProcessor,
        CLIPModel,
        CLIPProcessor,
        CLIPTokenizer,
    )

    letters = sorted(ByteLevel.alphabet())
    words = [
        *letters,
        *(letter + "</w>" for letter in letters),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    tokenizer = CLIPTokenizer(vocab={word: row for row, word in enumerate(words)}, merges=[])
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    ends = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1}
    text = shape | ends | {"vocab_size": len(words), "max_position_embeddings": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vision = shape | {"image_size": 32, "patch_size": 16}
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    model.save_pretrained(folder)
    pixels = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    CLIPProcessor(image_processor=pixels, tokenizer=tokenizer).save_pretrained(folder)
    return folder


class _Features(nn.Module):
    """The mean color, and like StyleGAN's file, something else unless features are asked for."""

    def forward(self, images: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        assert images.dtype == torch.uint8
        means = images.float().mean((2, 3))
        return means if return_features else means.softmax(1)


def save_features(path: Path) -> str:
    """Write the mean color as TorchScript; return its path."""
    with warnings.catch_warnings():
        # Of torch.jit, the form of published networks.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(_Features()).save(str(path))
    return str(path)
