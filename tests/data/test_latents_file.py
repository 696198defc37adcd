"""Packing one file of texts with one of latents: every row stays with its text, or is counted."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from mmldlm.data import pack as packing
from mmldlm.data.pack import PackOptions
from mmldlm.data.store import SPLITS, Store
from mmldlm.data.verify import verify
from mmldlm.errors import UserError
from mmldlm.utils import resources

pytestmark = pytest.mark.usefixtures("need_minilm")


@pytest.fixture
def latents(sentences):
    """[20, 8], a row for each of the first 20 sentences."""
    return np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)


@pytest.fixture
def texts_file(sentences, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(sentences[:20]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def pack(tmp_path):
    """Pack two files; return text -> latents of the store."""

    def call(source, latents, **options):
        root = packing.pack(
            PackOptions(
                str(source), str(tmp_path / "s"), latents=latents and str(latents), **options
            )
        )
        assert verify(root) == []
        stores = [Store(root, split) for split in SPLITS]
        call.manifest = stores[0].manifest
        return {
            text: row
            for store in stores
            for text, row in zip(store.texts(range(len(store))), store.get(range(len(store)))[1])
        }

    return call


def save(path, values, **others):
    if path.suffix == ".npz":
        np.savez_compressed(path, E=values, **others)
    else:
        np.save(path, values)
    return path


@pytest.mark.parametrize("name", ["E.npy", "E.npz"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_each_text_has_the_latent_of_its_row(
    sentences, texts_file, latents, pack, tmp_path, name, dtype
):
    """Blank lines are no texts."""
    found = pack(texts_file, save(tmp_path / name, latents.astype(dtype)))
    assert list(sorted(found)) == sorted(sentences[:20])
    for text, row in zip(sentences[:20], latents.astype(dtype)):
        assert np.array_equal(found[text], row.astype(np.float32))
    encoder, corpus = pack.manifest["encoder"], pack.manifest["corpus"]
    assert encoder == {"name": "unknown", "source": "imported", "normalize": False}
    assert corpus["source"] == "files:texts.txt" and corpus["read"] == corpus["kept"] == 20


def test_dropped_texts_take_their_rows_with_them(sentences, latents, pack, tmp_path):
    texts = [*sentences[:17], None, "a\0b", sentences[0].upper()]
    records = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(records.replace("a\\u0000b", "\\ud800"), encoding="utf-8")
    latents[3, 2], latents[5] = np.nan, 0
    order = np.random.default_rng(1).permutation(20)
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[i] for i in order), encoding="utf-8")
    found = pack(tmp_path / "a.jsonl", save(tmp_path / "E.npy", latents[order]), text_field="body")
    assert pack.manifest["corpus"]["dropped"] == {
        "duplicate": 1, "empty": 1, "latent_not_finite": 1, "latent_zero": 1, "unreadable_text": 1
    }  # fmt: skip
    assert len(found) == 15
    for text, row in found.items():
        rows = latents[[i for i, own in enumerate(texts) if own and own.lower() == text.lower()]]
        assert (rows == row).all(1).any()


def test_several_latents_per_text(texts_file, latents, pack, tmp_path):
    path = save(tmp_path / "E.npy", latents.reshape(20, 2, 4))
    assert {row.shape for row in pack(texts_file, path).values()} == {(2, 4)}
    assert pack.manifest["latents_per_text"] == 2
    with pytest.raises(UserError, match="--latents-per-text 2"):
        pack(texts_file, path, latents_per_text=3, force=True)


def test_a_validation_split_that_takes_everything_is_named(texts_file, latents, pack, tmp_path):
    with pytest.raises(UserError, match="0 .*(?s:.*)--validation-samples"):
        pack(texts_file, save(tmp_path / "E.npy", latents), validation_samples=20)


def test_a_parquet_file_has_texts_and_latents(sentences, latents, pack, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [*latents.tolist()[:18], None, [1.0, 2.0]]
    columns = {"text": sentences[:20], "E": rows, "ids": [[1, 2]] * 20}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet", row_group_size=7)
    found = pack(tmp_path / "a.parquet", None)
    assert all(np.allclose(found[text], row) for text, row in zip(sentences[:18], latents))
    dropped = {"latent_of_another_dimension": 1, "unreadable_latent": 1}
    assert pack.manifest["corpus"]["dropped"] == dropped
    fixed = arrow.array(latents.tolist(), arrow.list_(arrow.float32(), 8))
    table = arrow.table({"text": sentences[:20], "E": fixed, "other": fixed})
    parquet.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(UserError, match="2 such columns: E, other"):
        pack(tmp_path / "b.parquet", None, force=True)
    found = pack(tmp_path / "b.parquet", None, latents_field="other", force=True)
    assert len(found) == 20
    parquet.write_table(arrow.table({"text": sentences[:20]}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match="0 such columns"):
        pack(tmp_path / "c.parquet", None, force=True)


@pytest.mark.parametrize(
    ("name", "change", "options", "message"),
    [
        ("E.npy", lambda rows: rows[1:], {}, r"of the 20 texts.*found: 19 latents"),
        ("E.npy", lambda rows: rows[0], {}, r"float32 \[8\]"),
        ("E.npy", lambda rows: rows.astype(np.int8), {}, r"int8 \[20, 8\]"),
        ("E.npy", lambda rows: rows, {"latents_field": "E"}, "leave --latents-field out"),
        ("E.npz", lambda rows: rows, {"latents_field": "F"}, "arrays E, .*names 'F'"),
        ("E.pt", lambda rows: rows, {}, r"a \.npy or \.npz file"),
    ],
)
def test_latents_that_do_not_fit_are_refused(
    texts_file, latents, pack, tmp_path, name, change, options, message
):
    path = save(tmp_path / name, change(latents))
    path = path if path.exists() else path.with_name(f"{path.name}.npy").rename(path)
    with pytest.raises(UserError, match=f"(?s){message}"):
        pack(texts_file, path, **options)


def test_an_npz_of_several_arrays_or_of_too_many_bytes(
    texts_file, latents, pack, tmp_path, monkeypatch
):
    path = save(tmp_path / "E.npz", latents, other=latents)
    with pytest.raises(UserError, match="arrays E, other"):
        pack(texts_file, path)
    assert len(pack(texts_file, path, latents_field="other")) == 20
    monkeypatch.setattr(resources, "memory", lambda: SimpleNamespace(available=500))
    with pytest.raises(UserError, match="(?s)768 B of free memory for the array other .*: 500 B"):
        pack(texts_file, path, latents_field="other", force=True)
    path.write_bytes(path.read_bytes()[:-99])
    with pytest.raises(UserError, match="not a .npz file"):
        pack(texts_file, path, force=True)


def test_texts_are_one_file_and_need_latents(texts_file, latents, pack, tmp_path):
    path = save(tmp_path / "E.npy", latents)
    with pytest.raises(UserError, match="(?s)one file at .*found: a folder"):
        pack(tmp_path, path)
    with pytest.raises(UserError, match="no such file"):
        pack(tmp_path / "none.txt", path)
    with pytest.raises(UserError, match="--latents FILE for the texts in"):
        pack(texts_file, None)
    with pytest.raises(UserError, match="leave --text-field out"):
        pack(tmp_path, None, text_field="body")
