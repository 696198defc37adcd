"""Toy denoisers that follow the forward contract of MultimodalMMDiT, and a small real
checkpoint.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from mmldlm.models.base import ModelOutput
from mmldlm.models.token_scores import TokenScores
from tests.support.forward import encode, scores_of, values_of

MASK, PAD, EOS = 0, 1, 2


class Toy(nn.Module):
    """Contract of the forward pass; subclasses say the logits, the length logits and the latent
    prediction.
    """

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

    def encode_latents(self, latents, batch=None, **_):
        return encode(latents)

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
        self,
        text,
        inputs=None,
        query=None,
    ):
        latents = values_of(inputs)
        given = text.tokens if text is not None else latents
        self.rows_computed += len(given)
        out = ModelOutput(length_logits=self.lengths(latents, len(given)))
        if latents is not None:
            tokens = None if text is None else text.tokens
            out = out._replace(latent=self.prediction(tokens, latents, inputs.timesteps))
        if text is None:
            return out
        if query.positions is not None and len(query.positions) == 0:
            return out._replace(text=TokenScores(torch.empty(0, self.config.vocab_size)))
        logits = self.logits(text.tokens, latents, text.timesteps, text.attention_mask).float()
        logits[..., MASK] = float("-inf")
        return out._replace(text=scores_of(logits.flatten(0, 1)[query.positions], query))


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


class Noisy(Toy):
    """Logits that depend on tokens, latent and time; notes what it is asked."""

    def __init__(self, **shape):
        super().__init__(**shape)
        self.table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        self.asked = []

    def logits(self, tokens, latents, t, real):
        self.asked.append((tokens.clone(), t.clone(), real.clone()))
        near = self.table[tokens].cumsum(1) * real[..., None]
        return (
            near
            + t[:, None, None]
            + (0 if latents is None else latents.sum(1)[:, None, None] * self.table[3])
        )

    def lengths(self, latents, batch):
        out = torch.zeros(batch, self.config.max_seq_len)
        return (
            out
            if latents is None
            else out + latents[:, :1] * torch.linspace(-1, 1, self.config.max_seq_len)
        )


class Enumerable(Toy):
    """Exact conditionals of a joint distribution over the 27 strings of three tokens 3, 4, 5, far
    from independent.

    With independent=True those of the product of its marginals.
    """

    def __init__(self, independent=False):
        super().__init__(max_seq_len=4)
        weights = np.random.default_rng(3).gamma(0.4, size=27) + 0.02
        joint = torch.from_numpy(weights / weights.sum()).view(3, 3, 3)
        if independent:
            sums = [joint.sum((1, 2)), joint.sum((0, 2)), joint.sum((0, 1))]
            joint = torch.einsum("i,j,k->ijk", *sums)
        self.joint = joint

    def logits(self, tokens, latents, t, real):
        unique, inverse = torch.unique(tokens, dim=0, return_inverse=True)
        out = torch.full((len(unique), 4, 8), -1e30, dtype=torch.float64)
        for row, text in enumerate(unique.tolist()):
            for place in range(3):
                known = [
                    slice(None) if a == MASK or i == place else a - 3
                    for i, a in enumerate(text[:3])
                ]
                part = self.joint[tuple(known)]
                axes = [i for i, a in enumerate(known) if isinstance(a, slice)]
                others = [i for i, axis in enumerate(axes) if axis != place]
                out[row, place, 3:6] = (part.sum(others) if others else part).log()
        return out[inverse]

    def chi_square(self, texts):
        """Statistic of texts against the joint; 26 degrees of freedom: 54 is the 0.1 % point."""
        count = torch.zeros(3, 3, 3, dtype=torch.float64)
        for text in texts:
            count[tuple(token - 3 for token in text)] += 1
        expected = len(texts) * self.joint
        return float(((count - expected) ** 2 / expected).sum())


class Spy:
    """In the place of a `Recorder`: keeps what a sampler says of each pass. Rows are those of the
    batch, positions those in the text.
    """

    def __init__(self):
        self.seen = []

    def add(self, samples, before, after, positions, logits):
        rows, positions = positions // before.shape[1], positions % before.shape[1]
        self.seen.append(
            SimpleNamespace(
                samples=samples,
                before=before,
                after=after.clone(),
                rows=rows,
                positions=positions,
                log_probabilities=logits.log_softmax(-1),
            )
        )


@pytest.fixture(scope="session")
def toys():
    kinds = {"Toy": Toy, "Perfect": Perfect, "Noisy": Noisy, "Enumerable": Enumerable, "Spy": Spy}
    return SimpleNamespace(**kinds, MASK=MASK, PAD=PAD, EOS=EOS)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A converted folder as `mmldlm convert` leaves it: random weights, a word tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from mmldlm.models import MultimodalMMDiT
    from mmldlm.models.mmdit_config import ModelConfig
    from mmldlm.tasks.translation.config import LatentDiffusionConfig, TextDiffusionConfig

    folder = tmp_path_factory.mktemp("converted")
    words = ["[MASK]", "[PAD]", "[EOS]", "[UNK]", *(f"word{i}" for i in range(28))]
    core = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        mask_token="[MASK]",
        pad_token="[PAD]",
        eos_token="[EOS]",
        unk_token="[UNK]",
    )
    tokenizer.save_pretrained(folder)
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
    model.text_head.bias.data[
        words.index("[UNK]")
    ] = -1e4  # as trained weights: all that is written are words
    model.set_latent_statistics(torch.zeros(6), torch.full((6,), 6**-0.5))
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values.update(
        text_diffusion=TextDiffusionConfig().model_dump(),
        latent_diffusion=LatentDiffusionConfig().model_dump(),
        training={
            "mode_weights": {"unconditional": 0.2, "l2t": 0.4, "t2l": 0.4},
            "condition_dropout": 0.1,
        },
    )
    (folder / "config.json").write_text(json.dumps(values))
    return folder
