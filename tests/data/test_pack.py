"""Packing folders of files: every file is in the store or counted, and nothing bad gets in."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmldlm.commands import pack
from mmldlm.data import pack as packing
from mmldlm.data.pack import PackOptions
from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.options import PrepareOptions
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.data.store import Store
from mmldlm.data.verify import verify
from mmldlm.errors import UserError

pytestmark = pytest.mark.usefixtures("need_minilm")


@pytest.fixture(scope="module")
def files(need_minilm, corpus_file, tmp_path_factory):
    """What `prepare --layout files` makes of the same sentences as made_store."""
    root = tmp_path_factory.mktemp("files") / "layout"
    return prepare(
        PrepareOptions(str(root), str(corpus_file), validation_samples=10, layout="files")
    )


def _texts(root, split):
    store = Store(root, split)
    return store.texts(range(len(store)))


def _arrays(root):
    names = ("text", "tokens", "text_offsets", "token_offsets", "latents")
    return {
        f"{split}/{name}": (root / split / f"{name}.npy").read_bytes()
        for split in ("train", "validation")
        for name in names
    }


def test_the_files_layout_is_mm_ldlms_and_packs_to_the_same_store(files, made_store, tmp_path):
    records = json.loads((files / "train_data.json").read_text())
    assert len(records) == 38 and (files / "validation_data.json").is_file()
    for record in records:
        assert (files / record["text_path"]).read_text() == record["text"]
        assert np.load(files / record["latent_path"]).shape == (384,)
    root = packing.pack(PackOptions(str(files), str(tmp_path / "s")))
    assert _arrays(root) == _arrays(made_store) and verify(root) == []
    manifest, known = Store(root).manifest, Store(made_store).manifest
    assert (
        manifest["encoder"] == known["encoder"]
        and manifest["latent_stats"] == known["latent_stats"]
    )
    assert manifest["corpus"]["read"] == manifest["corpus"]["kept"] == 48


def test_a_folder_of_prepare_keeps_its_tokenizer_and_encoder(corpus_file, tmp_path):
    options = {"tokenizer": "train", "vocab_size": 300, "validation_samples": 10}
    folder, corpus = str(tmp_path / "files"), str(corpus_file)
    prepare(PrepareOptions(folder, corpus, layout="files", **options))
    store = prepare(PrepareOptions(str(tmp_path / "store"), corpus, **options))
    root = packing.pack(PackOptions(folder, str(tmp_path / "s")))
    assert _arrays(root) == _arrays(store)
    assert Store(root).manifest["tokenizer"] == Store(store).manifest["tokenizer"]
    with pytest.raises(UserError, match="encoder 'minilm'(.|\n)*--encoder e5"):
        packing.pack(PackOptions(folder, str(tmp_path / "t"), encoder="e5"))


@pytest.mark.parametrize(
    "name, dim, entries",
    [
        ("e5", 1024, {"pooling": "mean", "prefix": "passage: ", "normalize": True}),
        ("qwen", 256, {"pooling": "last", "cut_to": 256, "normalize": True}),
    ],
)
def test_later_texts_are_embedded_as_the_named_encoder_embeds(
    sentences, tmp_path, name, dim, entries
):
    """Of vectors that were normalized in bf16."""
    for number, text in enumerate(sentences[:6]):
        vector = torch.randn(dim, generator=torch.Generator().manual_seed(number)).bfloat16()
        vector = torch.nn.functional.normalize(vector, dim=0).float().numpy()
        _write(tmp_path / "files", f"t{number}", text, vector * np.float32(1.004))
    options = {"validation_samples": 2, "encoder": name}
    root = packing.pack(PackOptions(str(tmp_path / "files"), str(tmp_path / "s"), **options))
    encoder = Store(root).manifest["encoder"]
    assert encoder == {"name": name, "source": "imported", **entries}
    with pytest.raises(UserError, match=f"384 components for --encoder minilm(.|\n)*{dim} in"):
        options["encoder"] = "minilm"
        packing.pack(PackOptions(str(tmp_path / "files"), str(tmp_path / "t"), **options))


def test_a_list_without_texts_is_named(files, tmp_path):
    shutil.copytree(files, tmp_path / "files")
    path = tmp_path / "files" / "train_data.json"
    records = [
        {"latent_path": record["latent_path"], "text": None}
        for record in json.loads(path.read_text())
    ]
    path.write_text(json.dumps(records))
    with pytest.raises(UserError, match="latent_path and text or text_path in .*train_data.json"):
        packing.pack(PackOptions(str(tmp_path / "files"), str(tmp_path / "s")))


def test_files_are_distinguished_from_a_store(files, tmp_path):
    with pytest.raises(UserError, match="mmldlm pack"):
        Store(files)
    (tmp_path / "latents").mkdir()
    with pytest.raises(UserError, match="mmldlm pack"):
        Store(tmp_path)


def test_a_latent_that_the_list_forgot_is_counted(files, tmp_path):
    shutil.copytree(files, tmp_path / "files")
    np.save(tmp_path / "files" / "latents" / "train" / "forgotten.npy", np.ones(384, np.float32))
    corpus = Store(
        packing.pack(PackOptions(str(tmp_path / "files"), str(tmp_path / "s")))
    ).manifest["corpus"]
    assert (
        corpus["read"] == 49 and corpus["kept"] == 48 and corpus["dropped"] == {"not_in_json": 1}
    )


def _write(folder, name, text, latent):
    for kind in ("texts", "latents"):
        (folder / kind / "train").mkdir(parents=True, exist_ok=True)
    if text is not None:
        (folder / "texts" / "train" / f"{name}.txt").write_text(text)
    if latent is not None:
        np.save(folder / "latents" / "train" / f"{name}.npy", latent)


def test_every_file_is_accounted_for(sentences, tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "files"
    for number, text in enumerate(sentences[:20]):
        _write(
            folder,
            f"good_{number:02}",
            text,
            rng.normal(size=(1, 8) if number % 2 else 8).astype(np.float32),
        )
    unit = np.ones(8, np.float32)
    _write(folder, "twice", sentences[0].upper(), unit)
    _write(folder, "nan", "It has no number.", np.full(8, np.nan, np.float32))
    _write(folder, "zero", "It has no length.", np.zeros(8, np.float32))
    _write(folder, "rows", "It has two rows.", np.ones((2, 8), np.float32))
    _write(folder, "empty", "  ", unit)
    _write(folder, "lonely_text", "Nobody embedded me.", None)
    _write(folder, "lonely_latent", None, unit)
    _write(folder, "broken", "Its latent is cut off.", unit)
    (folder / "latents" / "train" / "broken.npy").write_bytes(b"\x93NUMPY")
    root = packing.pack(PackOptions(str(folder), str(tmp_path / "s"), validation_samples=4))
    corpus = Store(root).manifest["corpus"]
    assert corpus["dropped"] == {
        "duplicate": 1,
        "latent_not_finite": 1,
        "latent_not_one_vector": 1,
        "latent_zero": 1,
        "no_latent": 1,
        "no_text": 1,
        "too_short": 1,
        "unreadable_latent": 1,
    }
    assert corpus["read"] == 28 and corpus["kept"] == 20
    assert sorted(_texts(root, "train") + _texts(root, "validation")) == sorted(sentences[:20])
    assert len(Store(root, "validation")) == 4 and verify(root) == []
    assert Store(root).manifest["encoder"]["name"] == "unknown"


def _with_header(path, shape) -> None:
    """A .npy file whose header contradicts its content."""
    buffer = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    path.write_bytes(buffer.getvalue() + np.ones(8, np.float32).tobytes())


def test_files_that_lie_or_never_end_are_counted(sentences, tmp_path):
    folder = tmp_path / "files"
    latents = folder / "latents" / "train"
    for number, text in enumerate(sentences[:12]):
        _write(folder, f"good_{number:02}", text, np.ones(8, np.float32) + number)
    # Another dimension, and the first to be read.
    _write(folder, "aaa_first", sentences[30], np.ones(7, np.float32))
    for name in ("long", "overflow", "short", "fifo", "integers", "endless_text"):
        _write(folder, name, f"Its file is called {name}.", np.ones(8, np.int8))
    _with_header(latents / "long.npy", (9999999999999,))
    _with_header(latents / "overflow.npy", (1 << 62, 1 << 62))
    _with_header(latents / "short.npy", (4,))
    (latents / "fifo.npy").unlink()
    os.mkfifo(latents / "fifo.npy")
    np.save(latents / "endless_text.npy", np.ones(8, np.float32))
    (folder / "texts" / "train" / "endless_text.txt").unlink()
    os.mkfifo(folder / "texts" / "train" / "endless_text.txt")
    root = packing.pack(PackOptions(str(folder), str(tmp_path / "s"), validation_samples=4))
    corpus = Store(root).manifest["corpus"]
    assert corpus["dropped"] == {
        "latent_of_another_dimension": 1,
        "latent_of_type_int8": 1,
        "unreadable_latent": 4,
        "unreadable_text": 1,
    }
    assert corpus["kept"] == 12 and Store(root).latent_dim == 8 and verify(root) == []


def test_tokens_that_unpack_to_gigabytes_are_counted(sentences, tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    tokenizer = tokenizers.load("minilm")
    for number, text in enumerate(sentences[:8]):
        encoded = tokenizer(text, return_tensors="np")
        arrays = {key: encoded[key][0] for key in ("input_ids", "attention_mask")}
        np.savez(folder / f"x{number}_tokens.npz", **arrays)
        np.save(folder / f"x{number}.npy", np.ones(8, np.float32) + number)
    np.savez_compressed(
        folder / "x7_tokens.npz",
        input_ids=np.zeros(10_000_000, np.int64),
        attention_mask=np.zeros(1),
    )
    (folder / "x6_tokens.npz").write_bytes(b"PK\x03\x04 no archive")
    root = packing.pack(
        PackOptions(str(folder), str(tmp_path / "s"), tokenizer="minilm", validation_samples=2)
    )
    assert Store(root).manifest["corpus"]["dropped"] == {"unreadable_text": 2}


def test_pairs_of_tokens_and_latents(sentences, tmp_path):
    """X.npy + X_tokens.npz in one folder: padded to one length with special tokens, as MM-LDLM
    wrote them.
    """
    folder = tmp_path / "pairs"
    folder.mkdir()
    tokenizer = tokenizers.load("minilm")
    for number, text in enumerate(sentences):
        encoded = tokenizer(text, padding="max_length", max_length=32, return_tensors="np")
        arrays = {key: encoded[key][0].astype(np.int32) for key in ("input_ids", "attention_mask")}
        np.savez(folder / f"x{number}_tokens.npz", **arrays)
        np.save(
            folder / f"x{number}.npy",
            np.random.default_rng(number).normal(size=8).astype(np.float32),
        )
    with pytest.raises(UserError, match="--tokenizer NAME"):
        packing.pack(PackOptions(str(folder), str(tmp_path / "s")))
    root = packing.pack(
        PackOptions(str(folder), str(tmp_path / "s"), tokenizer="minilm", validation_samples=6)
    )
    store = Store(root)
    for row in range(len(store)):
        ids = tokenizer(store.text(row), add_special_tokens=False)["input_ids"]
        assert store.get([row]).tokens[0].tolist() == ids and store.text(row) in {
            text.lower() for text in sentences
        }
    assert Store(root).manifest["corpus"]["kept"] == 48 and verify(root) == []


def test_a_validation_split_never_shares_a_text_with_train(sentences, tmp_path):
    folder = tmp_path / "files"
    for number, text in enumerate(sentences[:10]):
        _write(folder, f"t{number}", text, np.ones(4, np.float32) + number)
    for kind in ("texts", "latents"):
        (folder / kind / "validation").mkdir()
    for number, text in enumerate([sentences[0].lower(), sentences[1], "A sentence of its own."]):
        (folder / "texts" / "validation" / f"v{number}.txt").write_text(text)
        np.save(folder / "latents" / "validation" / f"v{number}.npy", np.ones(4, np.float32))
    root = packing.pack(PackOptions(str(folder), str(tmp_path / "s")))
    assert len(Store(root, "validation")) == 3 and _texts(root, "train") == sentences[2:10]
    assert Store(root).manifest["corpus"]["dropped"] == {"in_validation": 2} and verify(root) == []


def test_what_cannot_be_packed_is_refused(sentences, tmp_path):
    with pytest.raises(UserError, match="not a folder"):
        packing.pack(PackOptions(str(tmp_path / "none"), str(tmp_path / "s")))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="thesis.tex"):
        packing.pack(PackOptions(str(tmp_path / "other"), str(tmp_path / "s")))
    folder = tmp_path / "files"
    for number in range(4):
        _write(folder, f"t{number}", sentences[number], np.ones(4 + number % 2, np.float32))
    with pytest.raises(UserError, match="2 of 4, 2 of 5"):
        packing.pack(PackOptions(str(folder), str(tmp_path / "s")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "other"]


def test_the_verb(files, tmp_path, capsys, monkeypatch):
    clock = iter([100.0, 136.2])
    monkeypatch.setattr(packing, "time", SimpleNamespace(perf_counter=clock.__next__))
    parser = argparse.ArgumentParser()
    pack.add_arguments(parser)
    assert pack.main(parser.parse_args([str(files), "--output-dir", str(tmp_path / "s")])) == 0
    out = capsys.readouterr().out
    assert "data.latent_data_root=" in out and re.search(r"time +│ 36 s", out)
