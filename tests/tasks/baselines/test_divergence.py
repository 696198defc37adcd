"""Losses over the vocabulary inside the text head: gradients, sums, micro-batches, and known
denoisers.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmldlm.data.batch_plan import BatchPlan, local_slots
from mmldlm.data.store import Rows
from mmldlm.models.base import ModelOutput
from mmldlm.models.plain import PlainTextHead
from mmldlm.models.token_scores import TokenQuery, TokenScores
from mmldlm.tasks.baselines.divergence import row_scores
from mmldlm.tasks.registry import build_config, find_task

DIM, SIZE, VOCAB, MASK, PAD, EOS = 6, 40, 24, 3, 0, 2
CLUSTERS = np.array([-1, 0, -1, -1] + [k % 4 for k in range(VOCAB - 4)])
TASKS = {"gidd": find_task("gidd"), "hdlm": find_task("hdlm")}


class FakeStore:
    """The store's interface over arrays in memory."""

    def __init__(self, size=SIZE):
        rng = np.random.default_rng(0)
        self.tokens = [rng.integers(4, VOCAB, rng.integers(1, 12)) for _ in range(size)]
        self.latents = rng.standard_normal((size, DIM)).astype(np.float32)
        self.lengths = np.array([len(t) + 1 for t in self.tokens], dtype=np.int32)

    def get(self, indices):
        return Rows([self.tokens[i] for i in indices], self.latents[indices])


def data_of(name, conditioning="none", **sections):
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
        "extra_input_tokens": 4 if name == "hdlm" else 0,
    }
    return SimpleNamespace(
        config=build_config({"task": name, "model": model, **sections}),
        latent_mean=np.full(DIM, 0.5, np.float32),
        latent_std=np.full(DIM, 2.0, np.float32),
        max_latent_norm=lambda: 100.0,
        clusters=CLUSTERS,
    )


def micro_batches(name, data, world=1, accum=1, step=0, size=12, store=None, **options):
    rows = store or FakeStore()
    collator, plan = TASKS[name].collator(data, **options), BatchPlan(rows.lengths, size, 0)
    return [
        collator.collate(
            plan.batch(step), local_slots(size, world, accum, rank, micro), rows, rows.lengths
        )
        for micro in range(accum)
        for rank in range(world)
    ]


def fresh_model(name, data):
    torch.manual_seed(0)
    model = TASKS[name].model_class()(data.config.model)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def gradients(name, data, batches):
    model = fresh_model(name, data)
    results = [TASKS[name].objective(data.config)(model, batch) for batch in batches]
    sum(loss for loss, _ in results).backward()
    sums = {key: float(sum(found[key] for _, found in results)) for key in results[0][1]}
    return sums, {name: parameter.grad for name, parameter in model.named_parameters()}


# Step 3 is the epoch's last batch: 4 of 12 samples, some ranks have none.
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize(
    "name, conditioning", [("gidd", "prefix"), ("gidd", "none"), ("hdlm", "adaln")]
)
def test_gradients_add_up_however_the_batch_is_cut(name, conditioning, step):
    data = data_of(name, conditioning)
    sums, whole = gradients(name, data, micro_batches(name, data, step=step))
    assert set(sums) == set(TASKS[name].sums)
    for world, accum in ((2, 1), (4, 1)):
        others, parts = gradients(name, data, micro_batches(name, data, world, accum, step))
        assert others == pytest.approx(sums, rel=1e-5)
        for key, grad in whole.items():
            assert grad is not None and parts[key] is not None, key
            torch.testing.assert_close(parts[key], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", TASKS)
def test_the_head_gives_values_and_gradients_of_all_logits_at_once(name, monkeypatch):
    """In chunks of a few rows that a backward pass computes again, and in one."""
    from mmldlm.models import token_scores

    data = data_of(name)
    (batch,) = micro_batches(name, data)
    divergence = batch.divergence
    weights = batch.text_elbo_weights.clamp_max(10.0)
    results = []
    for rows in (5, 10_000):
        monkeypatch.setattr(token_scores, "rows_of_a_chunk", lambda *_, rows=rows: rows)
        torch.manual_seed(1)
        head = PlainTextHead(data.config.model.model_copy(update={"reads_time": False}))
        hidden = torch.randn(len(weights), 16, requires_grad=True)
        out = head(
            hidden,
            torch.zeros(len(hidden), dtype=torch.int64),
            None,
            TokenQuery(function=row_scores(divergence)),
        )
        found = out.values[:, 0]
        (found @ weights).backward()
        results.append((found.detach(), hidden.grad, head.weight.grad))
    for few, all_at_once in zip(*results, strict=True):
        torch.testing.assert_close(few, all_at_once, rtol=1e-5, atol=1e-6)


class ContextFree(torch.nn.Module):
    """Predicts the same distribution at every position, whatever it reads."""

    def __init__(self, log_p):
        super().__init__()
        self.log_p = log_p

    def forward(self, text, latents, query, **unread):
        assert bool(text.attention_mask.flatten()[query.positions].all())
        assert float(text.timesteps.min()) >= 0 and float(text.timesteps.max()) <= 1
        logits = self.log_p.expand(len(query.positions), -1)
        scores = TokenScores(values=query.function(logits, slice(0, len(logits))))
        return ModelOutput(scores, length_logits=torch.zeros(len(text.tokens), 16))


@pytest.mark.parametrize(
    "name, diffusion", [("gidd", {"uniform_share": 0.0}), ("gidd", {}), ("hdlm", {"gamma": 2.0})]
)
def test_a_context_free_denoiser_costs_its_cross_entropy(name, diffusion):
    """In training's batches and in the scores of `mmldlm evaluate`, whatever the training weighs
    by.
    """
    rows = FakeStore(2000)
    log_p = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    log_p[MASK] = float("-inf")
    log_p = log_p.log_softmax(0)
    data = data_of(name, text_diffusion=diffusion)
    words = np.concatenate([np.append(tokens, EOS) for tokens in rows.tokens])
    expected = -float(log_p[torch.from_numpy(words)].double().mean())
    objective, model = TASKS[name].objective(data.config), ContextFree(log_p)
    batches = [
        b for step in range(20) for b in micro_batches(name, data, step=step, size=100, store=rows)
    ]
    found = [objective(model, batch)[1]["text_nelbo_sum"] / batch.num_tokens for batch in batches]
    assert_mean(torch.stack(found), expected)

    process = TASKS[name].process_of_data(data)
    pretrained = SimpleNamespace(model=model, text_config=data.config.text_diffusion)
    model.config, model.token_clusters = data.config.model, torch.from_numpy(CLUSTERS)
    assert type(TASKS[name].process_of_model(pretrained)) is type(process)
    tokens = torch.full((400, 12), PAD)
    real = torch.zeros(400, 12, dtype=torch.bool)
    for row in range(400):
        text = torch.tensor([*rows.tokens[row], EOS])
        tokens[row, : len(text)], real[row, : len(text)] = text, True
    generator = torch.Generator().manual_seed(2)
    totals = []
    for draw in range(8):
        uniform = torch.rand(400, 13, dtype=torch.float64, generator=generator)
        scores = TASKS[name].score_texts(pretrained, tokens, real, None, uniform, (draw % 4, 4))
        assert bool((scores.scored <= real.sum(1)).all()) and len(scores.length_nll) == 400
        totals.append(scores.nats)
    nats = torch.stack(totals).mean(0)
    truth = torch.where(real, -log_p[tokens].double(), 0.0).sum(1)
    assert_mean(nats - truth, 0.0)


def assert_mean(found, expected):
    error = float(found.double().std() / len(found) ** 0.5)
    assert abs(float(found.double().mean()) - expected) <= 4 * error, (
        float(found.double().mean()),
        expected,
        error,
    )


@pytest.mark.parametrize(
    "name, weightings", [("gidd", ("elbo", "clip", "dynamic")), ("hdlm", ("elbo", "clip"))]
)
def test_training_weights_change_the_loss_and_never_the_reported_nelbo(name, weightings):
    losses, nelbos = [], []
    for weighting in weightings:
        clip = {"text_weight_clip": 1.0} if weighting == "clip" else {}
        data = data_of(name, loss={"text_weighting": weighting, "length_loss_weight": 0, **clip})
        (batch,) = micro_batches(name, data)
        loss, sums = TASKS[name].objective(data.config)(fresh_model(name, data), batch)
        losses.append(float(loss.detach()))
        nelbos.append(float(sums["text_nelbo_sum"]) / batch.counts["text_tokens"])
    assert len(set(losses)) == len(weightings) and nelbos == pytest.approx(
        [losses[0]] * len(nelbos), rel=1e-5
    )


def test_a_latent_that_cannot_be_used_becomes_a_placeholder():
    rows, data = FakeStore(), data_of("gidd", "prefix")
    (clean,) = micro_batches("gidd", data, store=rows)
    hit = int(clean.ids[2])
    rows.latents[hit, 1] = np.nan
    (batch,) = micro_batches("gidd", data, store=rows)
    owners = batch.text_positions // batch.text_tokens.shape[1]
    assert not batch.real[2] and batch.bad[0]["id"] == hit and not bool((owners == 2).any())
    assert batch.counts == clean.counts  # other ranks do not know of it
