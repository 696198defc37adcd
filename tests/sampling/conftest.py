"""Toy denoisers that follow the forward contract of MultimodalMMDiT, and a small real checkpoint."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

MASK, PAD, EOS = 0, 1, 2


class Toy(nn.Module):
    """Contract of the forward pass; subclasses say the logits, the length logits and the latent prediction."""

    def __init__(self, vocab_size=8, max_seq_len=12, latent_dim=4, mean=0.0, std=1.0):
        super().__init__()
        self.config = SimpleNamespace(
            vocab_size=vocab_size, max_seq_len=max_seq_len, latent_dim=latent_dim,
            mask_token_id=MASK, pad_token_id=PAD, eos_token_id=EOS,
        )  # fmt: skip
        self.register_buffer("latent_mean", torch.full((latent_dim,), mean))
        self.register_buffer("latent_std", torch.full((latent_dim,), std))
        self.rows_computed = 0

    def scale_latents(self, raw):
        return (raw.float() - self.latent_mean) / self.latent_std

    def unscale_latents(self, latents):
        return latents.float() * self.latent_std + self.latent_mean

    def logits(self, tokens, latents, t, real):
        """[B, S, V] for a batch."""
        raise NotImplementedError

    def lengths(self, latents, batch):
        """[B, max_seq_len]."""
        return torch.zeros(batch, self.config.max_seq_len)

    def prediction(self, tokens, latents, t):
        """[B, D]."""
        return torch.zeros_like(latents)

    def forward(
        self, text_tokens, latents, text_timesteps=None, latent_timesteps=None, attention_mask=None, *,
        text_is_null=None, latent_is_null=None, text_positions=None, text_targets=None, text_weights=None,
    ):  # fmt: skip
        given = text_tokens if text_tokens is not None else latents
        self.rows_computed += len(given)
        out = {"length_logits": self.lengths(latents, len(given))}
        if latents is not None:
            out["latent_pred"] = self.prediction(text_tokens, latents, latent_timesteps)
        if text_tokens is None:
            return out
        if text_positions is not None and len(text_positions) == 0:
            return {**out, "text_logits": torch.empty(0, self.config.vocab_size)}
        logits = self.logits(text_tokens, latents, text_timesteps, attention_mask).float()
        logits[..., MASK] = float("-inf")
        rows = logits.flatten(0, 1)[text_positions]
        if text_targets is None:
            return {**out, "text_logits": rows}
        nll = nn.functional.cross_entropy(rows, text_targets, reduction="none")
        return {**out, "text_nll": nll, "text_correct": rows.argmax(-1) == text_targets}


class Perfect(Toy):
    """Knows the text behind a latent whose first component is its number."""

    def __init__(self, texts, **shape):
        super().__init__(**shape)
        self.texts = texts

    def _rows(self, latents):
        return [self.texts[int(i)] for i in latents[:, 0].round().tolist()]

    def logits(self, tokens, latents, t, real):
        out = torch.zeros(*tokens.shape, self.config.vocab_size)
        if latents is not None:
            for row, text in enumerate(self._rows(latents)):
                for place, token in enumerate([*text, EOS]):
                    out[row, place, token] = 50.0
        return out

    def lengths(self, latents, batch):
        out = torch.zeros(batch, self.config.max_seq_len)
        if latents is not None:
            for row, text in enumerate(self._rows(latents)):
                out[row, len(text)] = 50.0
        return out


@pytest.fixture(scope="session")
def toys():
    return SimpleNamespace(Toy=Toy, Perfect=Perfect, MASK=MASK, PAD=PAD, EOS=EOS)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A converted folder as `mmldlm convert` leaves it: random weights, a word tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from mmldlm.models import MultimodalMMDiT
    from mmldlm.models.mmdit.config import ModelConfig
    from mmldlm.tasks.translation.config import LatentDiffusionConfig, TextDiffusionConfig

    folder = tmp_path_factory.mktemp("converted")
    words = ["[MASK]", "[PAD]", "[EOS]", "[UNK]", *(f"word{i}" for i in range(28))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, mask_token="[MASK]", pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    model = MultimodalMMDiT(
        ModelConfig(
            hidden_size=16,
            n_blocks=1,
            n_heads=2,
            cond_dim=16,
            max_seq_len=16,
            latent_dim=6,
            tokens_per_latent=2,
            vocab_size=32,
            mask_token_id=MASK,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )  # fmt: skip
    )
    for name, parameter in model.named_parameters():
        if "modulation" in name or "to_latent" in name:
            nn.init.normal_(parameter, std=0.2)
    model.text_head.bias.data[words.index("[UNK]")] = -1e4  # as trained weights: all that is written are words
    model.set_latent_statistics(torch.zeros(6), torch.full((6,), 6**-0.5))
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values.update(
        text_diffusion=TextDiffusionConfig().model_dump(),
        latent_diffusion=LatentDiffusionConfig().model_dump(),
        training={"mode_weights": {"unconditional": 0.2, "l2t": 0.4, "t2l": 0.4}, "condition_dropout": 0.1},
    )
    (folder / "config.json").write_text(json.dumps(values))
    return folder
