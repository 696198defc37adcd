"""Texts written from embeddings, embedded again by the encoder of the training data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmldlm.data.sentences import split_into_parts
from mmldlm.evaluation.metrics import retrieval
from mmldlm.evaluation.sentences import Sentences
from mmldlm.evaluation.statistics import Estimate, mean
from mmldlm.evaluation.suite import Log
from mmldlm.sampling.inputs import encode_texts, encoder_identity
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.utils.formatting import count_noun


def reencoded_estimates(
    pretrained: Pretrained, written: Sequence[Sequence[int]], sentences: Sentences, log: Log
) -> dict[str, Estimate]:
    """Compare the encoder's embeddings of written texts with the embeddings that they were written
    from.

    A text too short to be embedded (no character, or fewer than the model has latents per text)
    scores 0.

    Args:
        written: N lists of ids, one for each sentence.

    Raises:
        UserError, ImportError, OSError: as `encode_texts`, if the encoder is not available.
    """
    encoder_identity(pretrained)  # before the line of progress
    texts = [
        text.strip()
        for text in pretrained.tokenizer.batch_decode(written, skip_special_tokens=True)
    ]
    count = pretrained.model.config.num_latents
    rows = [
        row for row, text in enumerate(texts) if text and split_into_parts(text, count) is not None
    ]
    encoded = np.zeros_like(sentences.latents)
    progress = log(f"embedding {count_noun(len(rows), 'written text')} again with the encoder")
    if rows:
        encoded[rows] = encode_texts([texts[row] for row in rows], pretrained, progress)
    targets, others = sentences.latents, sentences.latents[sentences.shuffled_index]
    return {
        "reencoded_cosine": mean(retrieval.cosine_similarity(encoded, targets), "cosine"),
        "reencoded_cosine_shuffled": mean(retrieval.cosine_similarity(encoded, others), "cosine"),
    }
