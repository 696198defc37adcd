"""Stores of codes and of pixels are never taken for each other, and no option is silently left
unread.
"""

from __future__ import annotations

import pytest
import torch

from mmldlm.config.renamed_keys import model_config_with_new_names, with_new_names
from mmldlm.errors import UserError
from mmldlm.tasks.registry import build_config, find_task, load_config
from tests.support.image_store import make_image_store


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return {
        "codes": make_image_store(folder / "codes", codes=40),
        "pixels": make_image_store(folder / "pixels"),
    }


def open_data(root, *words, preset="tiny", task="image_codes"):
    words = [f"task={task}", f"data.latent_data_root={root}", *words]
    return find_task(task).open_data(load_config(preset, None, words))


@pytest.mark.parametrize(
    "word",
    [
        "latent_diffusion.timestep_shift=2",
        "latent_diffusion.clamp_x0=1",
        "latent_diffusion.scaling=none",
        "loss.latent_loss_clamp=3",
        "loss.latent_loss=normalized_mse",
        "training.l2t_condition_noise=0.2",
        "model.scale_noisy_latents=true",
        "model.latent_predictions=2",
        "model.corrector=blind",
        "data.shift_pixels=1",
    ],
)
def test_options_of_values_are_refused_with_codes(stores, word):
    with pytest.raises(UserError, match=word.split("=")[0].split(".")[1]):
        load_config("tiny", None, ["task=image_codes", word])
    if word.startswith(("latent_diffusion", "loss", "training", "data")):
        open_data(stores["pixels"], word, task="image_text")


def test_each_store_names_the_task_that_reads_it(stores):
    with pytest.raises(UserError, match="task=image_codes"):
        open_data(stores["codes"], task="image_text")
    with pytest.raises(UserError, match="clamp_x0"):
        open_data(stores["codes"], preset="image_text_quick")
    with pytest.raises(UserError, match="task=image_text"):
        open_data(stores["pixels"], preset="image_text_discrete")
    with pytest.raises(UserError, match="num_codes=40"):
        open_data(stores["codes"], "model.num_codes=41")
    with pytest.raises(UserError, match="a store of codes"):
        open_data(stores["pixels"], "model.num_codes=40")
    data = open_data(stores["codes"], preset="image_text_discrete")
    model = data.config.model
    assert (model.num_codes, model.latent_dim, model.num_latents) == (40, 1, 16)
    assert model.latent_grid == [4, 4] and "codebook.npy" in data.files_to_keep()
    assert "16 ids of 40 codes" in data.describe() and data.shape()[0] == "Q=40"


def test_configs_of_the_time_when_image_text_read_codes():
    """A saved one opens as one of image_codes; a user's is told so."""
    old = {"task": "image_text", "model": {"latent_kind": "ids", "num_codes": 40}}
    assert with_new_names(old) == {"task": "image_codes", "model": {"num_codes": 40}}
    with pytest.raises(UserError, match=r"model.num_codes \(now of task=image_codes\)"):
        build_config(old)
    assert build_config(old | {"task": "image_codes"}).model.num_codes == 40
    for task in ("image_text", "translation"):
        unused = {"task": task, "model": {"latent_kind": "values", "num_codes": None}}
        assert with_new_names(unused) == {"task": task, "model": {}}
        assert build_config(unused).task == task
    model = {**old["model"], "task": "image_text", "architecture": "MultimodalMMDiT"}
    assert model_config_with_new_names(model) == {"task": "image_codes", "num_codes": 40}


def test_the_embeddings_of_codes_begin_with_their_patches_and_memory_is_known(stores):
    task, data = find_task("image_codes"), open_data(stores["codes"], preset="image_text_discrete")
    model = task.build_model(data)
    assert torch.equal(
        *(task.build_model(data).latent_encoder.code_embedding.weight for _ in range(2))
    )
    table, codes = (
        model.latent_encoder.code_embedding.weight[:40].detach(),
        data.codec.codebook.as_float32(),
    )
    apart = [torch.pdist(torch.as_tensor(rows)) for rows in (table, codes)]
    assert float(torch.corrcoef(torch.stack(apart))[0, 1]) > 0.9
    sizes = task.model_sizes(data.config, 12)
    assert sizes["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes["buffers"] == sum(buffer.numel() for buffer in model.buffers())


def test_codes_of_two_stores_do_not_mix_unless_their_codebook_is_one(stores, tmp_path):
    other = make_image_store(tmp_path / "other", faces=2, codes=41)
    with pytest.raises(UserError, match="one tokenizer and one encoder"):
        open_data(
            stores["codes"],
            "data.latent_data_root=null",
            f"data.mixture={{{stores['codes']}: 1, {other}: 1}}",
        )
    same = f"data.mixture={{{stores['codes']}: 0.5, {stores['codes']}/../codes: 0.5}}"
    data = open_data(stores["codes"], "data.latent_data_root=null", same)
    assert data.train.get([0, len(data.train) - 1]).latents.dtype.kind == "i"
