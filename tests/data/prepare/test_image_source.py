"""Preparing images: nothing leaks, every sample is accounted for, and a killed preparation ends in
the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.prepare import image_source as pipeline
from mmldlm.data.prepare import read
from mmldlm.data.prepare.options import ImageOptions
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.data.store import Store, load_tokenizer
from mmldlm.data.verify import verify
from mmldlm.errors import UserError
from mmldlm.utils import resources
from mmldlm.utils.resources import Memory
from tests.support.helpers import rank_server, run_ranks


def _files(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def _splits(root):
    return Store(root), Store(root, "validation")


@pytest.fixture
def folder(tmp_path):
    """30 pairs; 0 and 1 are the same pair, 2 and 3 the same image, 4 and 5 the same caption, one
    file is damaged.
    """
    path = tmp_path / "photos"
    path.mkdir()
    rng = np.random.default_rng(0)
    pictures = [
        Image.fromarray(rng.integers(0, 256, (20, 28, 3), dtype=np.uint8)) for _ in range(30)
    ]
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
    root = prepare(options)
    train, validation = _splits(root)
    corpus = train.manifest["corpus"]
    assert corpus["read"] == 30 and corpus["kept"] == 28 == len(train) + len(validation)
    assert sorted(corpus["dropped"].values()) == [1, 1] and corpus["dropped"]["duplicate"] == 1
    assert (
        "29.png" in (root / "quarantine.jsonl").read_text() and "29.png" in capsys.readouterr().out
    )
    assert verify(root) == [] and train.manifest["image"]["channels"] == 3
    assert len(ImageCodec.open(root).decode(train.get([0]).latents)[0]) == 16
    assert str(tmp_path) not in (root / "manifest.json").read_text()


def test_a_folder_of_class_names_is_split(tmp_path):
    folder, rng = tmp_path / "classes", np.random.default_rng(1)
    folder.mkdir()
    for number in range(40):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
            folder / f"{number:02}.png"
        )
        (folder / f"{number:02}.txt").write_text("a cat" if number < 20 else "a dog")
    # One picture under two names.
    (folder / "00.png").write_bytes((folder / "39.png").read_bytes())
    train, validation = _splits(
        prepare(
            ImageOptions(str(tmp_path / "s"), str(folder), image_size=8, validation_samples=12)
        )
    )
    assert (len(train), len(validation)) == (28, 12) and verify(train.root) == []
    for split in (train, validation):
        names = split.texts(range(len(split)))
        assert 0.2 < names.count("a cat") / len(names) < 0.8
    assert len({int(group) for split in (train, validation) for group in split.groups}) == 39


def test_images_of_one_file_name_in_several_folders_keep_their_pixels(tmp_path):
    lines = []
    for number in range(12):
        path = tmp_path / "outside" / str(number) / "image.png"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(path)
        lines.append(json.dumps({"image": str(path), "caption": f"red of {20 * number}"}))
    for number in (10, 11):
        (tmp_path / "outside" / str(number) / "image.png").write_bytes(b"damaged")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "all.jsonl").write_text("\n".join(lines))
    corpus = str(tmp_path / "list" / "all.jsonl")
    root = prepare(ImageOptions(str(tmp_path / "s"), corpus, image_size=8, max_quarantined=0.5))
    for split in _splits(root):
        reds = split.get(range(len(split))).latents
        codec = ImageCodec.open(root)
        for image, caption in zip(codec.decode(reds), split.texts(range(len(split)))):
            assert caption == f"red of {image[0, 0, 0]}"
    manifest = json.loads((root / "manifest.json").read_text())
    assert "file image.png (12)" in manifest["inputs"]
    assert len((root / "quarantine.jsonl").read_text().splitlines()) == 2


def test_captions_that_differ_in_case_are_kept_and_those_that_a_cut_makes_equal_are_not(tmp_path):
    lines, words = [], "one two three four five six seven"
    for number in range(20):
        Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(tmp_path / f"{number}.png")
        captions = [f"a {number}", f"A {number}", f"{words} eight", f"{words} nine"]
        lines.append(json.dumps({"image": f"{number}.png", "caption": captions}))
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    options = ImageOptions(
        str(tmp_path / "s"),
        str(tmp_path / "list.jsonl"),
        image_size=8,
        max_tokens=7,
        tokenizer="words",
        validation_samples=20,
    )
    corpus = Store(prepare(options)).manifest["corpus"]
    assert corpus["read"] == 80 and corpus["kept"] == 60 and corpus["dropped"] == {"duplicate": 20}
    assert verify(tmp_path / "s") == []


def test_too_many_damaged_files_write_nothing(folder, tmp_path):
    with pytest.raises(UserError, match="29.png"):
        prepare(ImageOptions(str(tmp_path / "s"), str(folder), image_size=16))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 65536}, "--image-size as a whole number .* at most 16384"),
        ({"image_size": 4096, "patch_size": 2}, "4,194,304 .*--patch-size 2"),
        ({"image_size": 4096}, "free memory for 30 images of 4096 x 4096 .*smaller --image-size"),
    ],
)
def test_sizes_that_no_memory_holds_are_refused_first(
    folder, tmp_path, monkeypatch, options, message
):
    """trials-3, further tracebacks; a corpus of fewer images needs less."""
    free = Memory(8 << 30, 8 << 30)
    monkeypatch.setattr(resources, "memory", lambda: free)
    with pytest.raises(UserError, match=f"(?s){message}"):
        prepare(ImageOptions(str(tmp_path / "s"), str(folder), **options))
    assert not (tmp_path / "s.work").exists()


def test_a_killed_preparation_ends_in_the_same_bytes(folder, tmp_path, monkeypatch):
    options = {"image_size": 16, "validation_samples": 6, "max_quarantined": 0.1}
    monkeypatch.setattr(read, "IMAGES_PER_SHARD", 8)
    whole = prepare(ImageOptions(str(tmp_path / "whole"), str(folder), **options))
    calls, read_images = [], read.read_images

    def killed(*args):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args[0].name)
        read_images(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(read, "read_images", killed)
        prepare(ImageOptions(str(tmp_path / "s"), str(folder), **options))
    assert not (tmp_path / "s").exists()
    done = [
        path.stat().st_mtime_ns
        for path in sorted((tmp_path / "s.work" / "read-images-train").iterdir())
    ]
    assert len(done) == 2
    resumed = prepare(ImageOptions(str(tmp_path / "s"), str(folder), **options))
    assert _files(resumed) == _files(whole) and not (tmp_path / "s.work").exists()


KILLED_IN = """
import os, signal, sys
from mmldlm.cli import main
from mmldlm.data.prepare import fit_codec, image_source, pipeline, read, source

stage, read.IMAGES_PER_SHARD, calls = sys.argv[1], 8, []
places = {
    "read": (read, "write_npz"), "select": (image_source.select, "join_groups"),
    "tokenize": (source, "save_tokenizer"), "fit": (fit_codec, "_write"),
    "write": (pipeline._Preparation, "_write_split"), "committed": (pipeline, "commit"),
}

def killed(*args, **options):
    calls.append(args)
    if stage == "committed":
        work(*args, **options)
    if len(calls) == 2 or stage not in ("read", "write"):
        os.kill(os.getpid(), signal.SIGKILL)
    return work(*args, **options)

if stage in places:
    module, name = places[stage]
    work = getattr(module, name)
    setattr(module, name, killed)
code = main(sys.argv[2:])
sys.stdout.flush()
os._exit(code)  # taking down all that a forked rank has imported takes longer than the preparation
"""
STAGES = {"read": 2, "select": 3, "tokenize": 1, "fit": 2, "write": 3, "committed": 2}


def test_killed_in_any_stage_and_resumed_on_any_number_of_ranks_the_bytes_are_the_same(
    folder, tmp_path
):
    """Ranks of their own processes: SIGKILL ends one of them where its stage works, then all
    others.
    """
    (script := tmp_path / "killed.py").write_text(KILLED_IN)
    words = [
        str(folder),
        "--image-size",
        16,
        "--patch-size",
        4,
        "--latents",
        "pca:16",
        "--validation-samples",
        6,
    ]
    words = ["prepare", *words, "--max-quarantined", 0.1]
    straight = run_ranks(1, script, "none", *words, "--output-dir", tmp_path / "whole")
    assert straight.returncode == 0, straight.stdout[-3000:]
    out = tmp_path / "s"
    for stage, world in STAGES.items():
        ranks = rank_server().start(world, [stage, *words, "--output-dir", out], script)
        assert -9 in ranks.wait(60, grace=0.0), (stage, ranks.output())
        assert out.exists() == (stage == "committed"), stage
        assert (tmp_path / "s.work" / "plan.json").is_file(), stage
    done = run_ranks(3, script, "none", *words, "--output-dir", out)
    assert done.returncode == 0 and "already complete" in done.stdout, done.stdout[-3000:]
    assert _files(out) == _files(tmp_path / "whole") and not (tmp_path / "s.work").exists()


def test_a_validation_corpus_shares_nothing_with_training(folder, tmp_path):
    held = tmp_path / "held.jsonl"
    records = [{"image": f"{i:02}.png", "caption": f"held {i}"} for i in (2, 7, 8)]
    held.write_text(
        "\n".join(map(json.dumps, [*records, {"image": "09.png", "caption": "picture of e u"}]))
    )
    options = ImageOptions(
        str(tmp_path / "s"), str(folder), str(held), image_size=16, max_quarantined=0.1
    )
    with pytest.raises(UserError, match="cannot be read"):
        # Its images lie in the folder of the training images.
        prepare(options)
    held.rename(folder / "held.jsonl")
    options = replace(options, validation_corpus=str(folder / "held.jsonl"), force=True)
    train, validation = _splits(prepare(options))
    assert len(validation) == 4 and verify(train.root) == []
    assert train.manifest["corpus"]["dropped"]["in_validation_corpus"] >= 5


def test_components_need_images(tmp_path):
    with pytest.raises(UserError, match="training images"):
        prepare(ImageOptions(str(tmp_path / "s"), latents="pca:240", max_samples=200, faces=2))
    root = prepare(ImageOptions(str(tmp_path / "t"), latents="pca:64", max_samples=200, faces=2))
    train, _ = _splits(root)
    assert train.latent_dim == 4 and train.manifest["image"]["grid"] is None and verify(root) == []
    assert pipeline.ImageCodec.open(root).name == "pca:64"


@pytest.mark.parametrize("latents, codes", [("codes:kmeans:64", 64), ("codes:fsq", 1000)])
def test_codes_are_the_same_bytes_however_the_work_is_cut(latents, codes, tmp_path, monkeypatch):
    found = []
    for shard in (256, 50):
        monkeypatch.setattr(read, "IMAGES_PER_SHARD", shard)
        options = ImageOptions(
            str(tmp_path / f"s{shard}"), latents=latents, max_samples=200, faces=2
        )
        found.append(prepare(options))
    own = ("codebook.npy", "train/latents.npy", "validation/latents.npy")
    assert all((found[0] / name).read_bytes() == (found[1] / name).read_bytes() for name in own)
    root = found[0]
    train, validation = _splits(root)
    image, rows = train.manifest["image"], train.get([0, 1]).latents
    assert (
        verify(root) == [] and train.manifest["latent_stats"] is None and image["codes"] == codes
    )
    assert rows.shape == (2, 16, 1) and rows.dtype == np.int64 and image["grid"] == [4, 4]
    assert np.load(root / "train" / "latents.npy").dtype == np.uint16
    # The manifest's PSNR is that of the original images, which the store of pixels has.
    pixels = prepare(ImageOptions(str(tmp_path / "pixels"), max_samples=200, faces=2))
    for store, original in zip((train, validation), _splits(pixels)):
        every = range(len(store))
        assert store.texts(every) == original.texts(every)
        made = ImageCodec.open(root).decode(store.get(every).latents)
        real = ImageCodec.open(pixels).decode(original.get(every).latents)
        error = ((made.astype(float) - real) ** 2).mean()
        assert image["codebook_statistics"][store.split]["psnr"] == pytest.approx(
            10 * np.log10(255**2 / error), abs=1e-3
        )


def test_an_id_that_names_no_code_is_found_by_its_row(tmp_path):
    root = prepare(
        ImageOptions(str(tmp_path / "s"), latents="codes:kmeans:32", max_samples=200, faces=2)
    )
    latents = np.load(root / "train" / "latents.npy", mmap_mode="r+")
    latents[17, 3, 0] = 32
    latents.flush()
    problems = verify(root)
    assert any("SHA-256" in problem for problem in problems)
    assert any(
        "ids of codes from 0 to 31" in problem and "rows are 17" in problem for problem in problems
    )


@pytest.mark.parametrize(
    "latents", ["codes", "codes:vq", "codes:kmeans:1", "codes:kmeans:70000", "codes:kmeans:3000"]
)
def test_wrong_codebooks_are_refused(latents, tmp_path):
    with pytest.raises(UserError, match="codes"):
        prepare(ImageOptions(str(tmp_path / "s"), latents=latents, max_samples=200, faces=2))
    assert not (tmp_path / "s").exists() and not (tmp_path / "s.work").exists()
