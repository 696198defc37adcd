import pickle

import numpy as np
import pytest
import torch

from mmldlm.data.batch_plan import BatchPlan, permute
from mmldlm.data.loader import MicroBatches, iterate_steps
from mmldlm.data.store import Rows
from mmldlm.diffusion.timesteps import low_discrepancy
from mmldlm.errors import UserError
from mmldlm.tasks.registry import build_config
from mmldlm.tasks.translation.noiser import L2T, T2L, UNCONDITIONAL, Noiser
from mmldlm.utils.counter_rng import counter_generator

MASK, PAD, EOS, DIM, SIZE = 3, 0, 2, 6, 101


class FakeStore:
    """The store's interface over arrays in memory."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.ids = [rng.integers(4, 50, rng.integers(1, 20)) for _ in range(SIZE)]
        self.latents = rng.standard_normal((SIZE, DIM)).astype(np.float32)
        self.lengths = np.array([len(t) + 1 for t in self.ids], dtype=np.int32)

    def get(self, indices):
        return Rows(self.tokens(indices), self.latents[indices])

    def tokens(self, indices):
        return [self.ids[i] for i in indices]


def with_token_ids(config):
    """The config as a store completes it."""
    config = config.model_copy(deep=True)
    model = config.model
    model.mask_token_id, model.pad_token_id, model.eos_token_id = MASK, PAD, EOS
    return config


def dataset(world=1, accum=1, rank=0, batch=12, sections=None, in_training=True, **training):
    config = build_config((sections or {}) | ({"training": training} if training else {}))
    rows = FakeStore()
    noiser = Noiser(
        with_token_ids(config),
        np.zeros(DIM, np.float32),
        np.ones(DIM, np.float32),
        in_training=in_training,
    )
    return MicroBatches(rows, BatchPlan(rows.lengths, batch, 0), noiser, rank, world, accum)


def by_sample(batches):
    """What the model would see of every real sample, whatever the micro-batch it lies in."""
    seen = {}
    for batch in batches:
        t = batch
        for row in np.flatnonzero(batch.real):
            length = int(t.attention_mask[row].sum())
            scored = t.text_samples == row
            seen[int(batch.ids[row])] = (
                t.text_tokens[row, :length].tolist(),
                t.latents[row].tolist(),
                float(t.text_timesteps[row]),
                float(t.latent_timesteps[row]),
                bool(t.text_is_null[row]),
                bool(t.latent_is_null[row]),
                t.text_targets[scored].tolist(),
                t.text_weights[scored].tolist(),
                int(batch.modes[row]),
                t.latent_targets[row].tolist(),
                t.latent_weights[row].tolist(),
                None if t.dropout_keys is None else int(t.dropout_keys[row]),
            )
    return seen


OPTIONS = {
    "training": {"l2t_condition_noise": 0.4},
    "model": {"dropout": 0.1},
    "latent_diffusion": {"schedule": "decoupled", "prediction": "x0_epsilon", "weighting": "ddm"},
}


@pytest.mark.parametrize("sections", [{}, OPTIONS], ids=["default", "options"])
@pytest.mark.parametrize(("world", "accum"), [(2, 1), (1, 3), (2, 2), (4, 1)])
def test_noise_does_not_depend_on_how_the_batch_is_cut(world, accum, sections):
    for step in (0, 8):  # step 8 is the epoch's last, incomplete batch
        whole = dataset(sections=sections)[step]
        parts = [
            dataset(world, accum, rank, sections=sections)[step * accum + m]
            for rank in range(world)
            for m in range(accum)
        ]
        assert by_sample(parts) == by_sample([whole])
        for part in parts:
            assert (
                part.counts["text_tokens"],
                part.counts["latents"],
                part.counts["texts"],
            ) == (
                whole.counts["text_tokens"],
                whole.counts["latents"],
                whole.counts["texts"],
            )


def draws_of_all_slots(noiser, batch):
    """Modes and timesteps of a whole global batch, in one go as every rank once drew them."""
    slots = np.arange(batch.size)
    offsets = counter_generator(noiser.seed, batch.epoch, batch.index, 0, 2).random(3)
    key = batch.epoch * 1_000_003 + batch.index
    ranks = [permute(slots, batch.size, noiser.seed * 3 + stream + 11, key) for stream in range(3)]
    uniform = np.remainder(ranks[0] / batch.size + offsets[0], 1.0) * noiser.mode_edges[-1]
    modes = np.minimum(np.searchsorted(noiser.mode_edges, uniform, side="right"), 2)
    return modes, *(
        low_discrepancy(ranks[stream], float(offsets[stream]), batch.size) for stream in (1, 2)
    )


@pytest.mark.parametrize(("world", "accum"), [(1, 1), (2, 3), (4, 2), (12, 1)])
def test_a_rank_draws_its_slots_of_the_global_batch(world, accum):
    """Digit for digit, also in the short batch of an epoch's end and in a later epoch."""
    data = dataset(world, accum, batch=24)
    noiser, plan = data.collator, data.plan
    for step in (0, 4, 7):
        batch = plan.batch(step)
        modes, text, latent = draws_of_all_slots(noiser, batch)
        for part in range(world * accum):
            slots = plan.slots(batch, world, accum, part % world, part // world)
            inside = np.minimum(slots, batch.size - 1)
            assert np.array_equal(noiser.modes(batch, slots), modes[inside])
            assert np.array_equal(noiser._uniforms(batch, slots, 1), text[inside])
            assert np.array_equal(noiser._uniforms(batch, slots, 2), latent[inside])


def test_a_step_is_counted_once_and_a_new_plan_again(monkeypatch):
    data, counted = dataset(accum=4), []
    count = data.collator._count
    monkeypatch.setattr(data.collator, "_count", lambda *words: counted.append(0) or count(*words))
    items = [data[item] for item in range(8)]
    assert len(counted) == 2 and all(item.counts == items[0].counts for item in items[:4])
    other = BatchPlan(data.plan.lengths, 12, seed=1)
    fresh = dataset(accum=4)
    data.plan = fresh.plan = other
    assert data[4].counts == fresh[4].counts and len(counted) == 3


def test_placeholders_weigh_nothing():
    part = dataset(world=4, rank=3)[8]
    assert not part.real.any() and part.num_tokens == 0
    t = part
    assert len(t.text_targets) == 0 and not t.latent_weights.any() and not t.length_weights.any()


def test_counts_are_those_of_the_whole_batch():
    batch = dataset()[0]
    text = batch.modes != T2L
    assert batch.counts["text_tokens"] == int(batch.attention_mask.sum(1).numpy()[text].sum())
    assert (
        batch.counts["latents"] == (batch.modes != L2T).sum()
        and batch.counts["texts"] == text.sum()
    )


def test_modes_noise_the_right_side():
    for batch in (dataset()[i] for i in range(6)):
        t, modes = batch, torch.from_numpy(batch.modes)
        clean = t.latent_clean
        assert torch.equal(t.latents[modes == L2T], clean[modes == L2T])
        assert (t.latent_timesteps[modes == L2T] == 0).all() and (
            t.text_timesteps[modes == T2L] == 0
        ).all()
        assert not (t.text_tokens[modes == T2L] == MASK).any()
        assert (t.text_timesteps[modes != T2L] > 0).all() and (
            t.latent_timesteps[modes != L2T] > 0
        ).all()
        assert (modes[t.text_samples] != T2L).all()
        assert not t.latent_is_null[modes != L2T].any() and not t.text_is_null[modes != T2L].any()
        assert torch.equal(t.latent_weights > 0, modes != L2T)


def test_mode_shares_are_exact_over_an_epoch_of_strata():
    data = dataset(
        loss_type="mixed", loss_type_weights={"l2t": 0.5, "t2l": 0.25, "unconditional": 0.25}
    )
    for step in range(5):
        modes = data[step].modes
        assert [int((modes == mode).sum()) for mode in (UNCONDITIONAL, L2T, T2L)] == [3, 6, 3]
    assert set(dataset(loss_type="l2t")[0].modes.tolist()) == {L2T}


def test_padding_and_special_tokens():
    for step in range(4):
        t = dataset(loss_type="l2t")[step]
        real = t.attention_mask
        assert (t.text_tokens[~real] == PAD).all()
        assert real.flatten()[t.text_positions].all()
        assert torch.isin(t.text_targets, torch.tensor([MASK, PAD])).sum() == 0
        ends = t.length_targets
        restored = (
            t.text_tokens.flatten().scatter(0, t.text_positions, t.text_targets).view(real.shape)
        )
        assert (restored.gather(1, ends[:, None]) == EOS).all()
        assert (t.text_tokens.flatten()[t.text_positions] == MASK).all()


def test_epochs_and_seeds_differ():
    data = dataset()
    per_epoch = data.plan.batches_per_epoch
    a = by_sample([data[i] for i in range(per_epoch)])
    b = by_sample([data[per_epoch + i] for i in range(per_epoch)])
    c = by_sample([dataset(seed=1)[i] for i in range(per_epoch)])
    assert a.keys() == b.keys() == c.keys()
    # A text of one or two tokens may be masked alike twice; noise never repeats.
    assert sum(a[i] == b[i] for i in a) < 6 and sum(a[i] == c[i] for i in a) < 6


def test_iteration_from_the_middle_and_with_workers():
    straight = [b[0].latents for b in iterate_steps(dataset(), 0, 12)]
    before = torch.get_rng_state()
    resumed = [b[0].latents for b in iterate_steps(dataset(), 7, 12)]
    # Of dropout: a checkpoint holds it, and a resume opens an iterator.
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x, y) for x, y in zip(straight[7:], resumed, strict=True))
    workers = [b[0].latents for b in iterate_steps(dataset(), 7, 12, num_workers=2)]
    assert all(torch.equal(x, y) for x, y in zip(resumed, workers, strict=True))


def test_fully_masked_only_is_the_named_option():
    config = build_config(
        {"training": {"loss_type": "l2t"}, "text_diffusion": {"fully_masked_only": True}}
    )
    rows = FakeStore()
    noiser = Noiser(with_token_ids(config), np.zeros(DIM, np.float32), np.ones(DIM, np.float32))
    t = MicroBatches(rows, BatchPlan(rows.lengths, 12, 0), noiser, 0, 1, 1)[0]
    assert (t.text_timesteps == 1).all() and len(t.text_targets) == int(t.attention_mask.sum())


def noised(rows, **sections):
    config = build_config(sections)
    noiser = Noiser(
        with_token_ids(config),
        np.zeros(DIM, np.float32),
        np.full(DIM, DIM**-0.5, np.float32),
        max_norm=9.0,
    )
    return MicroBatches(rows, BatchPlan(rows.lengths, 12, 0), noiser, 0, 1, 1)[0]


def test_l2_normalise_makes_unit_vectors_before_scaling():
    batch = noised(FakeStore(), latent_diffusion={"l2_normalize": True, "scaling": "sqrt_d"})
    norms = batch.latent_clean.norm(dim=1)
    assert torch.allclose(norms, torch.full_like(norms, DIM**0.5), rtol=1e-5)
    with pytest.raises(UserError, match="scaling=sqrt_d"):
        build_config({"latent_diffusion": {"l2_normalize": True}})


def test_nan_to_num_keeps_the_sample_and_names_it():
    rows = FakeStore()
    victim = int(noised(rows).ids[3])
    rows.latents[victim, 2] = np.nan
    left_out, mended = noised(rows), noised(rows, stability={"nan_to_num": True})
    place = left_out.ids.tolist().index(victim)
    assert not left_out.real[place] and mended.real[place]
    assert [bad["id"] for bad in left_out.bad] == [bad["id"] for bad in mended.bad] == [victim]
    assert "replaced by the mean" in mended.bad[0]["reason"]
    assert mended.bad[0]["repaired"] and "repaired" not in left_out.bad[0]
    assert mended.latent_clean[place, 2] == 0 and torch.isfinite(mended.latents).all()


# -- options of training alone --------------------------------------------------------------------


def test_options_change_their_samples_and_no_other_and_no_evaluation():
    plain = by_sample([dataset()[i] for i in range(9)])
    training = {"l2t_condition_noise": 0.5, "l2t_condition_timestep": 0.2}
    changed = by_sample([dataset(**training)[i] for i in range(9)])
    assert by_sample([dataset(in_training=False, **training)[i] for i in range(9)]) == plain
    noised = 0
    for sample, after in changed.items():
        before = plain[sample]
        mode, timestep, dropped = after[8], after[3], after[4] or after[5]
        if after == before:
            continue
        assert not dropped and mode == L2T
        # The text is the same.
        assert after[0] == before[0] and after[2] == before[2] and after[6:9] == before[6:9]
        assert before[3] == 0.0 and 0 < timestep <= 0.2 and after[1] != before[1]
        assert after[10] == 0.0  # nothing is scored on a condition
        noised += 1
    total = sum(before[8] == L2T and not before[5] for before in plain.values())
    assert 0.25 * total < noised < 0.75 * total


def test_a_noised_condition_is_the_process_at_its_timestep():
    t = dataset(loss_type="l2t", l2t_condition_noise=0.9, condition_dropout=0.0)[0]
    off = dataset(loss_type="l2t", condition_dropout=0.0)[0]
    angle = 0.5 * np.pi * t.latent_timesteps[:, None]
    noise = (t.latents - angle.cos() * off.latents) / angle.sin().clamp_min(1e-3)
    moved = t.latent_timesteps > 0
    assert 0.6 < float(moved.float().mean()) <= 1 and 0.5 < float(noise[moved].std()) < 1.5
    assert torch.equal(t.latents[~moved], off.latents[~moved])


@pytest.mark.parametrize(
    "values, match",
    [
        (
            {"training": {"loss_type": "t2l", "l2t_condition_noise": 0.2}},
            "l2t_condition_noise=0.2 is read only with",
        ),
        (
            {"training": {"l2t_condition_timestep": 0.1}},
            "read only with training.l2t_condition_noise",
        ),
        ({"loss": {"text_weighting": "uniform", "text_weight_clip": 1.0}}, "text_weight_clip"),
        ({"latent_diffusion": {"prediction": "x0_epsilon"}}, "x0_epsilon to decoupled"),
        ({"latent_diffusion": {"schedule": "decoupled", "prediction": "v"}}, "v to cosine"),
        ({"latent_diffusion": {"schedule": "decoupled", "prediction": "flow"}}, "flow belongs"),
        (
            {"latent_diffusion": {"schedule": "decoupled", "weighting": "velocity"}},
            "infinite at t = 0",
        ),
        (
            {"latent_diffusion": {"weighting": "ddm"}},
            "belongs to latent_diffusion.schedule=decoupled",
        ),
        ({"latent_diffusion": {"schedule": "decoupled", "ddm_weight_cap": 5.0}}, "read only with"),
        ({"model": {"latent_predictions": 2}}, "latent_predictions=2 belongs to"),
        *(
            (
                {
                    "model": {"scale_noisy_latents": True},
                    "latent_diffusion": {"schedule": schedule, "prediction": prediction},
                    "loss": {"latent_loss": "mse"},
                },
                "scale_noisy_latents",
            )
            for schedule, prediction in (
                ("decoupled", "x0_epsilon"),
                ("rectified_flow", "flow"),
                ("cosine", "epsilon"),
            )
        ),
    ],
)
def test_options_that_nothing_reads_are_refused(values, match):
    with pytest.raises(UserError, match=match):
        build_config(values)


def test_the_head_is_twice_as_wide_for_two_predictions():
    config = build_config(
        {"latent_diffusion": {"schedule": "decoupled", "prediction": "x0_epsilon"}}
    )
    assert config.model.latent_predictions == 2
    again = build_config(config.model_dump())
    assert again == config


def test_logit_normal_has_the_mean_and_spread_of_the_config():
    def logits(**latent):
        sections = {
            "latent_diffusion": {"timesteps": "logit_normal", **latent},
            "training": {"loss_type": "t2l"},
        }
        batches = [dataset(batch=50, sections=sections)[step] for step in range(2)]
        return torch.logit(torch.cat([batch.latent_timesteps for batch in batches]).double())

    default, moved = logits(), logits(logit_normal_mean=0.8, logit_normal_std=0.5)
    inside = default.abs() < 6  # min_timestep clamps the rest
    torch.testing.assert_close(moved[inside], 0.8 + 0.5 * default[inside], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("section", "keys", "reader"),
    [
        ("latent_diffusion", {"logit_normal_mean": 0.8}, {"timesteps": "logit_normal"}),
        ("latent_diffusion", {"logit_normal_std": 0.8}, {"timesteps": "logit_normal"}),
        ("latent_diffusion", {"min_snr_gamma": 20}, {"weighting": "min_snr"}),
        ("loss", {"normalize_eps": 1e-6}, {"latent_loss": "normalized_mse"}),
        ("text_diffusion", {"min_timestep": 0.01}, {"masking": "bernoulli"}),
        (
            "text_diffusion",
            {"masking": "bernoulli", "fully_masked_only": True},
            {"fully_masked_only": False},
        ),
        (
            "text_diffusion",
            {"timesteps": "uniform", "fully_masked_only": True},
            {"fully_masked_only": False},
        ),
        ("text_diffusion", {"eps": 0.01, "schedule": "cosine"}, {"schedule": "loglinear"}),
        (
            "latent_diffusion",
            # On the cosine path the weight is bounded by SNR + 1.
            {"velocity_floor": 0.05, "weighting": "velocity"},
            {"schedule": "rectified_flow"},
        ),
    ],
)
def test_keys_that_are_not_read_are_errors(section, keys, reader):
    with pytest.raises(UserError, match=f"{section}.{next(iter(keys))}=.* is read only with"):
        build_config({section: keys})
    config = build_config({section: keys | reader})
    assert build_config(config.model_dump()) == config


def test_the_preset_of_jit_is_accepted():
    latent = {
        "schedule": "rectified_flow",
        "weighting": "velocity",
        "velocity_floor": 0.05,
        "clamp_x0": 1.0,
    }
    config = build_config(
        {"latent_diffusion": {**latent, "timesteps": "logit_normal", "logit_normal_mean": 0.8}}
    )
    weights = config.latent_diffusion.process().loss_weights(
        torch.tensor([0.01, 0.5], dtype=torch.float64)
    )
    torch.testing.assert_close(weights, torch.tensor([400.0, 4.0], dtype=torch.float64))


@pytest.mark.parametrize(("world", "accum"), [(2, 1), (1, 3)])
def test_noise_of_the_device_does_not_depend_on_how_the_batch_is_cut(world, accum, monkeypatch):
    monkeypatch.setattr("mmldlm.tasks.translation.noiser.MAX_HOST_NOISE", DIM - 1)
    for step in (0, 8):
        parts = [
            dataset(world, accum, rank)[step * accum + m].to("cpu")
            for rank in range(world)
            for m in range(accum)
        ]
        assert by_sample(parts) == by_sample([dataset()[step].to("cpu")])


def test_only_large_samples_are_noised_on_the_device(monkeypatch):
    """Below the limit every draw is as ever; above it a batch brings keys, of which `to` makes
    what it lacks.
    """
    latent = {"latent_diffusion": {"schedule": "rectified_flow", "prediction": "flow"}}
    host = dataset(batch=100, sections=latent)[0]
    assert host.noise_keys is None
    monkeypatch.setattr("mmldlm.tasks.translation.noiser.MAX_HOST_NOISE", DIM - 1)
    # As a loading process sends it.
    batch = pickle.loads(pickle.dumps(dataset(batch=100, sections=latent)[0]))
    assert batch.latents is batch.latent_targets is None
    assert batch.to("cpu").to("cpu").named_tensors().keys() == host.named_tensors().keys()
    t, clean = batch, batch.latent_clean
    for name in ("latent_clean", "latent_timesteps", "latent_weights", "latent_is_null"):
        assert torch.equal(getattr(t, name), getattr(host, name)), name
    is_l2t = torch.from_numpy(batch.modes == L2T)
    assert is_l2t.any() and torch.equal(t.latents[is_l2t], clean[is_l2t])
    times = t.latent_timesteps[~is_l2t, None]
    noise = t.latent_targets[~is_l2t] + clean[~is_l2t]  # the velocity is noise - clean
    torch.testing.assert_close(t.latents[~is_l2t], (1 - times) * clean[~is_l2t] + times * noise)
    error = noise.numel() ** -0.5
    assert abs(float(noise.mean())) < 4 * error and abs(float(noise.var()) - 1) < 6 * error
    assert not torch.isclose(noise, (host.latent_targets + clean)[~is_l2t], atol=1e-3).any(1).all()
