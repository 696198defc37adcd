"""The store: what was written is read, and every kind of damage is refused by name."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from mmldlm.data.manifest import MANIFEST
from mmldlm.data.store import SPLITS, Store, check_latents, load_tokenizer
from mmldlm.data.verify import verify
from mmldlm.errors import UserError


def test_reads_back_what_the_tokenizer_and_encoder_say(made_store, sentences):
    tokenizer = load_tokenizer(made_store)
    found = []
    for split in SPLITS:
        store = Store(made_store, split, verify="checksums")
        assert store.root == made_store and store.split == split and store.latent_dim == 384
        texts = store.texts(range(len(store)))
        batch = store.get(range(len(store)))
        expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
        assert [ids.tolist() for ids in batch.tokens] == expected
        assert all(ids.dtype == np.int64 for ids in batch.tokens)
        assert (
            np.asarray(store.lengths).tolist() == [len(ids) for ids in expected]
            and store.lengths.dtype == np.int32
        )
        assert batch.latents.dtype == np.float32 and batch.latents.shape == (len(store), 384)
        found += texts
    assert sorted(found) == sorted(sentences)


def test_get_takes_any_order_and_owns_its_memory(made_store):
    store = Store(made_store)
    batch, whole = store.get([5, 0, 5]), store.get(range(6))
    np.testing.assert_array_equal(batch.latents, whole.latents[[5, 0, 5]])
    assert [ids.tolist() for ids in batch.tokens] == [
        whole.tokens[row].tolist() for row in (5, 0, 5)
    ]
    batch.latents[:] = 0
    batch.tokens[0][:] = 0
    np.testing.assert_array_equal(store.get([5]).latents[0], whole.latents[5])
    assert store.get([]).latents.shape == (0, 384) and store.get([]).tokens == []
    assert store.texts([3, 1]) == [store.text(3), store.text(1)]
    for bad in (-1, len(store)):
        with pytest.raises(IndexError):
            store.get([0, bad])
        with pytest.raises(IndexError):
            store.text(bad)


def test_pickles_by_path(made_store):
    store = Store(made_store, "validation")
    packed = pickle.dumps(store)
    again = pickle.loads(packed)
    assert len(packed) < 1000
    np.testing.assert_array_equal(again.get([1]).latents, store.get([1]).latents)


def test_statistics_are_those_of_the_training_split_alone(made_store):
    store = Store(made_store)
    latents = store.get(range(len(store))).latents.astype(np.float64)
    statistics = store.manifest["latent_stats"]
    np.testing.assert_allclose(store.latent_mean, latents.mean(0), atol=1e-7)
    np.testing.assert_allclose(store.latent_std, latents.std(0), atol=1e-7)
    assert store.latent_mean.dtype == store.latent_std.dtype == np.float32
    assert statistics["num_samples"] == len(store)
    eigenvalues = np.linalg.eigvalsh(np.cov(latents.T, bias=True)).clip(1e-300)
    share = eigenvalues / eigenvalues.sum()
    assert statistics["effective_rank"] == pytest.approx(
        np.exp(-(share * np.log(share)).sum()), rel=1e-4
    )


def test_tokenizer_has_the_ids_of_the_manifest(made_store):
    tokenizer, manifest = load_tokenizer(made_store), Store(made_store).manifest
    ids = [manifest["tokenizer"][f"{kind}_token_id"] for kind in ("mask", "pad", "eos")]
    assert ids == [tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id]
    assert len(set(ids)) == 3 and max(ids) < manifest["tokenizer"]["vocab_size"]
    # The files MiniLM ships pad every text to 128.
    assert len(tokenizer("a dog", add_special_tokens=False)["input_ids"]) == 2


@pytest.mark.parametrize(
    "name", ["train/latents.npy", "train/tokens.npy", "train/text_offsets.npy"]
)
@pytest.mark.parametrize("size", [-1, 0])
def test_truncated_file_is_refused_with_both_sizes(store_copy, name, size):
    path = store_copy / name
    whole = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(whole + size if size else 0)
    with pytest.raises(UserError) as error:
        Store(store_copy)
    assert name in error.value.expected and str(whole) in error.value.expected
    assert (
        f"{path.stat().st_size} bytes (truncated)" == error.value.found
        and "mmldlm prepare" in error.value.fix
    )
    Store(store_copy, "validation")
    assert any(name in problem for problem in verify(store_copy))


def test_missing_file_and_flipped_bit(store_copy):
    path = store_copy / "train" / "latents.npy"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    Store(store_copy, verify="sizes")
    with pytest.raises(UserError, match="SHA-256"):
        Store(store_copy, verify="checksums")
    path.unlink()
    with pytest.raises(UserError, match="the file is missing"):
        Store(store_copy)


def test_what_is_not_a_store_is_refused(tmp_path, store_copy):
    with pytest.raises(UserError, match="nothing there"):
        Store(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="an empty folder"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(UserError, match="test"):
        Store(store_copy, "test")
    for content, found in (
        ("{", "manifest.json\n  found: damaged file"),
        ("[]", "damaged file: a JSON list"),
        ("[" * 200_000, "damaged file"),
        ('{"format": "x"}', "format 'x'"),
        ('{"format": "mmldlm-store", "version": 2}', "version 2"),
        ('{"format": "mmldlm-store", "version": 1}', "latent_dim: Field required"),
    ):
        (store_copy / MANIFEST).write_text(content)
        with pytest.raises(UserError, match=found):
            Store(store_copy)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"latent_dim": "384"}, "latent_dim"),
        ({"latent_dim": 10**12}, "latent_dim"),
        ({"splits": ["train", "validation"]}, "splits"),
        ({"splits": {"train": {"num_samples": -1}}}, "splits.train.num_samples"),
        ({"files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}}, "outside the store"),
        ({"latent_stats": {"mean": "none", "std": [1.0]}}, "latent_stats.mean"),
        ({"tokenizer": {"name": "minilm"}}, "tokenizer.vocab_size"),
    ],
)
def test_a_manifest_is_not_trusted(store_copy, change, problem):
    manifest = json.loads((store_copy / MANIFEST).read_text())
    (store_copy / MANIFEST).write_text(json.dumps({**manifest, **change}))
    with pytest.raises(UserError, match=problem):
        Store(store_copy)


def test_arrays_that_contradict_the_manifest_are_refused(store_copy):
    manifest = json.loads((store_copy / MANIFEST).read_text())
    manifest["latent_dim"] = 512
    for values in (manifest["latent_stats"][key] for key in ("mean", "std")):
        values += values[:128]
    (store_copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="latent_dim 512"):
        Store(store_copy)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_check_latents_names_rows_that_are_not_finite(value):
    latents = np.ones((6, 4), np.float32)
    check_latents(latents, "here", 4)
    latents[[1, 4], 2] = value
    with pytest.raises(UserError, match="2 rows: 1, 4") as error:
        check_latents(latents, "here", 4)
    assert "here" in error.value.expected


def test_check_latents_names_zero_rows_beside_a_nan():
    latents = np.ones((6, 4), np.float32)
    latents[1, 2], latents[4] = np.nan, 0
    with pytest.raises(
        UserError, match="NaN or infinite values in 1 row: 101; zero vectors in 1 row: 104"
    ):
        check_latents(latents, "here", first_row=100)


def test_check_latents_refuses_zero_vectors_and_other_dimensions():
    latents = np.ones((6, 4), np.float32)
    with pytest.raises(UserError, match=r"\[samples, 8\]"):
        check_latents(latents, "here", 8)
    with pytest.raises(UserError, match="shape"):
        check_latents(latents[0], "here")
    latents[3] = 0
    with pytest.raises(UserError, match="zero vectors in 1 row: 3"):
        check_latents(latents, "here")


def test_latents_of_texts_are_float32_alone(store_copy):
    path = store_copy / "train" / "latents.npy"
    np.save(path, np.load(path).astype(np.float16))
    with pytest.raises(UserError, match="float16"):
        Store(store_copy, verify="none")


def test_zero_vectors_are_an_error_but_of_images():
    latents = np.zeros((2, 3), np.float32)
    check_latents(latents, "here", zero_ok=True)
    with pytest.raises(UserError, match="zero"):
        check_latents(latents, "here")


def test_a_changed_tokenizer_is_found_at_any_level(store_copy):
    """It is small, and another letter in its files means other tokens."""
    path = store_copy / "tokenizer" / "tokenizer_config.json"
    path.write_text(path.read_text().replace("mask", "nask", 1))
    with pytest.raises(UserError, match="tokenizer_config.json with the SHA-256"):
        load_tokenizer(store_copy)
