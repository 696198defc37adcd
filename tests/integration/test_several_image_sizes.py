"""Images of several sizes in one run: batches of one size, positions of its grid, every image of
equal weight.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mmldlm.data.batch_plan import local_slots
from mmldlm.data.prepare.options import ImageOptions
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.errors import UserError
from mmldlm.models.flops import estimate_flops
from mmldlm.models.mmdit import grid_positions
from mmldlm.tasks.registry import find_task, load_config
from tests.support.forward import run_model
from tests.support.image_store import make_image_store

GRIDS = [[4, 4], [6, 6]]
GLOBAL_BATCH = 8


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    return {size: make_image_store(folder / str(size), faces=2, size=size) for size in (16, 24)}


def mixed(*stores):
    return "data.mixture=" + json.dumps({str(store): 1.0 for store in stores})


def opened(stores, *words, sizes=(16, 24)):
    task = find_task("image_text")
    words = [
        "task=image_text",
        mixed(*(stores[size] for size in sizes)),
        "latent_diffusion.scaling=none",
        *words,
    ]
    return task, task.open_data(load_config("tiny", None, words))


@pytest.fixture(scope="module")
def run(stores):
    """Task, data and model with axial RoPE, whose zero weights are drawn, and its first batch of
    each size by N.
    """
    words = ["model.latent_rope=true", "data.shift_pixels=1", "model.output_bias_init=frequency"]
    task, data = opened(stores, *words)
    torch.manual_seed(0)
    model = task.build_model(data)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    plan, found = data.training_plan(GLOBAL_BATCH), {}
    for step in range(12):
        batch = plan.batch(step)
        found.setdefault(data.train.get(batch.ids).latents.shape[1], batch)
    return task, data, model, found


@pytest.mark.parametrize("sizes", [(16, 24), (24, 16)])
def test_the_data_decides_the_grids(stores, sizes):
    task, data = opened(stores, sizes=sizes)
    model = data.config.model
    assert (model.latent_grids, model.latent_grid, model.num_latents) == (GRIDS, [6, 6], 36)
    assert {count: codec.size for count, codec in data.codecs.items()} == {16: 16, 36: 24}
    assert (
        task.model_config(data)["image"]["size"] == 24
        and "16 x 16 or 24 x 24 x 1" in data.describe()
    )
    built = task.build_model(data)
    assert "latent_encoder.latent_position" not in built.state_dict()
    sizes_told = task.model_sizes(data.config, 12)
    assert sizes_told["trainable"] == sum(p.numel() for p in built.parameters() if p.requires_grad)


def test_stores_of_one_size_remain_one_grid(stores):
    _, data = opened(stores, sizes=(16,))
    assert data.config.model.latent_grids is None and data.train.grids is None
    assert data.training_plan(8).version.endswith(":mixed:36x4096"), "the order of runs that exist"


def test_every_batch_has_one_size_on_any_ranks(run):
    task, data, _, _ = run
    for batching in ("samples", "tokens"):
        data.config.data.batching = batching
        plan, seen = data.training_plan(GLOBAL_BATCH), []
        for step in range(40):
            batch = plan.batch(step)
            seen.append(data.train.get(batch.ids).latents.shape[1])
        assert abs(seen.count(36) - 20) <= 8 and set(seen) == {16, 36}
    data.config.data.batching = "samples"
    with pytest.raises(ValueError, match="one size at a time"):
        data.train.get([0, len(data.train) - 1])


def test_the_flops_of_a_step_are_those_of_its_size(run):
    task, data, _, found = run
    for count, batch in found.items():
        # A rank's share.
        part = task.collator(data).collate(batch, np.arange(3), data.train, data.train_lengths)
        assert part.counts["all_latents"] == GLOBAL_BATCH * count
        lengths = data.train_lengths[batch.ids].tolist()
        flops = task.training_flops(
            data.config, len(lengths), sum(lengths), {"text_masked": 9.0, **part.counts}
        )
        expected = estimate_flops(data.config.model, lengths, 9, num_latents=count).training
        assert flops == pytest.approx(expected, rel=0.01)


def test_an_evaluation_uses_every_image_once(run):
    _, data, _, _ = run
    count = len(data.validation_lengths)
    orders = data.validation_orders(count)
    found = [order.ids(np.arange(order.count), 0) for order in orders]
    assert np.array_equal(np.concatenate(found), np.arange(count)) and len(found) == 2
    assert [data.validation.get(ids).latents.shape[1] for ids in found] == [16, 36]
    few = [order.ids(np.arange(order.count), 0) for order in data.validation_orders(5)]
    assert sum(map(len, few)) == 5 and abs(len(few[0]) - len(few[1])) <= 1


def loss_and_gradient(run, batch, world=1, accum=1):
    task, data, model, _ = run
    collator, objective = task.collator(data), task.objective(data.config)
    model.zero_grad()
    total, sums, counts = 0.0, dict.fromkeys(task.sums, 0.0), {}
    for micro in range(accum):
        for rank in range(world):
            slots = local_slots(GLOBAL_BATCH, world, accum, rank, micro)
            part = collator.collate(batch, slots, data.train, data.train_lengths)
            loss, metrics = objective(model, part.to("cpu"))
            loss.backward()
            total, counts = total + loss.item(), part.counts
            sums = {name: value + metrics[name].item() for name, value in sums.items()}
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return total, gradient, sums, counts


@pytest.mark.parametrize("count", [16, 36])
def test_ranks_and_micro_batches_add_up_to_the_batch(run, count):
    batch = run[3][count]
    total, gradient, sums, counts = loss_and_gradient(run, batch)
    for world, accum in ((2, 2), (1, 8)):
        parts, part_gradient, part_sums, part_counts = loss_and_gradient(run, batch, world, accum)
        assert parts == pytest.approx(total, rel=1e-5) and part_counts == counts
        torch.testing.assert_close(part_gradient, gradient, rtol=1e-4, atol=1e-6)
        assert {name: part_sums[name] for name in sums} == pytest.approx(sums, rel=1e-4, abs=1e-5)


def test_every_image_weighs_the_same_whatever_its_size(run):
    """The loss of both sizes together is the mean over images, each the mean over its own
    latents.
    """
    task, data, model, batches = run
    errors, sums, counted = [], 0.0, 0
    for count, batch in batches.items():
        noised = (
            task.collator(data)
            .collate(batch, np.arange(GLOBAL_BATCH), data.train, data.train_lengths)
            .to("cpu")
        )
        model.eval()
        out = task.objective(data.config)._forward(model, noised, noised.text_weights)
        is_scored = noised.latent_weights > 0
        error = (out.latent - noised.latent_targets).square().mean(-1)
        assert error.shape == (GLOBAL_BATCH, count)
        errors += error.mean(-1)[is_scored].tolist()
        loss, metrics = task.objective(data.config)(model, noised)
        sums, counted = (
            sums + metrics["latent_error_sum"].item(),
            counted + noised.counts["latents"],
        )
        assert (
            metrics["latent_scored"].item() == noised.counts["latents"] == int(is_scored.sum()) > 0
        )
        alone = data.config.loss.latent_loss_weight * error.mean(-1)[is_scored].mean()
        (of_latents,) = torch.autograd.grad(loss, [model.latent_head.to_latent.bias])
        (by_hand,) = torch.autograd.grad(alone, [model.latent_head.to_latent.bias])
        torch.testing.assert_close(of_latents, by_hand, rtol=1e-4, atol=1e-7)
    assert sums / counted == pytest.approx(np.mean(errors), rel=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("rope", [False, True])
def test_an_image_has_the_positions_of_its_own_grid(stores, grid, rope):
    """As a model of that size alone whose learned positions are these sinusoids."""
    more = f"model.latent_rope={str(rope).lower()}"
    task, both = opened(stores, more)
    _, alone = opened(stores, more, sizes=(4 * grid[0],))
    model, single = (task.build_model(data).eval() for data in (both, alone))
    weights = model.state_dict()
    for name, tensor in weights.items():
        if tensor.is_floating_point() and name not in ("latent_mean", "latent_std"):
            tensor.copy_(torch.randn_like(tensor) * 0.05)
    positions = grid_positions(*grid, both.config.model.hidden_size)[:, None]
    single.load_state_dict(weights | {"latent_encoder.latent_position": positions})
    tokens, count = torch.tensor([[5, 6, 2], [7, 2, 0]]), grid[0] * grid[1]
    latents = torch.randn(2, count, 16)
    with torch.no_grad():
        found, expected = (
            run_model(own, tokens, latents, attention_mask=tokens > 0) for own in (model, single)
        )
    torch.testing.assert_close(found.latent, expected.latent)
    torch.testing.assert_close(found.text.logits, expected.text.logits)
    torch.testing.assert_close(found.length_logits, expected.length_logits)


def test_another_number_of_latents_is_an_error(run):
    model = run[2]
    with pytest.raises(
        ValueError, match=r"25 latents, but model.latent_grids is \[\[4, 4\], \[6, 6\]\]"
    ):
        run_model(model, torch.tensor([[5, 2]]), torch.randn(1, 25, 16))


def test_what_cannot_have_sizes_is_refused(stores, tmp_path):
    with pytest.raises(
        UserError, match=r"model.latent_grids=\[\[4, 4\], \[6, 6\]\] for the images"
    ):
        opened(
            stores,
            "model.latent_grids=[[2,2],[6,6]]",
            "model.latent_grid=[6,6]",
            "model.num_latents=36",
        )
    with pytest.raises(UserError, match="model.latent_grids=null"):
        words = [
            "model.latent_grids=[[2,2],[4,4]]",
            "model.latent_grid=[4,4]",
            "model.num_latents=16",
        ]
        opened(stores, *words, sizes=(16,))
    with pytest.raises(UserError, match="by their number of places"):
        opened(stores, "model.latent_grids=[[6,6],[4,4]]")
    roots = [
        prepare(
            ImageOptions(str(tmp_path / str(size)), latents="pca:16", image_size=size, faces=1)
        )
        for size in (8, 16)
    ]
    with pytest.raises(UserError, match="one encoder in all stores of data.mixture"):
        find_task("image_text").open_data(
            load_config("tiny", None, ["task=image_text", mixed(*roots)])
        )
    other = make_image_store(tmp_path / "codes", faces=2, codes=16)
    with pytest.raises(UserError, match="data.mixture"):
        find_task("image_text").open_data(
            load_config("tiny", None, ["task=image_text", mixed(stores[24], other)])
        )
