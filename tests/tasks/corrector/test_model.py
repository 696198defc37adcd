"""What a corrector's model reads of a hypothesis, and what that costs."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.models.base import LatentInputs
from mmldlm.tasks.corrector.model import CorrectorMMDiT, Hypotheses
from mmldlm.tasks.corrector.task import CorrectorTask
from tests.models.test_mmdit import inputs
from tests.models.test_mmdit import make as make_plain
from tests.support.forward import run_model

PAD, EOS = 0, 2


def make(seed=0, awake=True, **more) -> CorrectorMMDiT:
    return make_plain(seed, awake, model_class=CorrectorMMDiT, **more)


def hypotheses(given=(True, True, True, True), length=10, seed=5):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 40, (4, length), generator=generator)
    for row, own in enumerate((10, 6, 1, 9)):
        tokens[row, own - 1] = EOS
        tokens[row, own:] = PAD
    return Hypotheses(tokens, torch.randn(4, 12, generator=generator), torch.tensor(given))


def outputs(model, read=None, **more):
    tokens, latents, text_t, _ = inputs()
    real = torch.arange(10) < torch.tensor([10, 7, 3, 9])[:, None]
    with torch.no_grad():
        return run_model(
            model, tokens, latents, text_t, None, real, side_inputs=read, **more
        ), real


def assert_equal(a, b, rows=slice(None)):
    (a, real), (b, _) = a, b
    assert torch.equal(a.text.logits[rows][real[rows]], b.text.logits[rows][real[rows]])
    assert torch.equal(a.length_logits[rows], b.length_logits[rows])


def test_a_corrector_starts_from_the_weights_of_the_model_without_one():
    plain, corrector = make_plain(awake=False), make(awake=False)
    own = dict(corrector.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in plain.named_parameters())
    zero = [
        name for name, value in corrector.hypothesis_encoder.named_parameters() if not value.any()
    ]
    assert zero == [
        "to_text.bias",
        *(f"to_{to}.{kind}" for to in ("product", "pooled") for kind in ("weight", "bias")),
    ]


def test_words_and_embedding_of_a_hypothesis_are_read_where_it_is_given():
    model = make()
    read, other = hypotheses(), hypotheses(seed=6)
    without = outputs(model)
    for changed in (read._replace(tokens=other.tokens), read._replace(latents=other.latents)):
        a, b = outputs(model, read)[0], outputs(model, changed)[0]
        assert not torch.allclose(a.text.logits, b.text.logits)
    assert not torch.allclose(outputs(model, read)[0].length_logits, without[0].length_logits)
    half = outputs(model, read._replace(given=torch.tensor([True, False, True, False])))
    assert_equal(half, without, [1, 3])
    assert_equal(half, outputs(model, read), [0, 2])


def test_latents_encoded_without_the_hypotheses_are_refused():
    model, (tokens, latents, text_t, _) = make(), inputs()
    places = torch.tensor([0, 4])
    with pytest.raises(ValueError, match="encoded without them"):
        run_model(
            model,
            tokens,
            model.encode_latents(LatentInputs(latents)),
            text_t,
            side_inputs=hypotheses(),
            text_positions=places,
        )


def test_what_stands_behind_a_hypothesis_or_its_text_is_not_read():
    model, read = make(), hypotheses()
    tokens = read.tokens.clone()
    tokens[2, 3:] = 7  # behind a text of 3 tokens
    assert_equal(outputs(model, read), outputs(model, read._replace(tokens=tokens)))
    packed = torch.tensor([0, 5, 10, 12])
    tokens, latents, text_t, _ = inputs()
    real = torch.arange(10) < torch.tensor([10, 7, 3, 9])[:, None]
    some = run_model(
        model, tokens, latents, text_t, None, real, text_positions=packed, side_inputs=read
    ).text.logits
    torch.testing.assert_close(
        some, outputs(model, read)[0].text.logits.flatten(0, 1)[packed], rtol=1e-4, atol=1e-5
    )


def test_the_ablation_reads_the_words_alone():
    model, read = make(corrector="blind"), hypotheses()
    assert_equal(
        outputs(model, read), outputs(model, read._replace(latents=hypotheses(seed=6).latents))
    )
    other = read._replace(tokens=hypotheses(seed=6).tokens)
    assert not torch.allclose(
        outputs(model, read)[0].text.logits, outputs(model, other)[0].text.logits
    )


def test_every_parameter_learns():
    model = make()
    tokens, latents, text_t, _ = inputs()
    out = run_model(
        model, tokens, latents, text_t, side_inputs=hypotheses((True, True, True, False))
    )
    (out.text.logits.clamp_min(-9).square().sum() + out.length_logits.square().sum()).backward()
    for name, parameter in model.hypothesis_encoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_latents_encoded_with_the_hypotheses_give_the_same_text():
    model, (tokens, latents, text_t, latent_t) = make(), inputs()
    real = torch.arange(10) < torch.tensor([10, 7, 3, 9])[:, None]
    read = {"side_inputs": hypotheses((True, False, True, True))}
    given = dict(text_positions=torch.tensor([0, 4, 12, 31, 36]), **read)
    encoded = model.encode_latents(LatentInputs(latents, latent_t), **read)
    expected = run_model(model, tokens, latents, text_t, latent_t, real, **given)
    found = run_model(model, tokens, encoded, text_t, None, real, **given)
    assert found.latent is None and found.length_logits is None
    torch.testing.assert_close(found.text.logits, expected.text.logits, rtol=1e-4, atol=1e-5)
    order = torch.tensor([3, 1])
    torch.testing.assert_close(encoded.select(order).side, encoded.side[order])


def test_flops_agree_with_torchs_counter():
    with torch.device("meta"):
        model = make(awake=False)
        tokens, latents, t = (
            torch.zeros(3, 9, dtype=torch.int64),
            torch.zeros(3, 12),
            torch.zeros(3),
        )
        read = Hypotheses(tokens, latents, torch.zeros(3, dtype=torch.bool))
        scored = torch.zeros(13, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        run_model(model, tokens, latents, t, t, text_positions=scored, side_inputs=read)
    found = CorrectorTask().estimate_flops(model.config, [9] * 3, 13)
    assert counter.get_total_flops() == found.forward
