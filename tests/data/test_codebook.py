"""Codes: the nearest one, exactly; what is not a code is refused by row; a codebook is known by
its bytes.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mmldlm.data import CODEBOOK
from mmldlm.data.codebook import (
    Codebook,
    CodeStatistics,
    check_ids,
    nearest_codes,
    psnr,
)
from mmldlm.data.image_codec import ImageCodec
from mmldlm.errors import UserError


@pytest.fixture
def codec(tmp_path) -> ImageCodec:
    values = np.random.default_rng(0).integers(0, 256, (30, 48), dtype=np.uint8)
    codebook = Codebook("kmeans", values, tmp_path / CODEBOOK)
    np.save(tmp_path / CODEBOOK, codebook.as_float32())
    return ImageCodec(8, 4, 3, "codes", 4, 1, codebook=codebook)


@pytest.mark.parametrize("width", [3, 48, 300])
def test_the_nearest_code_is_exact_in_blocks_of_any_size(width, monkeypatch):
    rng = np.random.default_rng(width)
    patches, codes = (rng.integers(0, 256, (count, width), dtype=np.uint8) for count in (70, 20))
    codes[7] = codes[3]  # of equal codes the first
    patches[5] = codes[3]
    gaps = ((patches[:, None].astype(np.int64) - codes[None]) ** 2).sum(-1)
    for elements in (1, 64, 1 << 20):
        monkeypatch.setattr("mmldlm.data.codebook._BLOCK_ELEMENTS", elements)
        ids, distances = nearest_codes(patches, codes)
        np.testing.assert_array_equal(ids, gaps.argmin(1))
        np.testing.assert_array_equal(distances, gaps.min(1))


def test_images_of_codes_survive_and_others_become_the_nearest(codec):
    ids = np.random.default_rng(1).integers(0, 30, (9, 4, 1))
    images = codec.decode(ids)
    assert (
        images.shape == (9, 8, 8, 3) and codec.grid == [2, 2] and codec.name == "codes:kmeans:30"
    )
    found = codec.encode(images)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, ids)
    noisy = np.clip(
        images.astype(int) + np.random.default_rng(2).integers(-9, 10, images.shape), 0, 255
    )
    np.testing.assert_array_equal(codec.encode(noisy.astype(np.uint8)), ids)


def test_a_saved_codec_is_the_same_and_another_codebook_is_refused(codec, tmp_path):
    (tmp_path / "kept").mkdir()
    for name, path in codec.files().items():
        shutil.copyfile(path, tmp_path / "kept" / name)
    again = ImageCodec.open(codec.identity, tmp_path / "kept")
    assert again.identity == json.loads(json.dumps(codec.identity))
    np.testing.assert_array_equal(again.codebook.values, codec.codebook.values)
    np.save(tmp_path / "kept" / CODEBOOK, codec.codebook.as_float32()[::-1])
    with pytest.raises(UserError, match="SHA-256"):
        ImageCodec.open(codec.identity, tmp_path / "kept")
    (tmp_path / "kept" / CODEBOOK).unlink()
    with pytest.raises(UserError, match=CODEBOOK):
        ImageCodec.open(codec.identity, tmp_path / "kept")


@pytest.mark.parametrize("wrong", [-1, 30, 2.5, float("nan")])
def test_what_is_no_code_is_refused_by_its_row(codec, wrong):
    ids = np.zeros((5, 4, 1))
    ids[3, 1] = wrong
    with pytest.raises(UserError) as caught:
        codec.decode(ids)
    assert "0 to 29" in caught.value.expected and "rows are 3" in caught.value.fix
    check_ids(np.delete(ids, 3, axis=0), 30)


def test_statistics_are_those_of_the_split(codec):
    statistics, ids = CodeStatistics(codec.codebook), np.array([[0, 0, 1, 2], [0, 0, 0, 1]])
    patches = codec.codebook.values[ids].copy()
    statistics.add(ids[:1], patches[:1])
    statistics.add(ids[1:], patches[1:])
    share = np.array([5, 2, 1]) / 8
    found = statistics.result()
    assert found["psnr"] is None and found["used_codes"] == 3
    assert found["entropy_bits"] == pytest.approx(-(share * np.log2(share)).sum(), abs=1e-3)
    low = np.minimum(patches, 200)
    statistics = CodeStatistics(
        replace(codec.codebook, values=np.minimum(codec.codebook.values, 200) + 10)
    )
    statistics.add(ids, low)
    assert (
        statistics.result()["psnr"]
        == pytest.approx(psnr(100.0, 1))
        == pytest.approx(28.13, abs=0.01)
    )
