"""The image_text task: its words, its data, its batches."""

from __future__ import annotations

import math
import shutil
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch.profiler import ProfilerActivity, profile

from mmldlm.data.batch_plan import BatchPlan
from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.prepare.options import ImageOptions
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.data.store import Rows
from mmldlm.errors import UserError
from mmldlm.tasks.registry import find_task, load_config
from mmldlm.tasks.translation.noiser import L2T
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
    both = load_config(
        "tiny", None, ["task=image_text", "training.loss_type_weights={i2t: 0.7, t2l: 0.3}"]
    )
    assert both.training.mode_weights() == {
        "unconditional": 0,
        "l2t": 0.7,
        "t2l": pytest.approx(0.3),
    }
    assert "t2i (= t2l) 30%" in find_task("image_text").describe(both)
    with pytest.raises(UserError, match="twice"):
        load_config(
            "tiny", None, ["task=image_text", "training.loss_type_weights={t2i: 1, t2l: 1}"]
        )
    with pytest.raises(UserError, match="loss_type"):
        load_config("tiny", None, ["training.loss_type=t2i"])


@pytest.mark.parametrize(
    "word",
    [
        "model.corrector=blind",
        "model.token_embedding_init=encoder",
        "latent_diffusion.l2_normalize=true",
    ],
)
def test_options_that_need_an_encoder_of_texts_are_refused(word):
    with pytest.raises(UserError, match=word.split("=")[0]):
        load_config("tiny", None, ["task=image_text", "latent_diffusion.scaling=sqrt_d", word])


def test_stores_of_the_other_kind_are_refused(images, store):
    with pytest.raises(UserError, match="a store of images"):
        find_task("translation").open_data(
            load_config("tiny", None, [f"data.latent_data_root={images}"])
        )
    with pytest.raises(UserError, match="a store of images"):
        find_task("mdlm").open_data(
            load_config(None, None, ["task=mdlm", f"data.latent_data_root={images}"])
        )
    with pytest.raises(UserError, match="a store of texts"):
        opened(store)


def test_the_data_decides_shape_and_places_and_checkpoints_hold_the_codec(images):
    task, data = opened(images)
    model = data.config.model
    assert (model.num_latents, model.latent_dim, model.latent_grid) == (16, 16, [4, 4])
    assert load_config(None, None, words(images)).model.tokens_per_latent == 1, (
        "texts have four rows a latent"
    )
    assert ImageCodec.open(task.model_config(data)["image"]) == data.codec


def collate(task, data, slots):
    plan = BatchPlan(data.train_lengths, 8, data.config.training.seed)
    return task.collator(data).collate(
        plan.batch(3), np.asarray(slots), data.train, data.train_lengths
    )


def test_shifts_do_not_depend_on_micro_batches_and_are_known_to_the_check(images):
    task, data = opened(images, "data.shift_pixels=2", "latent_diffusion.scaling=none")
    whole = collate(task, data, range(8)).latent_clean
    parts = [collate(task, data, part).latent_clean for part in ([5, 6, 7], [0, 1, 2, 3, 4])]
    assert torch.equal(whole, torch.cat([parts[1], parts[0]]))
    batch = collate(task, data, range(8))
    stored = torch.from_numpy(data.train.get(batch.ids).latents)
    moved = [not torch.equal(a, b) for a, b in zip(stored, whole)]
    assert sum(moved) >= 4 and task.check_batch(data, batch) == []
    batch.latent_clean[0, 0, 0] += 0.5
    assert len(task.check_batch(data, batch)) == 1
    evaluated = task.collator(data, seed=7)
    assert evaluated.shift_pixels == 0


def test_images_to_make_may_stay_where_they_are(images):
    words = [
        "training.loss_type_weights={i2t: 0.5, t2i: 0.3, joint: 0.2}",
        "latent_diffusion.scaling=none",
    ]
    task, data = opened(images, "data.shift_pixels=2", "data.shift_only_i2t=true", *words)
    batch = collate(task, data, range(8))
    all_shifted = collate(*opened(images, "data.shift_pixels=2", *words), range(8))
    assert batch.modes.tolist() == all_shifted.modes.tolist() and {L2T} < set(batch.modes.tolist())
    stored = torch.from_numpy(data.train.get(batch.ids).latents)
    for mode, found, shifted, own in zip(
        batch.modes.tolist(),
        batch.latent_clean,
        all_shifted.latent_clean,
        stored,
    ):
        assert torch.equal(found, shifted if mode == L2T else own)
    parts = [collate(task, data, part).latent_clean for part in ([5, 6, 7], [0, 1, 2, 3, 4])]
    assert torch.equal(batch.latent_clean, torch.cat([parts[1], parts[0]]))


@pytest.mark.parametrize(
    "words", [["training.loss_type=mixed"], ["training.loss_type=t2i", "data.shift_pixels=1"]]
)
def test_shifts_of_no_image_are_refused(images, words):
    with pytest.raises(UserError, match="shift_only_i2t"):
        opened(images, "data.shift_only_i2t=true", *words)


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
    assert bool((found.latent_weights[[2, 5]] == 0).all())


def test_a_patch_of_zeros_is_trained_on(images, tmp_path):
    root = shutil.copytree(images, tmp_path / "store")
    latents = np.load(root / "train" / "latents.npy", mmap_mode="r+")
    latents[:] = np.where(np.arange(16)[:, None] == 3, 0.0, latents)
    latents.flush()
    task, data = opened(root)
    assert collate(task, data, range(8)).bad == []


def test_the_memory_of_the_preset_is_known_before_it_runs(images):
    config = load_config("image_text_quick", None, [f"data.latent_data_root={images}"])
    task = find_task("image_text")
    data = task.open_data(config)
    sizes = task.model_sizes(data.config, 12)
    model = task.build_model(data)
    assert sizes["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A store of 256-pixel pictures: colored rectangles on the left or the right."""
    folder = tmp_path_factory.mktemp("pictures")
    colors = ("red", "green", "blue", "orange")
    for number, (color, left) in enumerate(
        (color, left) for color in colors for left in (True, False)
    ):
        picture = Image.new("RGB", (256, 256), "white")
        ImageDraw.Draw(picture).rectangle(
            [20 if left else 140, 60, 120 if left else 240, 200], fill=color
        )
        picture.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(
            f"a {color} box on the {'left' if left else 'right'}"
        )
    store = folder / "store"
    prepare(ImageOptions(str(store), str(folder), image_size=256, validation_samples=2))
    return store


def test_the_preset_of_256_pixels_takes_a_step(pictures):
    """Narrow, on the CPU: 256 latents that turn by their place, noised where the model runs."""
    narrow = ["model.hidden_size=32", "model.n_heads=4", "model.n_blocks=1", "model.cond_dim=32"]
    task = find_task("image_text")
    data = task.open_data(
        load_config("image_text_256", None, [f"data.latent_data_root={pictures}", *narrow])
    )
    model = data.config.model
    assert (model.num_latents, model.latent_dim, model.latent_grid, model.latent_rope) == (
        256,
        768,
        [16, 16],
        True,
    )
    batch = collate(task, data, range(6))
    assert batch.latents is None and batch.noise_keys.shape == (6,)
    network = task.build_model(data)
    loss, sums = task.objective(data.config)(network, batch.to("cpu"))
    loss.backward()
    assert torch.isfinite(loss) and batch.latents.shape == (6, 256, 768)
    assert network.blocks[0].modulation.weight.grad.abs().sum() > 0


class FullSamples:
    """The store's interface: captions of `length` tokens, EOS included, and `count` latents of
    `dim` each.
    """

    def __init__(self, batch, length, count, dim):
        self.lengths, self.shape = np.full(batch, length, dtype=np.int32), (count, dim)

    def get(self, indices):
        rng = np.random.default_rng(0)
        tokens = [rng.integers(4, 500, length - 1) for length in self.lengths[indices]]
        return Rows(tokens, rng.standard_normal((len(indices), *self.shape)).astype(np.float32))


@pytest.mark.parametrize(
    "count,dim,width,length", [(16, 16, 128, 9), (64, 192, 128, 7), (256, 768, 128, 7)]
)
def test_the_peak_of_a_step(count, dim, width, length):
    """It is where the backward pass begins: what is kept, logits and a block's working memory, few
    gradients.
    """
    size, side = 2048 // count, math.isqrt(count)
    words = [
        f"model.latent_dim={dim}",
        f"model.num_latents={count}",
        f"model.latent_grid=[{side},{side}]",
        "model.vocab_size=500",
        "model.mask_token_id=1",
        "model.pad_token_id=0",
        "model.eos_token_id=2",
        f"model.hidden_size={width}",
        f"model.cond_dim={width}",
        "model.n_heads=2",
        "model.n_blocks=4",
        "training.dtype=fp32",
        f"training.train_batch_size={size}",
    ]
    config = load_config("image_text_256", None, words)
    task = find_task("image_text")
    data = SimpleNamespace(
        config=config,
        latent_mean=np.zeros(dim, np.float32),
        latent_std=np.ones(dim, np.float32),
        max_latent_norm=lambda: 1e6,
    )
    collator, samples = task.collator(data), FullSamples(size, length, count, dim)
    batch = collator.collate(
        BatchPlan(samples.lengths, size, 0).batch(0), np.arange(size), samples, samples.lengths
    )
    model, objective, sizes = (
        task.model_class()(config.model),
        task.objective(config),
        task.model_sizes(config, length),
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        objective(model, batch.to("cpu"))[0].backward()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    peak = max(
        accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    )
    assert 0.9 < (sizes["activations"] + sizes["logits_cpu"]) / peak < 1.15
