"""A model of codes: the ids alone decide, [MASK] is one of them, and only the named codes are
scored.
"""

from __future__ import annotations

import math

import pytest
import torch

from mmldlm.errors import UserError
from mmldlm.models import MultimodalMMDiT
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.models.token_scores import TokenQuery
from mmldlm.tasks.image_codes.config import ImageCodesModelConfig
from mmldlm.tasks.image_codes.model import CodesMMDiT
from tests.support.forward import run_model

Q, N = 37, 6


def make_model(**more) -> CodesMMDiT:
    torch.manual_seed(0)
    config = ImageCodesModelConfig(
        hidden_size=32,
        n_blocks=2,
        n_heads=2,
        cond_dim=24,
        max_seq_len=8,
        latent_dim=1,
        vocab_size=40,
        num_latents=N,
        num_codes=Q,
        mask_token_id=3,
        pad_token_id=0,
        eos_token_id=2,
        **{"tokens_per_latent": 1, **more},
    )
    model = CodesMMDiT(config)
    with torch.no_grad():
        for parameter in model.parameters():  # adaLN-Zero would hide what the blocks read
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def inputs(batch: int = 3):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 40, (batch, 5), generator=generator)
    return (
        tokens,
        torch.randint(0, Q + 1, (batch, N, 1), generator=generator),
        torch.full((batch,), 0.4),
    )


@pytest.mark.parametrize("chunks", [1, 2])
def test_only_the_named_codes_are_scored_and_logits_give_the_same_likelihood(chunks):
    model, (tokens, ids, t) = make_model(tokens_per_latent=chunks), inputs()
    positions, targets = torch.tensor([0, 4, 9, 17]), torch.tensor([5, 0, 36, 12])
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0])
    found = run_model(
        model, tokens, ids, t, t, latent_query=TokenQuery(positions, targets, weights)
    )
    logits = run_model(model, tokens, ids, t, t, latent_query=TokenQuery(positions)).latent.logits
    assert logits.shape == (4, Q) and found.latent.logits is None
    expected = -logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.latent.nll, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.latent.loss_sum, (expected * weights).sum())
    whole = run_model(
        model, tokens, ids, t, t, latent_query=TokenQuery(torch.arange(3 * N))
    ).latent.logits
    torch.testing.assert_close(whole[positions], logits)
    assert run_model(model, tokens, ids, t, t).latent is None


def test_gradients_agree_with_those_of_all_logits():
    model, (tokens, ids, t) = make_model(), inputs()
    positions, targets = torch.tensor([1, 8, 13]), torch.tensor([7, 7, 30])
    grads = []
    for wanted in (TokenQuery(positions, targets, torch.ones(3)), TokenQuery(positions)):
        model.zero_grad()
        out = run_model(model, tokens, ids, t, t, latent_query=wanted)
        loss = out.latent.loss_sum
        if loss is None:
            loss = torch.nn.functional.cross_entropy(out.latent.logits, targets, reduction="sum")
        loss.backward()
        grads.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-6, msg=name)
    table = grads[0]["latent_encoder.code_embedding.weight"]
    unread = torch.ones(Q + 1, dtype=torch.bool).index_fill(0, ids.unique(), False)
    assert bool((table[unread] == 0).all()) and bool(table[~unread].any(1).all())


def test_the_caption_reads_ids_and_a_null_image_hides_them():
    model, (tokens, ids, t) = make_model(), inputs()
    other = ids.clone()
    other[:, 2] = (other[:, 2] + 1) % Q
    masked = torch.full_like(ids, Q)
    logits = [
        run_model(model, tokens, given, t, None).text.logits for given in (ids, other, masked)
    ]
    assert all(not torch.equal(logits[0], rest) for rest in logits[1:])
    null = torch.ones(len(ids), dtype=torch.bool)
    hidden = [
        run_model(model, tokens, given, t, None, latent_is_null=null).text.logits
        for given in (ids, other)
    ]
    assert torch.equal(*hidden) and torch.equal(
        hidden[0], run_model(model, tokens, None, t, None).text.logits
    )


def test_ids_are_never_rounded_to_the_dtype_of_the_weights():
    """bf16 holds whole numbers to 256 only."""
    torch.manual_seed(0)
    many = ImageCodesModelConfig(**{**make_model().config.model_dump(), "num_codes": 1000})
    model = CodesMMDiT(many).bfloat16().eval()
    table = model.latent_encoder.code_embedding.weight
    rows, _ = model.latent_encoder(torch.tensor([[[999]], [[998]]]), None)
    own = (
        table[[999, 998]]
        + model.latent_encoder.chunk_position
        + model.latent_encoder.latent_position[0]
    )
    assert torch.equal(rows[:, 0], own)
    tokens, ids, t = inputs(1)
    near, far = (torch.full_like(ids, code) for code in (998, 999))
    assert not torch.equal(
        *(run_model(model, tokens, given, t, None).length_logits for given in (near, far))
    )


def test_a_uniform_head_pays_log2_of_the_codes():
    model, (tokens, ids, t) = make_model(), inputs()
    with torch.no_grad():
        model.latent_head.weight.zero_()
        model.latent_head.bias.zero_()
    positions = torch.arange(3 * N)
    targets = torch.randint(0, Q, (3 * N,), generator=torch.Generator().manual_seed(2))
    nll = run_model(
        model, tokens, ids, t, t, latent_query=TokenQuery(positions, targets, torch.ones(3 * N))
    ).latent.nll
    torch.testing.assert_close(nll / math.log(2), torch.full((3 * N,), math.log2(Q)))


def test_embeddings_start_from_their_patches():
    model = make_model()
    codes = torch.randn(Q, 16)
    codes[5] = codes[9]
    before = model.latent_encoder.code_embedding.weight[Q].clone()
    model.latent_encoder.start_from(codes)
    table = model.latent_encoder.code_embedding.weight
    assert (
        torch.equal(table[5], table[9])
        and torch.equal(table[Q], before)
        and 0.7 < float(table[:Q].detach().std()) < 1.3
    )


def test_ids_out_of_range_and_models_of_the_other_kind_are_refused():
    model, (tokens, ids, t) = make_model(), inputs()
    assert torch.equal(model.scale_latents(ids.clamp_max(Q - 1)), ids.clamp_max(Q - 1))
    for wrong in (-1, Q):
        with pytest.raises(UserError, match="0 to 36"):
            model.scale_latents(torch.full_like(ids, wrong))
    values = model.config.model_dump()
    with pytest.raises(UserError, match="num_codes"):
        CodesMMDiT(ImageCodesModelConfig(**{**values, "num_codes": None}))
    del values["num_codes"]
    pixels = MultimodalMMDiT(ModelConfig(**values))
    with pytest.raises(ValueError, match="latent_query"):
        run_model(pixels, tokens, ids.float(), t, t, latent_query=TokenQuery(torch.arange(2)))
