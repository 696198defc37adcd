"""What a model takes from a store."""

from types import SimpleNamespace

import pytest

from mmldlm.errors import UserError
from mmldlm.tasks.latent_data import fill_from_store
from mmldlm.tasks.registry import build_config

TOKENIZER = {
    "name": "words",
    "vocab_size": 50,
    "mask_token_id": 3,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


def store(grid, count=6):
    """The part of a store that `fill_from_store` reads; of images with a grid, of images without
    one, of texts.
    """
    image = {} if grid == "text" else {"image": {"size": 8, "patch": 4, "grid": grid}}
    return SimpleNamespace(
        root="/store",
        latent_dim=12,
        latents_per_text=count,
        num_codes=None,
        manifest={"tokenizer": TOKENIZER, **image},
    )


def filled(grid, sections=None, count=6):
    config = build_config(sections or {})
    fill_from_store(config, store(grid, count))
    return config.model


def test_the_grid_comes_from_the_images():
    model = filled([2, 3])
    assert (model.latent_grid, model.num_latents, model.latent_dim) == ([2, 3], 6, 12)
    assert filled(None).latent_grid is None and filled("text").latent_grid is None
    # A resumed run names what was filled in; latents without places may have an order.
    assert filled([2, 3], {"model": {"latent_grid": [2, 3], "num_latents": 6}}).latent_grid == [
        2,
        3,
    ]
    assert filled(None, {"model": {"latent_grid": [1, 6], "num_latents": 6}}).latent_grid == [1, 6]


@pytest.mark.parametrize("own,grid", [([3, 2], [2, 3]), ([1, 6], [2, 3])])
def test_another_grid_than_that_of_the_images_is_an_error(own, grid):
    with pytest.raises(UserError, match="latent_grid"):
        filled(grid, {"model": {"latent_grid": own, "num_latents": 6}})


def test_latents_that_turn_need_a_place():
    rope = {"model": {"latent_rope": True}}
    assert filled([2, 3], rope).latent_rope
    assert filled(
        None, {"model": {"latent_rope": True, "latent_grid": [1, 6], "num_latents": 6}}
    ).latent_rope
    for grid in (None, "text"):
        with pytest.raises(UserError, match="latent_rope"):
            filled(grid, rope)


def test_a_model_that_knows_no_places_takes_the_rest():
    model = filled([2, 3], {"task": "ar"})
    assert model.num_latents == 6 and not hasattr(model, "latent_grid")
