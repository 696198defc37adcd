"""Several lengths: the most probable ones, and the text that is kept."""

from __future__ import annotations

import torch

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.sampling.decoding import most_probable_lengths
from mmldlm.sampling.text import sample_lengths, sample_text


def test_the_most_probable_lengths_come_with_their_probabilities(toys):
    model, latents = toys.Noisy(max_seq_len=12), torch.randn(7, 4)
    lengths, scores = most_probable_lengths(model, latents, 12)
    assert bool((lengths.sort(1).values == torch.arange(1, 13)).all()) and bool(
        (scores.diff(dim=1) <= 0).all()
    )
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(7).double())
    few, _ = most_probable_lengths(model, latents, 3)
    assert torch.equal(few, lengths[:, :3])
    assert most_probable_lengths(model, latents, 99)[0].shape == (7, 12)


def test_the_text_of_the_best_length_and_likelihood_is_kept(toys):
    """The kept text has the largest sum of log p(L | z) and the log-probabilities of its
    tokens.
    """
    model, latents = (
        toys.Noisy(max_seq_len=12),
        torch.randn(9, 4, generator=torch.Generator().manual_seed(0)),
    )
    options = {"diffusion": MaskedDiffusion(toys.MASK), "temperature": 1.0, "seed": 5}
    found = sample_lengths(model, latents, 3, **options)
    lengths, length_scores = most_probable_lengths(model, latents, 3)
    one = [
        sample_text(model, latents, lengths=lengths[:, k], with_log_probabilities=True, **options)
        for k in range(3)
    ]
    scores = torch.stack(
        [torch.stack([x.double().sum() for x in texts.log_probabilities]) for texts in one], 1
    )
    best = (scores + length_scores).argmax(1).tolist()
    assert len(set(best)) > 1
    assert found.tokens == [one[k].tokens[row] for row, k in enumerate(best)]
    assert found.lengths.tolist() == [int(lengths[row, k]) for row, k in enumerate(best)]
    assert found.num_rows == sum(texts.num_rows for texts in one)
    assert found.passes.tolist() == torch.stack([texts.passes for texts in one]).amax(0).tolist()


def test_one_length_is_the_most_probable_one(toys):
    model, latents = (
        toys.Noisy(max_seq_len=12),
        torch.randn(9, 4, generator=torch.Generator().manual_seed(0)),
    )
    options = {"diffusion": MaskedDiffusion(toys.MASK)}
    single = sample_lengths(model, latents, 1, **options)
    lengths = most_probable_lengths(model, latents, 1)[0][:, 0]
    assert single.tokens == sample_text(model, latents, lengths=lengths, **options).tokens
