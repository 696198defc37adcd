import numpy as np
import pytest
import torch

from mmldlm.data.batch_plan import BatchPlan, local_slots
from mmldlm.data.store import Rows
from mmldlm.errors import UserError
from mmldlm.models import MultimodalMMDiT
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.tasks.registry import build_config, load_config
from mmldlm.tasks.translation.noiser import Noiser
from mmldlm.tasks.translation.objective import TranslationObjective
from mmldlm.tasks.translation.parameter_plan import frozen_names, parameter_plan
from mmldlm.tasks.translation.task import TranslationTask
from tests.support.forward import run_model
from tests.tasks.translation.test_noiser import with_token_ids

DIM, SIZE = 6, 40


class FakeStore:
    def __init__(self):
        rng = np.random.default_rng(0)
        self.tokens = [rng.integers(4, 30, rng.integers(1, 12)) for _ in range(SIZE)]
        self.latents = rng.standard_normal((SIZE, DIM)).astype(np.float32)
        self.lengths = np.array([len(t) + 1 for t in self.tokens], dtype=np.int32)

    def get(self, indices):
        return Rows([self.tokens[i] for i in indices], self.latents[indices])


def model(tie=False):
    torch.manual_seed(0)
    config = ModelConfig(
        hidden_size=16,
        n_blocks=2,
        n_heads=2,
        cond_dim=16,
        max_seq_len=16,
        latent_dim=DIM,
        tokens_per_latent=2,
        vocab_size=30,
        mask_token_id=3,
        pad_token_id=0,
        eos_token_id=2,
        tie_embeddings=tie,
    )
    made = MultimodalMMDiT(config)
    for parameter in made.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def micro_batches(config, world=1, accum=1, step=0, size=12):
    rows = FakeStore()
    noiser = Noiser(with_token_ids(config), np.zeros(DIM, np.float32), np.ones(DIM, np.float32))
    plan = BatchPlan(rows.lengths, size, 0)
    return [
        noiser.collate(
            plan.batch(step), local_slots(size, world, accum, rank, micro), rows, rows.lengths
        )
        for micro in range(accum)
        for rank in range(world)
    ]


def gradients(config, batches):
    net = model()
    loss = sum(TranslationObjective(config)(net, batch)[0] for batch in batches)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in net.named_parameters()}


# Step 3 is the epoch's last batch: 4 of 12 samples, some ranks have none.
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("mode", ["mixed", "l2t", "t2l", "unconditional"])
def test_gradients_add_up_however_the_batch_is_cut(mode, step):
    config = build_config({"training": {"loss_type": mode}})
    whole_loss, whole = gradients(config, micro_batches(config, step=step))
    for world, accum in ((2, 1), (1, 3), (2, 2), (4, 1)):
        loss, parts = gradients(config, micro_batches(config, world, accum, step))
        torch.testing.assert_close(loss, whole_loss)
        for name, grad in whole.items():
            assert grad is not None and parts[name] is not None, name
            torch.testing.assert_close(parts[name], grad, rtol=1e-4, atol=1e-6)


def test_changing_padding_changes_nothing():
    config = build_config({})
    first, second = micro_batches(config)[0], micro_batches(config)[0]
    pads = ~second.attention_mask
    second.text_tokens[pads] = 17
    net, objective = model(), TranslationObjective(config)
    assert torch.equal(objective(net, first)[0], objective(net, second)[0])


def test_metrics_are_those_of_the_definition():
    config = build_config({"training": {"loss_type": "l2t"}})
    batch = micro_batches(config)[0]
    net = model()
    loss, metrics = TranslationObjective(config)(net, batch)
    t = batch
    logits = run_model(
        net,
        t.text_tokens,
        t.latents,
        t.text_timesteps,
        t.latent_timesteps,
        t.attention_mask,
        latent_is_null=t.latent_is_null,
        text_is_null=t.text_is_null,
    ).text.logits
    nll = (
        -logits.flatten(0, 1)[t.text_positions]
        .log_softmax(-1)
        .gather(1, t.text_targets[:, None])[:, 0]
    )
    expected = (nll * t.text_weights).sum()
    torch.testing.assert_close(metrics["text_nelbo_sum"], expected)
    rest = loss - expected / batch.counts["text_tokens"]
    torch.testing.assert_close(
        rest, 0.1 * metrics["length_nll_sum"] / batch.counts["texts"], rtol=1e-3, atol=1e-5
    )


def test_clamps_leave_a_zero_gradient_above_them():
    plain = build_config({"training": {"loss_type": "l2t"}, "loss": {"length_loss_weight": 0.0}})
    clamped = build_config(
        {
            "training": {"loss_type": "l2t"},
            "loss": {"length_loss_weight": 0.0, "text_loss_clamp": 1e-6},
        }
    )
    _, free = gradients(plain, micro_batches(plain))
    _, none = gradients(clamped, micro_batches(clamped))
    assert any(g.any() for g in free.values()) and not any(g.any() for g in none.values())
    loose = build_config(
        {
            "training": {"loss_type": "l2t"},
            "loss": {"length_loss_weight": 0.0, "text_loss_clamp": 100},
        }
    )
    _, same = gradients(loose, micro_batches(loose))
    assert all(torch.equal(same[name], grad) for name, grad in free.items())


def test_normalised_mse_is_2_minus_2_cosine_and_refused_where_unsound():
    config = build_config({"loss": {"latent_loss": "normalized_mse"}})
    a, b = torch.randn(5, DIM), torch.randn(5, DIM)
    error = TranslationObjective(config)._latent_error(a, b)
    torch.testing.assert_close(error, 2 - 2 * torch.nn.functional.cosine_similarity(a, b, dim=-1))
    for prediction in ("epsilon", "v"):
        values = {
            "loss": {"latent_loss": "normalized_mse"},
            "latent_diffusion": {"prediction": prediction},
        }
        with pytest.raises(UserError, match="scale"):
            build_config(values)
        values["loss"]["allow_scale_free_latent_loss"] = True
        build_config(values)


def test_t2l_loss_is_not_solved_by_copying_the_input():
    """MM-LDLM's t2l: x_t was its own target, and copying it cost 1e-12."""
    config = build_config({"training": {"loss_type": "t2l"}})
    total = count = 0.0
    for step in range(4):
        t = micro_batches(config, step=step)[0]
        scored = t.latent_weights > 0
        z, target = t.latents[scored], t.latent_targets[scored]
        best = (z * target).sum() / (z * z).sum()
        total, count = total + (best * z - target).square().mean(1).sum(), count + scored.sum()
    assert total / count > 0.3


@pytest.mark.parametrize(
    ("mode", "freeze", "frozen", "trained"),
    [
        (
            "l2t",
            "by_mode",
            ("latent_encoder", "latent_head"),
            ("text_encoder", "text_head", "blocks", "length_head"),
        ),
        (
            "t2l",
            "by_mode",
            ("text_encoder", "text_head", "length_head"),
            ("latent_encoder", "latent_head", "blocks"),
        ),
        (
            "l2t",
            "none",
            ("latent_head",),
            ("latent_encoder", "text_encoder", "text_head", "blocks"),
        ),
        (
            "t2l",
            "none",
            ("text_head", "length_head"),
            ("text_encoder", "latent_encoder", "latent_head", "blocks"),
        ),
        (
            "mixed",
            "by_mode",
            (),
            (
                "latent_encoder",
                "latent_head",
                "text_encoder",
                "text_head",
                "blocks",
                "length_head",
            ),
        ),
        ("unconditional", "by_mode", (), ("latent_encoder", "text_encoder", "blocks")),
    ],
)
def test_freezing_by_mode(mode, freeze, frozen, trained):
    net = model()
    config = build_config({"training": {"loss_type": mode, "freeze": freeze}})
    counts = parameter_plan(net, config).apply(net, net.parameter_groups())
    for name, parameter in net.named_parameters():
        module = name.split(".")[0]
        assert not (module in frozen and parameter.requires_grad), name
        assert not (module in trained and not parameter.requires_grad), name
    assert sum(part for part, _ in counts.values()) == sum(
        p.numel() for p in net.parameters() if p.requires_grad
    )
    objective = TranslationObjective(config)
    sum(
        objective(net, batch)[0] for step in range(3) for batch in micro_batches(config, step=step)
    ).backward()
    for name, parameter in net.named_parameters():
        assert (parameter.grad is not None) == (name not in frozen_names(net, mode, freeze)), name


# -- MM-LDLM's measures ---------------------------------------------------------------------------


def loss_of(batch, **loss):
    return TranslationObjective(build_config({"loss": loss}))(model(), batch)[0]


def test_clipped_weights_are_those_of_the_batch_cut_off():
    (batch,) = micro_batches(build_config({"text_diffusion": {"masking": "bernoulli"}}))
    limit = float(batch.text_weights.median())
    clipped = loss_of(batch, text_weight_clip=limit, latent_weight_clip=0.25)
    batch.text_weights = batch.text_weights.clamp_max(limit)
    batch.latent_weights = batch.latent_weights.clamp_max(0.25)
    assert torch.equal(clipped, loss_of(batch)) and not torch.equal(
        clipped, loss_of(micro_batches(build_config({}))[0])
    )


def test_a_clamped_prediction_has_no_gradient_beyond_and_a_clamped_target_is_another():
    (batch,) = micro_batches(build_config({"training": {"loss_type": "t2l"}}))
    tight = dict(latent_prediction_clamp=1e-6, length_loss_weight=0.0)
    net = model()
    TranslationObjective(build_config({"loss": tight}))(net, batch)[0].backward()
    assert all(not p.grad.any() for p in net.parameters() if p.grad is not None)
    clamped = loss_of(batch, latent_target_clamp=0.5)
    batch.latent_targets = batch.latent_targets.clamp(-0.5, 0.5)
    assert torch.equal(clamped, loss_of(batch))


def test_uniform_text_weights_change_the_loss_and_not_the_nelbo():
    (batch,) = micro_batches(build_config({}))
    found, expected = (
        TranslationObjective(build_config({"loss": {"text_weighting": kind}}))(model(), batch)
        for kind in ("uniform", "elbo")
    )
    assert not torch.equal(found[0], expected[0])
    assert torch.equal(found[1]["text_nelbo_sum"], expected[1]["text_nelbo_sum"])
    batch.text_weights.fill_(2.0)
    assert torch.equal(found[0], TranslationObjective(build_config({}))(model(), batch)[0])
    with pytest.raises(UserError, match="text_weight_clip"):
        build_config({"loss": {"text_weighting": "uniform", "text_weight_clip": 3.0}})


# -- two predictions ------------------------------------------------------------------------------

DECOUPLED = {"schedule": "decoupled", "prediction": "x0_epsilon", "weighting": "ddm"}


def wide_model():
    torch.manual_seed(0)
    config = ModelConfig(
        hidden_size=16,
        n_blocks=2,
        n_heads=2,
        cond_dim=16,
        max_seq_len=16,
        latent_dim=DIM,
        tokens_per_latent=2,
        vocab_size=30,
        mask_token_id=3,
        pad_token_id=0,
        eos_token_id=2,
        latent_predictions=2,
    )
    return MultimodalMMDiT(config)


@pytest.mark.parametrize("weighting", ["unit", "min_snr", "ddm", "ddm_inverse"])
def test_two_predictions_have_two_weighted_errors(weighting):
    config = build_config(
        {
            "latent_diffusion": {**DECOUPLED, "weighting": weighting},
            "training": {"loss_type": "t2l"},
            "loss": {"length_loss_weight": 0.0},
        }
    )
    (batch,) = micro_batches(config)
    t, net = batch, wide_model()
    assert t.latent_targets.shape == (12, 2 * DIM) and t.latent_weights.shape == (12, 2)
    assert torch.equal(t.latent_targets[:, :DIM], t.latent_clean)
    torch.nn.init.normal_(net.latent_head.to_latent.weight, std=0.1)
    loss, metrics = TranslationObjective(config)(net, batch)
    prediction = run_model(
        net,
        t.text_tokens,
        t.latents,
        t.text_timesteps,
        t.latent_timesteps,
        t.attention_mask,
        text_is_null=t.text_is_null,
        latent_is_null=t.latent_is_null,
    ).latent
    error = (prediction - t.latent_targets).square().unflatten(1, (2, DIM)).mean(-1)
    torch.testing.assert_close(loss, (error * t.latent_weights).sum() / 12)
    torch.testing.assert_close(metrics["latent_error_sum"], error.sum())
    times = t.latent_timesteps[:, None].double()
    x0, noise = prediction.double().chunk(2, -1)
    both = t.latents - times.sqrt() * noise + times * x0
    cosine = torch.nn.functional.cosine_similarity(both, t.latent_clean.double(), dim=-1).sum()
    torch.testing.assert_close(metrics["latent_cosine_sum"].double(), cosine, rtol=1e-5, atol=1e-5)
    gap = (x0 - both).square().mean(-1).sqrt().sum()
    torch.testing.assert_close(metrics["latent_gap_sum"].double(), gap, rtol=1e-5, atol=1e-5)
    assert metrics["latent_scored"] == 12
    (metric,) = (m for m in TranslationTask().metrics_of(config) if m.name == "latent_gap")
    assert metric.value({k: float(v) for k, v in metrics.items()}, batch.counts) == pytest.approx(
        float(gap.detach()) / 12, rel=1e-5
    )
    assert set(TranslationTask().sums_of(config)) == set(metrics)
    clipped = build_config(
        {"latent_diffusion": DECOUPLED, "training": {"loss_type": "t2l"},
         "loss": {"latent_weight_clip": 2.5, "length_loss_weight": 0.0}}
    )  # fmt: skip
    (batch,) = micro_batches(clipped)
    weights = batch.latent_weights
    assert (weights > 2.5).any() and (weights < 2.5).any()
    found = TranslationObjective(clipped)(net, batch)[0]
    torch.testing.assert_close(found, (error * weights.clamp_max(2.5)).sum() / 12)


def test_one_prediction_logs_no_gap():
    config = build_config({})
    (batch,) = micro_batches(config)
    metrics = TranslationObjective(config)(model(), batch)[1]
    assert set(TranslationTask().sums_of(config)) == set(metrics)
    assert not any("gap" in name for name in metrics)
    assert "latent_gap" not in [metric.name for metric in TranslationTask().metrics_of(config)]


def test_gradients_with_dropout_and_two_predictions_add_up_however_the_batch_is_cut():
    sections = {
        "latent_diffusion": DECOUPLED,
        "model": {"dropout": 0.2},
        "training": {"l2t_condition_noise": 0.3},
    }
    config = build_config(sections)

    def run(batches):
        net = wide_model()
        net.config.dropout = 0.2
        loss = sum(TranslationObjective(config)(net, batch)[0] for batch in batches)
        loss.backward()
        return loss.detach(), [p.grad for p in net.parameters()]

    for step in (0, 3):
        whole, expected = run(micro_batches(config, step=step))
        for world, accum in ((2, 1), (1, 3), (4, 1)):
            loss, found = run(micro_batches(config, world, accum, step))
            torch.testing.assert_close(loss, whole)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_mixture_of_one_mode_is_that_mode():
    for weights, mode in (
        ("{t2l: 1}", "t2l"),
        ("{l2t: 2.0, t2l: 0}", "l2t"),
        ("{l2t: 1, t2l: 1}", "mixed"),
    ):
        words = ["training.loss_type=mixed", f"training.loss_type_weights={weights}"]
        config = load_config("tiny", None, [*words, "training.freeze=none"])
        assert config.training.trained_mode == mode
