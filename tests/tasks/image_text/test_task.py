"""The image_text task: its words, its data, its batches."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from mmldlm.config.load import load_config
from mmldlm.config.task_registry import find_task
from mmldlm.data.batching.batch_plan import BatchPlan
from mmldlm.data.images.codec import ImageCodec
from mmldlm.errors import UserError
from tests.support.image_store import make_image_store


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_image_store(tmp_path_factory.mktemp("images") / "store")


def words(images, *more):
    return ["task=image_text", f"data.latent_data_root={images}", *more]


def opened(images, *more):
    task = find_task("image_text")
    return task, task.open_data(load_config("tiny", None, words(images, *more)))


def test_a_mode_has_two_words_and_one_name(images):
    config = load_config("tiny", None, ["task=image_text", "training.loss_type=t2i"])
    assert config.training.loss_type == "t2l"
    both = load_config("tiny", None, ["task=image_text", "training.loss_type_weights={i2t: 0.7, t2l: 0.3}"])
    assert both.training.mode_weights() == {"unconditional": 0, "l2t": 0.7, "t2l": pytest.approx(0.3)}
    assert "t2i (= t2l) 30%" in find_task("image_text").describe(both)
    with pytest.raises(UserError, match="twice"):
        load_config("tiny", None, ["task=image_text", "training.loss_type_weights={t2i: 1, t2l: 1}"])
    with pytest.raises(UserError, match="loss_type"):
        load_config("tiny", None, ["training.loss_type=t2i"])


@pytest.mark.parametrize(
    "word", ["model.corrector=blind", "model.token_embedding_init=encoder", "latent_diffusion.l2_normalize=true"]
)
def test_options_that_need_an_encoder_of_texts_are_refused(word):
    with pytest.raises(UserError, match=word.split("=")[0]):
        load_config("tiny", None, ["task=image_text", "latent_diffusion.scaling=sqrt_d", word])


def test_stores_of_the_other_kind_are_refused(images, store):
    with pytest.raises(UserError, match="a store of images"):
        find_task("translation").open_data(load_config("tiny", None, [f"data.latent_data_root={images}"]))
    with pytest.raises(UserError, match="a store of images"):
        find_task("mdlm").open_data(load_config(None, None, ["task=mdlm", f"data.latent_data_root={images}"]))
    with pytest.raises(UserError, match="a store of texts"):
        opened(store)


def test_the_data_decides_shape_and_places_and_checkpoints_hold_the_codec(images):
    task, data = opened(images)
    model = data.config.model
    assert (model.num_latents, model.latent_dim, model.latent_grid) == (16, 16, [4, 4])
    assert ImageCodec.open(task.model_config(data)["image"]) == data.codec


def collate(task, data, slots):
    plan = BatchPlan(data.train_lengths, 8, data.config.training.seed)
    return task.collator(data).collate(plan.batch(3), np.asarray(slots), data.train, data.train_lengths)


def test_shifts_do_not_depend_on_micro_batches_and_are_known_to_the_check(images):
    task, data = opened(images, "data.shift_pixels=2", "latent_diffusion.scaling=none")
    whole = collate(task, data, range(8)).tensors["latent_clean"]
    parts = [collate(task, data, part).tensors["latent_clean"] for part in ([5, 6, 7], [0, 1, 2, 3, 4])]
    assert torch.equal(whole, torch.cat([parts[1], parts[0]]))
    batch = collate(task, data, range(8))
    stored = torch.from_numpy(data.train.get(batch.ids).latents)
    moved = [not torch.equal(a, b) for a, b in zip(stored, whole)]
    assert sum(moved) >= 4 and task.check_batch(data, batch) == []
    batch.tensors["latent_clean"][0, 0, 0] += 0.5
    assert len(task.check_batch(data, batch)) == 1
    evaluated = task.collator(data, seed=7)
    assert evaluated.shift_pixels == 0


def test_a_damaged_image_is_left_out_and_named(images, tmp_path):
    root = shutil.copytree(images, tmp_path / "store")
    task, data = opened(root)
    latents = np.load(root / "train" / "latents.npy", mmap_mode="r+")
    batch = collate(task, data, range(8))
    latents[batch.ids[2], 4, 1], latents[batch.ids[5], 0] = np.nan, 900.0
    latents.flush()
    found = collate(task, data, range(8))
    assert {entry["id"] for entry in found.bad} == {int(batch.ids[2]), int(batch.ids[5])}
    assert "non-finite" in found.bad[0]["reason"] and "norm" in found.bad[1]["reason"]
    assert found.real.tolist() == [slot not in (2, 5) for slot in range(8)]
    assert bool((found.tensors["latent_weights"][[2, 5]] == 0).all())


def test_the_memory_of_the_preset_is_known_before_it_runs(images):
    config = load_config("image_text_quick", None, [f"data.latent_data_root={images}"])
    task = find_task("image_text")
    data = task.open_data(config)
    sizes = task.model_sizes(data.config, 12)
    model = task.build_model(data)
    assert sizes["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
