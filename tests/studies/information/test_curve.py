"""The information curve: equal to the NELBO on the same masks, smooth, and the same for
any batch.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.diffusion.masked import SCHEDULES
from mmldlm.errors import MmldlmError
from mmldlm.evaluation.nelbo import measure
from mmldlm.tasks.text_task import masked_text_scores
from mmldlm.utils.counter_rng import Stream, uniforms
from studies.information.curve import (
    BucketCurve,
    InformationCurve,
    length_buckets,
    text_curves,
)


def curves_of(model, texts, latents=None, schedule="loglinear", **options):
    score = partial(
        masked_text_scores, model, diffusion=MaskedDiffusion(model.config.mask_token_id, schedule)
    )
    return text_curves(model, texts, latents, score=score, **options), score


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_token_a_pass_costs_the_nelbo_on_the_same_masks(make, schedule):
    """The NELBO with as many draws as tokens has one draw for each count; here all of them rank
    positions alike.
    """
    rng = np.random.default_rng(0)
    texts = rng.integers(4, make.VOCAB, (12, 8)).tolist()
    latents = torch.randn(12, make.DIM, generator=torch.Generator().manual_seed(0))
    order = uniforms(5, Stream.LIKELIHOOD, range(12), (16,))[:, :9]
    model = make.model()
    for given in (latents, None):
        found, score = curves_of(model, texts, given, schedule, seed=5)

        def on_these_masks(tokens, real, latents, uniform, stratum, score=score):
            rows = [texts.index(row[:8]) for row in tokens.tolist()]
            return score(
                tokens, real, latents, torch.cat([order[rows], uniform[:, -1:]], 1), stratum
            )

        nelbo = measure(
            model, texts, given, np.roll(np.arange(12), 1), score=on_these_masks, draws=9, seed=5
        )
        name = "null" if given is None else "matched"
        assert found.cost([[1] * 9] * 12) == pytest.approx(nelbo.nelbo[name], rel=1e-5)
        assert found.length_nll == pytest.approx(nelbo.length_nll[name], rel=1e-5)


def test_one_pass_costs_the_factorized_cross_entropy(toy):
    model = toy.Model()
    found, _ = curves_of(model, toy.texts)
    marginals = model.log_probabilities(torch.full((1, toy.LENGTH), toy.MASK))[0]
    expected = [-float(marginals[range(toy.LENGTH), text].sum()) for text in model.texts.tolist()]
    assert found.cost([[toy.LENGTH]] * 27) == pytest.approx(expected, rel=1e-5)


def test_a_denoiser_without_context_has_a_flat_curve(toy):
    found, _ = curves_of(toy.Model(context_free=True), toy.texts * 40)
    mean = np.mean(found.nats, axis=0)
    law = np.array(toy.law)[np.arange(27 * 40) % 27] * 27  # every text once: weighted by the law
    weighted = np.array(found.nats) * law[:, None]
    error = weighted.std(0) / np.sqrt(len(weighted))
    assert (np.abs(weighted.mean(0) - weighted.mean()) < 4 * error + 1e-9).all(), (
        weighted.mean(0),
        mean,
    )


def test_curves_depend_on_seed_and_index_alone(make):
    texts = [list(range(4, 4 + size)) for size in (1, 9, 4, 0, 7, 12)]
    latents = torch.randn(6, make.DIM, generator=torch.Generator().manual_seed(1))
    model = make.model()
    big, small = (curves_of(model, texts, latents, batch_tokens=size)[0] for size in (10_000, 1))
    for one, other in zip(big.nats, small.nats, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert [len(values) for values in big.nats] == [2, 10, 5, 1, 8, 13]
    assert big.length_nll == pytest.approx(small.length_nll)


def test_nan_likelihood_is_an_error(toy):
    with pytest.raises(MmldlmError, match="NaN"):
        curves_of(toy.Model(sharpness=float("nan")), toy.texts)


def test_buckets_cover_all_lengths_and_have_enough_sentences():
    lengths = np.repeat([3, 4, 5, 6, 9, 30], [50, 1, 40, 29, 29, 2])
    buckets = length_buckets(lengths)
    assert buckets[0] == (3, 3) and buckets[-1][1] == 30
    sizes = [int(((lengths >= low) & (lengths <= high)).sum()) for low, high in buckets]
    assert sum(sizes) == len(lengths) and min(sizes) >= 30
    assert length_buckets(np.array([5, 7])) == [(5, 7)]


def test_the_fit_never_rises_and_serves_every_length(toy):
    nats = toy.curves(300)
    curve = InformationCurve(nats)
    assert len(curve.buckets) > 2
    for length in (1, 2, 9, 15, 200):
        assert (
            curve.fitted(length).shape == (length,)
            and (np.diff(curve.fitted(length)) <= 1e-12).all()
        )
    mean = np.mean([values.sum() for values in nats if len(values) == 12])
    assert curve.fitted(12).sum() == pytest.approx(mean, rel=0.15)


def test_every_text_has_a_part_in_every_point():
    """Hard texts of ten tokens and easy ones of seven: no point may stand for the hard
    ones alone.
    """
    bucket = BucketCurve([np.full(10, 4.0)] * 20 + [np.full(7, 1.0)] * 20)
    assert len(bucket.points) == 7 and all(2.4 < point.nats < 3.4 for point in bucket.points)
    assert BucketCurve([np.full(1, 4.0), np.full(1, 2.0)]).points[0].nats == 3


def test_points_are_means_with_their_errors_and_rises_are_reported_where_they_are():
    rng = np.random.default_rng(0)
    falling = [
        2 - np.arange(20) / 20 + 0.1 * rng.normal(size=20) + 0.3 * rng.normal() for _ in range(200)
    ]
    bucket = BucketCurve(falling)
    assert bucket.rises() == [] and (bucket.shortest, bucket.longest, bucket.num_sentences) == (
        20,
        20,
        200,
    )
    assert bucket.points[0].share == 0 and len(bucket.points) == 11
    for point in bucket.points:
        assert abs(point.nats - (2 - point.share)) < 4 * point.se
        # The text's own level, not its 20 values.
        assert point.se == pytest.approx(0.3 / np.sqrt(200), rel=0.25)
    bumped = BucketCurve([values + 1.0 * (np.arange(20) >= 13) for values in falling])
    (rise,) = bumped.rises()
    assert rise["from_share"] < 0.65 <= rise["to_share"] + 0.05
    # Paired: the level cancels.
    assert rise["rise"] == pytest.approx(0.9, abs=0.05) and rise["se"] < 0.02
    fits = [point.fitted for point in bumped.points]
    assert fits == sorted(fits, reverse=True)
