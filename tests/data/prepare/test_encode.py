"""Encoding texts with several latents."""

from __future__ import annotations

import numpy as np

from mmldlm.data.prepare import encode


class Marked:
    """Encodes a text as its length; fails on texts with "bad" in them."""

    latent_dim, batch_tokens, name = 2, 1024, "marked"

    def encode(self, texts, progress=None, is_cut=None):
        if progress is not None:
            progress(len(texts))
        bad = np.array([np.nan if "bad" in text else 1.0 for text in texts], np.float32)
        return np.array([[len(text), 1] for text in texts], np.float32) * bad[:, None]


def test_a_text_has_latents_where_every_piece_has_one():
    counted = []
    texts = ["aa bbbb", "so bad", "c ddd"]
    found = encode.encode(Marked(), texts, 1, counted.append, latents_per_text=2)
    assert found.is_ok.tolist() == [True, False, True] and sum(counted) == 6
    assert found.latents[..., 0].tolist() == [[2, 4], [1, 3]]
    assert found.reasons == {1: "piece 2 of 2: NaN or infinite values"}
