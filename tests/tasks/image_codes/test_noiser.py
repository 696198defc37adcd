"""Batches of codes: masked as the text is, on their own clock, as functions of seed, epoch, sample
and slot.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from mmldlm.data.batch_plan import BatchPlan
from mmldlm.tasks.registry import find_task, load_config
from mmldlm.tasks.translation.noiser import L2T, T2L
from tests.support.image_store import make_image_store

Q, N = 48, 16


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    return make_image_store(tmp_path_factory.mktemp("codes") / "store", codes=Q)


def opened(root, *more):
    task = find_task("image_codes")
    words = [
        "task=image_codes",
        f"data.latent_data_root={root}",
        "training.train_batch_size=32",
        *more,
    ]
    return task, task.open_data(load_config("tiny", None, words))


def collate(task, data, slots, step=3, size=32):
    plan = BatchPlan(data.train_lengths, size, data.config.training.seed)
    return task.collator(data).collate(
        plan.batch(step), np.asarray(slots), data.train, data.train_lengths
    )


def test_masked_ids_are_never_data_and_the_others_are_kept(codes):
    task, data = opened(codes)
    batch = collate(task, data, range(32), step=0)
    noised, clean = batch.latents[..., 0], batch.latent_clean[..., 0]
    stored = torch.from_numpy(data.train.get(batch.ids).latents)
    assert (
        torch.equal(batch.latent_clean, stored)
        and int(clean.max()) < Q
        and noised.dtype == torch.int64
    )
    masked = noised == Q
    assert torch.equal(noised[~masked], clean[~masked]) and int(noised.max()) == Q
    given = torch.from_numpy(batch.modes == L2T)
    assert 0 < int(given.sum()) < 32 and not bool(masked[given].any())
    assert bool((batch.latent_timesteps[given] == 0).all()) and bool(masked[~given].any(1).all())
    torch.testing.assert_close(batch.latent_timesteps, (masked.sum(1) / N).float())
    assert torch.equal(batch.code_positions, masked.flatten().nonzero()[:, 0])
    assert torch.equal(batch.code_targets, clean.flatten()[batch.code_positions])
    weights = torch.zeros(32).index_add_(0, batch.code_positions // N, batch.code_weights)
    torch.testing.assert_close(weights, N * (~given).float())  # of an image: its number of codes
    assert batch.counts["codes"] == N * int((~given).sum()) and "latents" not in batch.counts
    assert task.check_batch(data, batch) == []


def test_numbers_of_masks_are_spread_evenly_and_independent_of_the_text(codes):
    task, data = opened(codes, "training.loss_type=unconditional")
    batch = collate(task, data, range(32), step=0)
    counts = (batch.latents[..., 0] == Q).sum(1)
    assert counts.bincount(minlength=N + 1)[1:].tolist() == [2] * N, (
        "two of each in a batch of 2 N"
    )
    share = batch.text_timesteps
    assert abs(float(torch.corrcoef(torch.stack([share, counts.float()]))[0, 1])) < 0.6


def test_draws_do_not_depend_on_micro_batches_nor_change_those_of_the_text(codes, tmp_path):
    task, data = opened(codes)
    whole = collate(task, data, range(16), size=16)
    parts = [
        collate(task, data, slots, size=16) for slots in ([9, 10, 11, 12, 13, 14, 15], range(9))
    ]
    for name in ("latents", "latent_timesteps", "latent_is_null"):
        joined = torch.cat([getattr(parts[1], name), getattr(parts[0], name)])
        assert torch.equal(getattr(whole, name), joined), name
    # Two clocks: the masks of the codes are not those of the text.
    assert len(torch.unique(whole.latent_timesteps)) > 4


def test_null_captions_and_null_images_are_drawn_as_for_pixels(codes):
    task, data = opened(codes, "training.condition_dropout=0.5")
    batch = collate(task, data, range(32), step=0)
    for key, mode in (("text_is_null", T2L), ("latent_is_null", L2T)):
        null = getattr(batch, key).numpy()
        assert (
            null.any()
            and (batch.modes[null] == mode).all()
            and not null[batch.modes == mode].all()
        )


def test_a_damaged_id_is_left_out_and_named(codes, tmp_path):
    task, data = opened(root := shutil.copytree(codes, tmp_path / "store"))
    latents = np.load(root / "train" / "latents.npy", mmap_mode="r+")
    batch = collate(task, data, range(32), step=0)
    latents[batch.ids[2], 4] = Q
    latents.flush()
    found = collate(task, data, range(32), step=0)
    (bad,) = found.bad
    assert (
        bad["id"] == int(batch.ids[2])
        and f"id {Q} of a code, expected one below {Q}" in bad["reason"]
    )
    assert found.real.tolist() == [slot != 2 for slot in range(32)]
    assert 2 not in (found.code_positions // N).tolist() and int(found.latents.max()) <= Q


def test_the_check_of_batches_knows_what_is_wrong(codes):
    task, data = opened(codes, "training.loss_type=t2l")
    batch = collate(task, data, range(8), size=8)
    places = (batch.latents[..., 0] != Q).nonzero()
    batch.latents[tuple(places[0])] += 1
    assert len(task.check_batch(data, batch)) == 1
    batch = collate(task, data, range(8), size=8)
    batch.code_targets[0] += 1
    assert "code_targets" in task.check_batch(data, batch)[0]
