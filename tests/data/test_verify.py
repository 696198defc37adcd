"""Verifying a store."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mmldlm.cli import main
from mmldlm.commands import verify_data
from mmldlm.commands.verify_data import plot, write_sheet
from mmldlm.data.manifest import MANIFEST
from mmldlm.data.store import Store
from mmldlm.data.verify import SplitFindings, examine, examine_images, find_leaks, verify
from mmldlm.data.writers import StoreSplit
from mmldlm.utils.atomic_files import list_files, sha256_of


def _rewrite(root, name, change):
    """Damages an array and makes the manifest agree, as a faulty writer would."""
    array = np.load(root / name)
    change(array)
    np.save(root / name, array)
    manifest = json.loads((root / MANIFEST).read_text())
    manifest["files"][name] = {
        "bytes": (root / name).stat().st_size,
        "sha256": sha256_of(root / name),
    }
    (root / MANIFEST).write_text(json.dumps(manifest))


def test_the_plot_shows_shares(made_store, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        verify_data, "save_figure", lambda figure, path, dpi: figures.append(figure)
    )
    plot(
        examine(made_store),
        json.loads((made_store / MANIFEST).read_text()),
        str(tmp_path / "plot.png"),
    )
    left, middle, _ = figures[0].axes
    for axes in (left, middle):
        assert axes.get_ylabel() == "share of samples"
        # 1 in train, 1 in validation.
        assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(2)


def test_verify_finds_what_checksums_cannot(made_store, store_copy):
    assert verify(made_store) == []

    def spoil_latents(latents):
        latents[2, 0] = np.nan

    def spoil_tokens(tokens):
        tokens[5] = 40000

    def scale(latents):
        latents[0] *= 2

    def repeat(text):
        offsets = np.load(store_copy / "train" / "text_offsets.npy")
        source = np.load(store_copy / "validation" / "text.npy")
        ends = np.load(store_copy / "validation" / "text_offsets.npy")
        length = int(offsets[1] - offsets[0])
        row = next(row for row in range(len(ends) - 1) if ends[row + 1] - ends[row] <= length)
        text[:length] = ord(" ")
        text[: ends[row + 1] - ends[row]] = source[ends[row] : ends[row + 1]]

    _rewrite(store_copy, "train/text.npy", repeat)
    _rewrite(store_copy, "train/latents.npy", spoil_latents)
    _rewrite(store_copy, "train/tokens.npy", spoil_tokens)
    _rewrite(store_copy, "validation/latents.npy", scale)
    problems = "\n".join(verify(store_copy))
    for words in (
        "NaN or infinite values in 1 row: 2",
        "token ids",
        "norms",
        "in both train and validation",
    ):
        assert words in problems


def test_offsets_that_contradict_the_lengths_are_one_problem_of_several(store_copy, capsys):
    lengths = np.load(store_copy / "train" / "lengths.npy")
    lengths[4] += 1
    np.save(store_copy / "train" / "lengths.npy", lengths)
    assert main(["verify-data", str(store_copy)]) == 1
    shown = capsys.readouterr().out
    assert "lengths.npy" in shown and "validation" in shown


def test_a_split_without_samples_is_reported(made_store, tmp_path, capsys):
    manifest = json.loads((made_store / MANIFEST).read_text())
    shutil.copytree(made_store, tmp_path / "store")
    shutil.rmtree(tmp_path / "store" / "validation")
    split = StoreSplit(
        tmp_path / "store", "validation", [manifest["latent_dim"]],
        manifest["tokenizer"]["vocab_size"],
    )  # fmt: skip
    manifest["splits"]["validation"] = split.close()
    (tmp_path / "store" / MANIFEST).unlink()
    manifest["files"] = list_files(tmp_path / "store")
    (tmp_path / "store" / MANIFEST).write_text(json.dumps(manifest))
    assert main(["verify-data", str(tmp_path / "store"), "--plot", str(tmp_path / "a.png")]) == 1
    assert "no samples" in capsys.readouterr().out
    assert verify(tmp_path / "store") == [f"{tmp_path / 'store' / 'validation'}: no samples"]


@pytest.fixture
def checks() -> dict[str, list[str]]:
    return {name: [] for name in ("latents", "shape", "duplicates")}


def test_leaks_are_counted_by_group_and_by_pixels():
    one = SplitFindings(pixels=np.array([1, 2, 3], np.uint64), groups=np.array([5, 6]))
    other = SplitFindings(pixels=np.array([3, 4], np.uint64), groups=np.array([7]))
    (leak,) = find_leaks(one, other, of_images=True)
    assert "1 images of the same pixels" in leak
    assert len(find_leaks(one, one, of_images=True)) == 2
    assert find_leaks(other, SplitFindings(), of_images=True) == []


def test_repeated_pairs_and_missing_groups_are_named(glyph_store, tmp_path, checks):
    root = shutil.copytree(glyph_store, tmp_path / "s")
    store = Store(root)
    examine_images(store, checks, SplitFindings())
    assert not any(checks.values())
    (root / "train" / "groups.npy").unlink()
    examine_images(Store(root, verify="none"), checks, SplitFindings())
    assert "groups.npy" in checks["shape"][0]


def test_the_sheet_is_drawn(glyph_store, tmp_path):
    write_sheet(str(glyph_store), str(tmp_path / "s.png"), count=8)
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
