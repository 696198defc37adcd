"""Samplers of a causal model: exact laws, the cache, batches that shrink, and what a beam search
promises.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from mmldlm.errors import UserError
from mmldlm.models.plain import PlainTransformer
from mmldlm.models.plain_config import PlainConfig
from mmldlm.sampling.autoregressive import write_texts
from tests.support.forward import run_model

MASK, PAD, EOS = 0, 1, 2


def make_model(
    conditioning="prefix", vocab=30, limit=10, latent_dim=4, eos_bias=1.0, pad_bias=-100.0
) -> PlainTransformer:
    """A random model with sharp distributions, in which texts end at different lengths."""
    torch.manual_seed(3)
    config = PlainConfig(
        hidden_size=32,
        n_heads=2,
        n_blocks=2,
        max_seq_len=limit,
        latent_dim=latent_dim,
        vocab_size=vocab,
        mask_token_id=MASK,
        pad_token_id=PAD,
        eos_token_id=EOS,
        causal=True,
        conditioning=conditioning,
    )
    model = PlainTransformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
        model.text_head.bias[EOS] += eos_bias
        model.text_head.bias[PAD] = pad_bias
    return model.eval()


def nll(model, texts: list[list[int]], latents) -> torch.Tensor:
    """Teacher-forced NLL [N] fp64 of texts, EOS counted, one text at a time without a cache."""
    found = []
    for i, text in enumerate(texts):
        tokens = torch.tensor([[*text, EOS]])
        given = None if latents is None else model.scale_latents(latents[i : i + 1])
        logits = run_model(model, tokens, given).text.logits[0].double()
        found.append(-logits.log_softmax(-1).gather(1, tokens[0][:, None]).sum())
    return torch.stack(found).detach()


@pytest.fixture
def latents():
    torch.manual_seed(5)
    return torch.randn(12, 4)


@pytest.mark.parametrize("conditioning", ["none", "prefix", "cross_attention"])
def test_greedy_with_a_cache_is_greedy_without(conditioning, latents):
    model = make_model(conditioning)
    given = None if conditioning == "none" else latents
    found = write_texts(model, given, num_samples=1 if given is None else None)
    for i, text in enumerate(found.tokens):
        tokens: list[int] = []
        for _ in range(model.config.max_seq_len - 1):
            row = None if given is None else model.scale_latents(given[i : i + 1])
            logits = run_model(model, torch.tensor([[*tokens, EOS]]), row).text.logits[0, -1]
            tokens.append(int(logits.argmax()))
            if tokens[-1] == EOS:
                break
        assert text == [token for token in tokens if token != EOS]
    assert torch.allclose(found.log_probs, -nll(model, found.tokens, given), atol=1e-4)


def test_drawn_texts_are_scored_as_teacher_forcing_scores_them(latents):
    model = make_model()
    found = write_texts(model, latents, sampler="ancestral", seed=1)
    assert torch.allclose(found.log_probs, -nll(model, found.tokens, latents), atol=1e-4)
    assert found.lengths.tolist() == [len(text) + 1 for text in found.tokens]
    lengths = set(found.lengths.tolist())
    assert len(lengths) > 2, "texts should end at different lengths, or nothing leaves the batch"
    # Whatever temperature and nucleus draw, the score is the model's.
    other = write_texts(model, latents, sampler="ancestral", temperature=0.5, top_p=0.8, seed=1)
    assert torch.allclose(other.log_probs, -nll(model, other.tokens, latents), atol=1e-4)
    assert other.tokens != found.tokens


def test_a_text_does_not_depend_on_its_batch(latents):
    """Finished texts leave the batch, which saves rows and changes nothing."""
    model = make_model()
    for sampler in ("greedy", "ancestral", "beam"):
        together = write_texts(model, latents, sampler=sampler, seed=2)
        alone = write_texts(model, latents, sampler=sampler, seed=2, batch_tokens=1)
        assert together.tokens == alone.tokens
    drawn = write_texts(model, latents, sampler="ancestral", seed=2)
    assert int(drawn.lengths.sum()) <= drawn.num_rows < len(latents) * int(drawn.lengths.max())


def test_draws_follow_the_exact_law():
    """A language of three words and texts of at most two of them: 13 texts, whose probabilities
    are known.
    """
    model, draws = make_model("none", vocab=6, limit=3), 4000
    words = [3, 4, 5]
    texts = [list(text) for length in range(3) for text in itertools.product(words, repeat=length)]
    exact = torch.exp(-nll(model, texts, None))
    # At the last position the sampler writes EOS without a draw: sum over the last token.
    tokens = torch.tensor([[*text, EOS] for text in texts if len(text) == 2])
    logits = run_model(model, tokens).text.logits.double().detach().log_softmax(-1)
    full = logits[:, :2].gather(2, tokens[:, :2, None]).sum((1, 2)).exp()
    exact = torch.cat([exact[[len(text) < 2 for text in texts]], full])
    assert float(exact.sum()) == pytest.approx(1.0, abs=1e-6)
    found = write_texts(model, None, num_samples=draws, sampler="ancestral", seed=7)
    counts = torch.tensor(
        [found.tokens.count(text) for text in sorted(texts, key=len)], dtype=torch.float64
    )
    assert int(counts.sum()) == draws
    expected = exact * draws
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 32.9, "chi-square with 12 degrees of freedom: 0.1 %"


def test_one_beam_is_greedy_and_more_never_score_less(latents):
    model = make_model()
    greedy = write_texts(model, latents)
    for sampler, exponent in (("beam", 1.0), ("beam_sum", 0.0)):
        one = write_texts(model, latents, sampler=sampler, num_beams=1)
        assert one.tokens == greedy.tokens
        four = write_texts(model, latents, sampler=sampler, num_beams=4)
        assert torch.allclose(four.log_probs, -nll(model, four.tokens, latents), atol=1e-4)
        scores = [found.log_probs / found.lengths.double() ** exponent for found in (greedy, four)]
        assert bool((scores[1] >= scores[0] - 1e-9).all())
        assert float((scores[1] - scores[0]).max()) > 1e-3, "some text should gain by the search"


def test_all_samplers_score_on_one_scale_whatever_pad_is_given(latents):
    """Padding is never written, and its share of the probability is in no text's score."""
    model = make_model(pad_bias=2.0)
    for sampler in ("greedy", "ancestral", "beam", "beam_sum"):
        found = write_texts(model, latents, sampler=sampler, seed=1)
        assert not any(PAD in text for text in found.tokens)
        assert torch.allclose(found.log_probs, -nll(model, found.tokens, latents), atol=1e-4)


def test_a_beam_as_wide_as_the_language_finds_the_most_probable_text():
    model = make_model("none", vocab=6, limit=3, eos_bias=0.0)
    texts = [
        list(text) for length in range(3) for text in itertools.product([3, 4, 5], repeat=length)
    ]
    scores = -nll(model, texts, None)
    plain = write_texts(model, None, num_samples=1, sampler="beam_sum", num_beams=9)
    assert plain.tokens == [texts[int(scores.argmax())]]
    means = scores / torch.tensor([len(text) + 1.0 for text in texts])
    assert write_texts(model, None, num_samples=1, sampler="beam", num_beams=9).tokens == [
        texts[int(means.argmax())]
    ]


def test_without_latents_the_null_latent_is_read(latents):
    """A conditional model that gets no latent writes as with the learned null."""
    model = make_model()
    logits = run_model(model, torch.tensor([[5, EOS]])).text.logits
    null = run_model(
        model, torch.tensor([[5, EOS]]), latents[:1], latent_is_null=torch.tensor([True])
    ).text.logits
    assert torch.equal(logits, null)
    drawn = write_texts(model, None, num_samples=3, sampler="ancestral", seed=1)
    assert torch.allclose(drawn.log_probs, -nll(model, drawn.tokens, None), atol=1e-4)


def test_options_that_a_sampler_does_not_read_are_errors(latents):
    model = make_model()
    with pytest.raises(UserError, match="--sampler ancestral"):
        write_texts(model, latents, temperature=1.0)
    with pytest.raises(UserError, match="--sampler ancestral"):
        write_texts(model, latents, sampler="beam", top_p=0.9)
    with pytest.raises(UserError, match="--num-beams"):
        write_texts(model, latents, sampler="ancestral", num_beams=4)
