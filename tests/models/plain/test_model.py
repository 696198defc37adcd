"""PlainTransformer: the same numbers from every layout, cache and head; what a causal or conditioned model may see."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmldlm.models.plain import layout
from mmldlm.models.plain.config import PlainConfig
from mmldlm.models.plain.decode import next_logits, start_text
from mmldlm.models.plain.model import PlainTransformer

CONDITIONINGS = ("none", "prefix", "adaln", "cross_attention")
KINDS = [(causal, kind, time) for causal in (True, False) for kind in CONDITIONINGS for time in ({False, not causal})]
LENGTHS, WIDTH, VOCAB, MASK = torch.tensor([9, 4, 6]), 9, 40, 1


def make_model(causal: bool, conditioning: str, reads_time: bool = False, noise: float = 0.1, **keys):
    """A tiny fp64 model; with noise on all weights no gate is 0."""
    torch.manual_seed(0)
    config = PlainConfig(
        hidden_size=32, n_heads=2, n_blocks=2, max_seq_len=12, latent_dim=8, vocab_size=VOCAB, mask_token_id=MASK,
        pad_token_id=0, eos_token_id=2, causal=causal, conditioning=conditioning, reads_time=reads_time, **keys,
    )  # fmt: skip
    model = PlainTransformer(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


@pytest.fixture
def batch():
    """Tokens [3, 9], latents, timesteps and the mask of three lengths."""
    torch.manual_seed(1)
    tokens = torch.randint(3, VOCAB, (3, WIDTH))
    mask = torch.arange(WIDTH) < LENGTHS[:, None]
    return tokens, torch.randn(3, 8).double(), torch.rand(3).double(), mask


def call(model, batch, **keys):
    tokens, latents, times, mask = batch
    latents = None if model.config.conditioning == "none" else latents
    return model(tokens, latents, times, None, mask, **keys)


@pytest.mark.parametrize(("causal", "kind", "time"), KINDS)
def test_layouts_heads_and_caches_agree(causal, kind, time, batch, monkeypatch):
    """Packed (loop and rectangle), padded, one sample at a time, NLLs, chunks, and cached: the same distributions."""
    model = make_model(causal, kind, time)
    tokens, latents, times, mask = batch
    positions = mask.flatten().nonzero()[:, 0]
    logits = call(model, batch, text_positions=positions)["text_logits"]
    monkeypatch.setattr(layout, "RECTANGLE_FILL", 0.0)
    others = [
        call(model, batch, text_positions=positions)["text_logits"],
        call(model, batch)["text_logits"].flatten(0, 1)[positions],
        torch.cat([
            call(model, (tokens[i : i + 1, :n], latents[i : i + 1], times[i : i + 1], None))["text_logits"][0]
            for i, n in enumerate(LENGTHS.tolist())
        ]),
    ]  # fmt: skip
    if causal:
        full = call(model, (tokens, latents, times, None))["text_logits"]
        cache = start_text(model, None if kind == "none" else latents, batch=3)
        steps = [next_logits(model, cache)] + [next_logits(model, cache, tokens[:, i]) for i in range(WIDTH - 1)]
        torch.testing.assert_close(torch.stack(steps, 1), full)
    else:
        encoded = model.encode_latents(None if kind == "none" else latents, None, 3, caches=True)
        others.append(model(tokens, None, times, None, mask, text_positions=positions, encoded=encoded)["text_logits"])
    for other in others:
        torch.testing.assert_close(other, logits)
    targets = tokens.flatten()[positions]
    expected = F.cross_entropy(logits, targets, reduction="none")
    scored = call(
        model, batch, text_positions=positions, text_targets=targets, text_weights=torch.ones(len(targets)).double()
    )
    torch.testing.assert_close(scored["text_nll"], expected)
    assert bool(torch.isneginf(logits[:, MASK]).all())
