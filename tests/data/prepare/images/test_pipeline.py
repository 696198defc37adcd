"""Preparing images: nothing leaks, every sample is accounted for, and a killed preparation ends in the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from mmldlm.data.images.codec import ImageCodec
from mmldlm.data.prepare.images import pipeline, read_stage
from mmldlm.data.prepare.images.options import ImageOptions
from mmldlm.data.prepare.images.pipeline import prepare_images
from mmldlm.data.store.store import Store, load_tokenizer
from mmldlm.data.store.verify import verify
from mmldlm.errors import UserError


def _files(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _splits(root):
    return Store(root), Store(root, "validation")


@pytest.fixture
def folder(tmp_path):
    """30 pairs; 0 and 1 are the same pair, 2 and 3 the same image, 4 and 5 the same caption, one file is damaged."""
    path = tmp_path / "photos"
    path.mkdir()
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (20, 28, 3), dtype=np.uint8)) for _ in range(30)]
    captions = [f"picture of {'abcdefghij'[i % 10]} {'uvw'[i // 10]}" for i in range(30)]
    pictures[1], pictures[3] = pictures[0], pictures[2]
    captions[1], captions[5] = captions[0], captions[4]
    for number, (picture, caption) in enumerate(zip(pictures, captions)):
        picture.save(path / f"{number:02}.png")
        (path / f"{number:02}.txt").write_text(caption)
    (path / "29.png").write_bytes(b"not a png")
    return path


def test_glyphs_keep_groups_apart_and_every_word_in_training(glyph_store):
    train, validation = _splits(glyph_store)
    assert verify(glyph_store) == []
    assert (len(train), len(validation)) == (462, 63) and train.manifest["image"]["grid"] == [4, 4]
    assert train.manifest["encoder"]["normalize"] is False and train.kind == "image"
    words = {word for text in train.texts(range(len(train))) for word in text.split()}
    texts = validation.texts(range(len(validation)))
    assert {word for text in texts for word in text.split()} <= words
    assert not set(train.texts(range(len(train)))) & set(texts)
    tokenizer = load_tokenizer(glyph_store)
    for text, ids in zip(texts, validation.get(range(len(texts))).tokens):
        assert len(ids) == len(text.split()) and tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids


def test_groups_are_exactly_the_equal_pictures(glyph_store):
    train, _ = _splits(glyph_store)
    images = [row.tobytes() for row in train.get(range(len(train))).latents]
    by_pixels = np.unique(images, return_inverse=True)[1]
    same_group = train.groups[:, None] == np.asarray(train.groups)[None]
    np.testing.assert_array_equal(same_group, by_pixels[:, None] == by_pixels[None])
    assert len(np.unique(train.groups)) < len(train), "letters of three alphabets share shapes"


def test_a_folder_is_read_counted_and_split_by_group(folder, tmp_path, capsys):
    options = ImageOptions(
        str(tmp_path / "s"), str(folder), image_size=16, validation_samples=6, max_quarantined=0.05
    )  # fmt: skip
    root = prepare_images(options)
    train, validation = _splits(root)
    corpus = train.manifest["corpus"]
    assert corpus["read"] == 30 and corpus["kept"] == 28 == len(train) + len(validation)
    assert sorted(corpus["dropped"].values()) == [1, 1] and corpus["dropped"]["duplicate"] == 1
    assert "29.png" in (root / "quarantine.jsonl").read_text() and "29.png" in capsys.readouterr().out
    assert verify(root) == [] and train.manifest["image"]["channels"] == 3
    assert len(ImageCodec.open(root).decode(train.get([0]).latents)[0]) == 16
    assert str(tmp_path) not in (root / "manifest.json").read_text()


def test_too_many_damaged_files_write_nothing(folder, tmp_path):
    with pytest.raises(UserError, match="29.png"):
        prepare_images(ImageOptions(str(tmp_path / "s"), str(folder), image_size=16))
    assert not (tmp_path / "s").exists()


def test_a_killed_preparation_ends_in_the_same_bytes(folder, tmp_path, monkeypatch):
    options = {"image_size": 16, "validation_samples": 6, "max_quarantined": 0.1}
    monkeypatch.setattr(read_stage, "SHARD", 8)
    whole = prepare_images(ImageOptions(str(tmp_path / "whole"), str(folder), **options))
    calls, read_shard = [], read_stage.read_shard

    def killed(*args):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args[0].name)
        read_shard(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(read_stage, "read_shard", killed)
        prepare_images(ImageOptions(str(tmp_path / "s"), str(folder), **options))
    assert not (tmp_path / "s").exists()
    done = [path.stat().st_mtime_ns for path in sorted((tmp_path / "s.work" / "read-images-train").iterdir())]
    assert len(done) == 2
    resumed = prepare_images(ImageOptions(str(tmp_path / "s"), str(folder), **options))
    assert _files(resumed) == _files(whole) and not (tmp_path / "s.work").exists()


def test_a_validation_corpus_shares_nothing_with_training(folder, tmp_path):
    held = tmp_path / "held.jsonl"
    records = [{"image": f"{i:02}.png", "caption": f"held {i}"} for i in (2, 7, 8)]
    held.write_text("\n".join(map(json.dumps, [*records, {"image": "09.png", "caption": "picture of e u"}])))
    options = ImageOptions(str(tmp_path / "s"), str(folder), str(held), image_size=16, max_quarantined=0.1)
    with pytest.raises(UserError, match="cannot be read"):  # its images lie in the folder of the training images
        prepare_images(options)
    held.rename(folder / "held.jsonl")
    options = replace(options, validation_corpus=str(folder / "held.jsonl"), force=True)
    train, validation = _splits(prepare_images(options))
    assert len(validation) == 4 and verify(train.root) == []
    assert train.manifest["corpus"]["dropped"]["in_validation_corpus"] >= 5


def test_components_need_images(tmp_path):
    with pytest.raises(UserError, match="training images"):
        prepare_images(ImageOptions(str(tmp_path / "s"), latents="pca:240", max_samples=200, faces=2))
    root = prepare_images(ImageOptions(str(tmp_path / "t"), latents="pca:64", max_samples=200, faces=2))
    train, _ = _splits(root)
    assert train.latent_dim == 4 and train.manifest["image"]["grid"] is None and verify(root) == []
    assert pipeline.ImageCodec.open(root).name == "pca:64"
