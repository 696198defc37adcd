"""MDLM's loss: exact for known denoisers, the same however a batch is cut, and what its options
may change.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmldlm.data.batch_plan import BatchPlan, local_slots
from mmldlm.data.store import Rows
from mmldlm.errors import UserError
from mmldlm.models.base import ModelOutput
from mmldlm.models.plain import PlainTransformer
from mmldlm.models.token_scores import TokenScores
from mmldlm.tasks.baselines.mdlm import MdlmObjective, MdlmTask
from mmldlm.tasks.registry import build_config

DIM, SIZE, VOCAB, MASK, PAD, EOS = 6, 40, 30, 3, 0, 2
CONDITIONINGS = ("none", "prefix", "adaln", "cross_attention")


class FakeStore:
    """The store's interface over arrays in memory."""

    def __init__(self, size=SIZE, vocab=VOCAB):
        rng = np.random.default_rng(0)
        self.tokens = [rng.integers(4, vocab, rng.integers(1, 12)) for _ in range(size)]
        self.latents = rng.standard_normal((size, DIM)).astype(np.float32)
        self.lengths = np.array([len(t) + 1 for t in self.tokens], dtype=np.int32)

    def get(self, indices):
        return Rows([self.tokens[i] for i in indices], self.latents[indices])


def data_of(conditioning="prefix", **sections):
    model = {
        "hidden_size": 16,
        "n_blocks": 2,
        "n_heads": 2,
        "cond_dim": 16,
        "max_seq_len": 16,
        "latent_dim": DIM,
        "vocab_size": VOCAB,
        "mask_token_id": MASK,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "conditioning": conditioning,
        "reads_time": conditioning != "none",
    }
    config = build_config({"task": "mdlm", "model": model, **sections})
    return SimpleNamespace(
        config=config,
        latent_mean=np.full(DIM, 0.5, np.float32),
        latent_std=np.full(DIM, 2.0, np.float32),
        max_latent_norm=lambda: 100.0,
    )


def micro_batches(data, world=1, accum=1, step=0, size=12, store=None, **options):
    rows = store or FakeStore()
    collator, plan = MdlmTask().collator(data, **options), BatchPlan(rows.lengths, size, 0)
    return [
        collator.collate(
            plan.batch(step), local_slots(size, world, accum, rank, micro), rows, rows.lengths
        )
        for micro in range(accum)
        for rank in range(world)
    ]


def gradients(data, batches):
    torch.manual_seed(0)
    model = PlainTransformer(data.config.model)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    loss = sum(MdlmObjective(data.config)(model, batch)[0] for batch in batches)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


# Step 3 is the epoch's last batch: 4 of 12 samples, some ranks have none.
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_gradients_add_up_however_the_batch_is_cut(conditioning, dropout, step):
    data = data_of(conditioning)
    data.config.model.dropout = dropout
    whole_loss, whole = gradients(data, micro_batches(data, step=step))
    for world, accum in ((2, 1), (1, 3), (4, 1)):
        loss, parts = gradients(data, micro_batches(data, world, accum, step))
        torch.testing.assert_close(loss, whole_loss)
        for name, grad in whole.items():
            assert grad is not None and parts[name] is not None, name
            torch.testing.assert_close(parts[name], grad, rtol=1e-4, atol=1e-6)


class ContextFree(torch.nn.Module):
    """Predicts the same distribution at every position, whatever it reads."""

    def __init__(self, log_p):
        super().__init__()
        self.log_p = log_p

    def forward(self, text, latents, query, **unread):
        assert bool((text.tokens.flatten()[query.positions] == MASK).all())
        assert bool(text.attention_mask.flatten()[query.positions].all())
        nll = -self.log_p[query.targets]
        correct = torch.zeros(len(nll), dtype=torch.bool)
        scores = TokenScores(loss_sum=nll @ query.weights, nll=nll, correct=correct)
        return ModelOutput(scores, length_logits=torch.zeros(len(text.tokens), 16))


@pytest.mark.parametrize("masking", ["fixed_count", "bernoulli"])
@pytest.mark.parametrize("schedule", ["loglinear", "cosine", "polynomial"])
def test_a_context_free_denoiser_costs_its_cross_entropy(schedule, masking):
    """Whatever the schedule (baselines.md 0.4); the perfect one costs nothing."""
    rows = FakeStore(2000)
    log_p = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)).log_softmax(0)
    more = {"min_timestep": 1e-4} if masking == "bernoulli" else {}
    data = data_of(text_diffusion={"schedule": schedule, "masking": masking, **more})
    batches = [
        b for step in range(20) for b in micro_batches(data, step=step, size=100, store=rows)
    ]
    for law, expected in ((log_p, None), (torch.zeros(VOCAB), 0.0)):
        objective = MdlmObjective(data.config)
        sums = [
            objective(ContextFree(law), batch)[1]["text_nelbo_sum"] / batch.num_tokens
            for batch in batches
        ]
        found = torch.stack(sums).double()
        if expected is None:
            words = np.concatenate([np.append(tokens, EOS) for tokens in rows.tokens])
            expected = -float(law[torch.from_numpy(words)].double().mean())
        error = float(found.std() / len(found) ** 0.5)
        assert abs(float(found.mean()) - expected) <= 4 * error + 1e-9, (schedule, masking, error)
        assert error < 0.05 * expected + 1e-9


def test_training_weights_change_the_loss_and_never_the_reported_nelbo():
    losses, nelbos = {}, {}
    for name, options in {
        "elbo": {},
        "uniform": {"text_weighting": "uniform"},
        "clipped": {"text_weight_clip": 1.5},
    }.items():
        data = data_of("none", loss={**options, "length_loss_weight": 0})
        (batch,) = micro_batches(data)
        torch.manual_seed(0)
        loss, sums = MdlmObjective(data.config)(PlainTransformer(data.config.model), batch)
        losses[name], nelbos[name] = float(loss.detach()), float(sums["text_nelbo_sum"])
        # A fresh model: nearly the same everywhere.
        nll = nelbos[name] / float(batch.text_weights.sum())
        weights = {
            "elbo": batch.text_weights,
            "uniform": torch.full_like(batch.text_weights, 2.0),
            "clipped": batch.text_weights.clamp_max(1.5),
        }[name]
        assert losses[name] == pytest.approx(
            float(weights.sum()) * nll / batch.counts["text_tokens"], rel=0.1
        )
    assert len(set(losses.values())) == 3
    assert max(nelbos.values()) == pytest.approx(min(nelbos.values()), rel=1e-6)
    assert losses["elbo"] == pytest.approx(nelbos["elbo"] / batch.counts["text_tokens"], rel=1e-6)


def test_a_latent_that_cannot_be_used_becomes_a_placeholder():
    rows = FakeStore()
    data = data_of()
    (clean,) = micro_batches(data, store=rows)
    hit = int(clean.ids[2])
    rows.latents[hit, 1] = np.nan
    (batch,) = micro_batches(data, store=rows)
    assert (
        not batch.real[2] and batch.bad[0]["id"] == hit and "non-finite" in batch.bad[0]["reason"]
    )
    assert batch.counts == clean.counts  # other ranks do not know of it
    assert (
        not bool((batch.text_positions // batch.attention_mask.shape[1] == 2).any())
        and batch.length_weights[2] == 0
    )
    assert bool(torch.isfinite(batch.latents).all())


def test_latents_are_scaled_and_dropped_as_often_as_configured():
    rows = FakeStore(400)
    data = data_of(training={"condition_dropout": 0.25})
    (batch,) = micro_batches(data, size=400, store=rows)
    expected = (rows.latents[batch.ids] - 0.5) / 2
    np.testing.assert_allclose(batch.latents.numpy(), expected, rtol=1e-6)
    # Aligned as torch does it: a run that is resumed has the same bits in every product.
    assert all(
        b.latents.data_ptr() % 64 == 0
        for step in range(20)
        for b in micro_batches(data, 4, 1, step)
    )
    assert 60 <= int(batch.latent_is_null.sum()) <= 140
    for dropout in (0.0, 1.0):  # the passes of evaluation
        (other,) = micro_batches(data, size=400, store=rows, seed=5, condition_dropout=dropout)
        assert float(other.latent_is_null.float().mean()) == dropout
    assert micro_batches(data_of("none"))[0].latents is None


def test_only_training_has_dropout():
    data = data_of()
    assert micro_batches(data)[0].dropout_keys is None
    data.config.model.dropout = 0.1
    keys = micro_batches(data, size=40)[0].dropout_keys
    assert len(keys.unique()) == len(keys) == 40
    assert micro_batches(data, seed=5)[0].dropout_keys is None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"causal": True}}, "causal"),
        ({"training": {"condition_dropout": 0.1}}, "condition_dropout"),
        ({"loss": {"text_weighting": "uniform", "text_weight_clip": 2}}, "text_weight_clip"),
        ({"loss": {"latent_loss_weight": 1}}, "latent_loss_weight"),
        ({"latent_diffusion": {"schedule": "cosine"}}, "latent_diffusion"),
    ],
)
def test_options_that_mdlm_does_not_read_are_errors(sections, message):
    with pytest.raises(UserError, match=message) as error:
        build_config({"task": "mdlm", **sections})
    assert error.value.exit_code == 2
