"""Several latents per text, kept together from the store to the loss."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmldlm.data import pack as packing
from mmldlm.data.batch_plan import local_slots
from mmldlm.data.encoders.encoder import Encoder
from mmldlm.data.prepare import pipeline
from mmldlm.data.prepare.options import PrepareOptions
from mmldlm.data.sentences import split_into_parts
from mmldlm.data.store import Store
from mmldlm.data.verify import verify
from mmldlm.errors import UserError
from mmldlm.inference.inputs import check_latent_shape
from mmldlm.models import MultimodalMMDiT
from mmldlm.tasks.registry import load_config
from mmldlm.tasks.translation.data import open_data
from mmldlm.tasks.translation.noiser import L2T, Noiser
from mmldlm.tasks.translation.objective import TranslationObjective
from tests.data.conftest import make_sentences
from tests.support.forward import run_model

N, D = 3, 384


@pytest.fixture(scope="session")
def sentences():
    return make_sentences()


@pytest.fixture(scope="module")
def store(need_minilm, sentences, tmp_path_factory):
    """Two sentences a text, three latents each; one text is too short for that, another longer
    than the limit.
    """
    folder = tmp_path_factory.mktemp("several")
    pairs = [" ".join(pair) for pair in zip(sentences[::2], sentences[1::2])]
    long = " ".join(["Ab.", *sentences[:9]]).replace("sleeps", "slept")
    (folder / "c.txt").write_text("\n".join([*pairs, "I?", long]) + "\n")
    options = PrepareOptions(
        str(folder / "s"),
        str(folder / "c.txt"),
        validation_samples=4,
        latents_per_text=N,
        overlong="chunk",
        min_tokens=1,
        max_tokens=40,
    )
    return pipeline.prepare(options), options


@pytest.fixture(scope="module")
def data(store):
    words = [
        f"data.latent_data_root={store[0]}",
        "training.train_batch_size=6",
        "training.loss_type=mixed",
    ]
    return open_data(load_config("tiny", None, words))


def test_the_store_holds_the_latents_of_the_pieces(store):
    root = store[0]
    train = Store(root)
    assert train.latents_per_text == N and np.load(root / "train" / "latents.npy").shape == (
        len(train),
        N,
        D,
    )
    parts = [split_into_parts(text, N) for text in train.texts([0, len(train) - 1])]
    own = Encoder("minilm").encode([part for text in parts for part in text]).reshape(2, N, D)
    np.testing.assert_allclose(train.get([0, len(train) - 1]).latents, own, atol=1e-5)
    assert verify(root) == []
    corpus = train.manifest["corpus"]
    assert corpus["dropped"] == {"too_short": 1} and corpus["chunked"] == 1
    vectors = np.load(root / "train" / "latents.npy").reshape(-1, D).astype(np.float64)
    np.testing.assert_allclose(train.latent_mean, vectors.mean(0), atol=1e-6)
    np.testing.assert_allclose(train.latent_std, vectors.std(0), atol=1e-6)
    blocks = list(train.latent_blocks(len(train)))
    np.testing.assert_array_equal(blocks[0][1], train.get(range(len(train))).latents)


@pytest.mark.parametrize("max_samples", [None, 9])
def test_pieces_of_a_document_too_short_to_be_cut_are_counted(
    sentences, tmp_path, need_minilm, max_samples
):
    path = tmp_path / "c.txt"
    path.write_text(
        "\n".join(
            f"{first} {second} A." for first, second in zip(sentences[:12:2], sentences[1:12:2])
        )
    )
    longest = max(len(text.split()) + 1 for text in sentences)
    options = PrepareOptions(
        str(tmp_path / "s"),
        str(path),
        validation_samples=3,
        latents_per_text=N,
        overlong="chunk",
        min_tokens=1,
        max_tokens=longest,
        max_samples=max_samples,
        keep_duplicates=True,
    )
    corpus = Store(pipeline.prepare(options)).manifest["corpus"]
    short = corpus["dropped"].get("piece_too_short", 0)
    assert short > 0 and corpus["kept"] <= (max_samples or 99)
    assert (
        corpus["read"]
        == 6
        == corpus["kept"] + sum(corpus["dropped"].values()) + corpus["chunked"] - corpus["chunks"]
    )


def test_a_zero_vector_among_several_is_found(store, tmp_path):
    import shutil

    root = shutil.copytree(store[0], tmp_path / "s")
    latents = np.load(root / "train" / "latents.npy")
    latents[5, 1] = 0
    np.save(root / "train" / "latents.npy", latents)
    with pytest.raises(UserError, match="zero vectors in 1 row: 5"):
        open_data(load_config("tiny", None, [f"data.latent_data_root={root}"]))


def test_the_files_layout_holds_them_too_and_packs_back(store, tmp_path):
    root, options = store
    files = pipeline.prepare(replace(options, output_dir=str(tmp_path / "f"), layout="files"))
    assert np.load(files / "latents" / "train" / "train_000000000.npy").shape == (N, D)
    again = packing.pack(packing.PackOptions(str(files), str(tmp_path / "p"), min_tokens=1))
    for split in ("train", "validation"):
        assert (again / split / "latents.npy").read_bytes() == (
            root / split / "latents.npy"
        ).read_bytes()
    assert Store(again).latents_per_text == N
    with pytest.raises(UserError, match="latent not one vector"):
        packing.pack(packing.PackOptions(str(files), str(tmp_path / "q"), latents_per_text=1))


def test_the_model_takes_as_many_as_the_store_has(store, data, made_store):
    assert data.config.model.num_latents == N and data.notes == [
        "3 latents per text (model.num_latents)"
    ]
    with pytest.raises(UserError, match="num_latents=3"):
        open_data(
            load_config("tiny", None, [f"data.latent_data_root={store[0]}", "model.num_latents=2"])
        )
    with pytest.raises(UserError, match="number of latents per text"):
        mixture = json.dumps({str(made_store): 1.0, str(store[0]): 1.0})
        open_data(load_config("tiny", None, [f"data.mixture={mixture}"]))
    check_latent_shape(Store(store[0]), data.config.model)
    with pytest.raises(UserError, match=f"(?s){N} latents of {D} .*: 1 latent of 384 ") as error:
        check_latent_shape(Store(made_store), data.config.model)
    assert "model." not in str(error.value), "an option of train alone"


def _model(data):
    torch.manual_seed(0)
    model = MultimodalMMDiT(data.config.model)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _batches(data, world, accum, step=0):
    noiser = Noiser(
        data.config, data.latent_mean, data.latent_std, max_norm=data.max_latent_norm()
    )
    plan = data.training_plan(6)
    return [
        noiser.collate(
            plan.batch(step), local_slots(6, world, accum, rank, micro), data.train, plan.lengths
        )
        for micro in range(accum)
        for rank in range(world)
    ]


def test_gradients_add_up_and_every_latent_counts(data):
    config = data.config

    def gradients(batches):
        net = _model(data)
        loss = sum(TranslationObjective(config)(net, batch)[0] for batch in batches)
        loss.backward()
        return loss.detach(), [p.grad for p in net.parameters()]

    last = len(data.train_lengths) // 6  # an incomplete batch: some parts hold placeholders
    for step in (0, last):
        (whole,) = _batches(data, 1, 1, step)
        assert whole.counts["latents"] == N * int((whole.modes[whole.real] != L2T).sum())
        assert whole.latents.shape == (len(whole.ids), N, D)
        loss, expected = gradients([whole])
        for world, accum in ((2, 1), (1, 3)):
            other, found = gradients(_batches(data, world, accum, step))
            torch.testing.assert_close(other, loss)
            for grad, own in zip(found, expected):
                torch.testing.assert_close(grad, own, rtol=1e-4, atol=1e-6)


def test_the_latent_loss_is_the_mean_over_real_latents(data):
    (batch,) = _batches(data, 1, 1)
    net = _model(data)
    _, metrics = TranslationObjective(data.config)(net, batch)
    assert float(metrics["latent_scored"]) == batch.counts["latents"]
    scored = batch.latent_weights > 0
    with torch.no_grad():
        out = run_model(
            net,
            batch.text_tokens,
            batch.latents,
            batch.text_timesteps,
            batch.latent_timesteps,
            batch.attention_mask,
            text_is_null=batch.text_is_null,
            latent_is_null=batch.latent_is_null,
        ).latent
    error = (out - batch.latent_targets)[scored].square().mean()
    torch.testing.assert_close(
        metrics["latent_error_sum"] / batch.counts["latents"], error, rtol=1e-4, atol=1e-6
    )


def test_one_bad_vector_masks_its_sample(data):
    class Damaged:
        def get(self, ids):
            rows = data.train.get(ids)
            rows.latents[2, 1] = np.nan
            return rows

    plan = data.training_plan(6)
    noiser = Noiser(data.config, data.latent_mean, data.latent_std)
    batch = noiser.collate(plan.batch(0), np.arange(6), Damaged(), plan.lengths)
    assert [entry["id"] for entry in batch.bad] == [int(batch.ids[2])] and not batch.real[2]
    assert all(
        torch.isfinite(t).all() for t in batch.named_tensors().values() if t.is_floating_point()
    )


def test_the_null_condition_is_that_of_training(data):
    net = _model(data).eval()
    tokens = torch.randint(5, 50, (2, 7))
    t = torch.full((2,), 0.5)
    none = run_model(net, tokens, None, t)
    given = run_model(
        net, tokens, torch.randn(2, N, D), t, latent_is_null=torch.ones(2, dtype=torch.bool)
    )
    torch.testing.assert_close(none.text.logits, given.text.logits)
    torch.testing.assert_close(none.length_logits, given.length_logits)
