"""Figures of pictures, on cases whose answers are known."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mmldlm.evaluation.image_figures import (
    Gallery,
    group_ids,
    nearest,
    picture_estimates,
    ranks,
    seam_ratio,
)
from mmldlm.evaluation.image_report import ImageReport
from mmldlm.evaluation.images import copy_estimates
from mmldlm.evaluation.statistics import Estimate


def random_images(count, size=8, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 1), dtype=np.uint8)


def gallery(images, groups=None):
    return Gallery(images, group_ids(groups, images), np.zeros(images[0].size, np.float32))


def test_equal_pictures_and_groups_are_hits_of_each_other():
    images = random_images(4)
    images[2] = images[0]
    assert group_ids(None, images)[[0, 2]].tolist() == [group_ids(None, images)[0]] * 2
    joined = group_ids(np.array([7, 8, 9, 8]), images)  # 0 = 2 by pixels, 1 = 3 by group
    assert joined[0] == joined[2] != joined[1] == joined[3]
    by_caption = group_ids(np.array([7, 8, 9, 8]), images, [[1, 2], [3], [4], [3, 3]])
    np.testing.assert_array_equal(by_caption[:, None] == by_caption, joined[:, None] == joined)
    assert (
        len(set(group_ids(np.array([7, 8, 9, 8]), images, [[1, 2], [3], [4], [1, 2]]).tolist()))
        == 1
    )
    assert ranks(images, gallery(images)).tolist() == [0, 0, 0, 0]


def test_a_constant_picture_retrieves_nothing():
    images = random_images(20)
    same = np.repeat(images[:1], 20, axis=0)
    found = ranks(same, gallery(images))
    assert found[0] == 0 and (found[1:] >= 1).all()
    flat = np.full_like(images, 128)
    flat_gallery = Gallery(
        images, np.arange(20), (flat[0].reshape(-1).astype(np.float32) / 127.5 - 1)
    )
    assert (ranks(flat, flat_gallery) == 19).all()  # zero vectors: ties count against it


def test_the_same_patches_in_other_places_are_another_image():
    """All have the same mean patch: only the whole image tells them apart."""
    patches = random_images(1, 16).reshape(4, 4, 4, 4).transpose(0, 2, 1, 3).reshape(16, 4, 4)
    orders = [np.random.default_rng(seed).permutation(16) for seed in range(12)]
    mixed = [
        patches[order].reshape(4, 4, 4, 4).transpose(0, 2, 1, 3).reshape(16, 16, 1)
        for order in orders
    ]
    found = picture_estimates(
        np.stack(mixed), np.roll(np.arange(12), 1), gallery(np.stack(mixed)), 4
    )
    assert found["recall_at_1"].value == 1 and found["image_cosine_gap"].value > 0.5


def test_a_brightness_that_all_images_share_is_no_similarity():
    images = (random_images(30) // 16 + 240).astype(np.uint8)
    center = (images.reshape(30, -1).astype(np.float32) / 127.5 - 1).mean(0)
    own = Gallery(images, np.arange(30), center)
    found = picture_estimates(
        images[np.roll(np.arange(30), 1)], np.roll(np.arange(30), 3), own, None
    )
    assert abs(found["image_cosine"].value) < 0.2 and found["recall_at_1"].value == 0


def test_seams_of_smooth_and_of_patched_pictures():
    ramp = np.broadcast_to(np.arange(16, dtype=np.uint8)[None, :, None, None] * 8, (3, 16, 16, 1))
    assert seam_ratio(ramp, 4).value == pytest.approx(1.0)
    steps = (
        np.kron(random_images(3, 4), np.ones((1, 4, 4, 1), np.uint8))
        + (np.arange(16) % 2)[None, :, None, None]
    )
    assert seam_ratio(steps.astype(np.uint8), 4).value > 20


def test_the_right_image_scores_better_than_that_of_another_caption():
    images = random_images(40)
    partner = np.roll(np.arange(40), 1)
    found = picture_estimates(images, partner, gallery(images), 4)
    assert found["pixel_mse"].value == 0 and found["pixel_mse_ratio"].value == 0
    assert found["recall_at_1"].value == 1 and found["image_cosine_gap"].value > 0.8
    assert found["seam_ratio_over_real"].value == pytest.approx(1)
    other = picture_estimates(images[partner], partner, gallery(images), 4)
    assert abs(other["image_cosine_gap"].value) < 0.15


@pytest.mark.parametrize("patch", [1, 8])
def test_patches_without_an_inside_or_a_neighbor_have_no_seams(patch):
    images, partner = random_images(6), np.roll(np.arange(6), 1)
    found = picture_estimates(images, partner, gallery(images), patch)
    assert "pixel_mse" in found and not any(key.startswith("seam") for key in found)


def test_constant_images_have_no_seams_to_compare():
    images, partner = random_images(6), np.roll(np.arange(6), 1)
    found = picture_estimates(np.full_like(images, 9), partner, gallery(images), 4)
    assert found["seam_ratio"].value == 0 < found["seam_ratio_real"].value
    assert "seam_ratio_over_real" not in found


def test_the_nearest_training_image_is_found_over_blocks():
    train, images = random_images(50, seed=1), random_images(5, seed=2)
    images[3] = train[41]
    rows, distances = nearest(images, [(0, train[:20]), (20, train[20:])])
    brute = (
        ((images[:, None].astype(float) - train[None]) ** 2).reshape(5, 50, -1).sum(-1).argmin(1)
    )
    assert rows.tolist() == brute.tolist() and rows[3] == 41 and distances[3] < 1e-3 < distances[0]


def test_copies_are_told_from_images_one_gray_level_off():
    train, captions = random_images(6, size=128), [[row] for row in range(6)]
    training = SimpleNamespace(
        blocks=lambda: [(0, train)], captions=lambda rows: [captions[row] for row in rows]
    )
    sentences = SimpleNamespace(tokens=captions, shuffled_index=np.roll(np.arange(6), 1))
    changed = train.copy()
    changed[:, 0, 0] ^= 1
    copies, others = (
        copy_estimates(made, np.ones(6), sentences, training) for made in (train, changed)
    )
    assert copies["identical_copies"].value == 1 and copies["copy_ratio"].value == 0
    assert others["identical_copies"].value == 0
    assert others["copy_ratio"].value == pytest.approx(1 / 127.5 / 128, rel=1e-3)


def test_a_report_of_images_made_without_guidance_judges_them():
    share = Estimate(0.75, 0.01, "share", 8)
    conditions = {"num_images": 8, "guidance": 1.0, "num_control_images": 2, "notes": []}
    controls = {"untrained": {}, "untrained_random_gates": {}}
    arms = {"model": {}, "guidance_1": {"recall_at_5": share}}
    report = ImageReport(conditions, arms | controls, [])
    assert "75% of the images made from captions" in report.verdict
    assert "t2i_recall_at_5" in report.claims[0].values()
    table, _ = report.tables()
    assert [column.heading for column in table.columns] == ["figure", "guidance 1", "untrained"]
