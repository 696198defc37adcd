"""verify-data on images: damage, leaks and repeats are named, equal captions in a split
are not.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from mmldlm.commands.verify_data import write_sheet
from mmldlm.data.store.store import Store
from mmldlm.data.store.verify_images import ImageFindings, examine_images, image_leaks


@pytest.fixture
def checks() -> dict[str, list[str]]:
    return {name: [] for name in ("latents", "shape", "duplicates")}


def test_leaks_are_counted_by_group_and_by_pixels():
    one = ImageFindings(np.array([1, 2, 3], np.uint64), np.array([5, 6]))
    other = ImageFindings(np.array([3, 4], np.uint64), np.array([7]))
    assert (
        len(image_leaks(one, other)) == 1
        and "1 images of the same pixels" in image_leaks(one, other)[0]
    )
    assert len(image_leaks(one, one)) == 2
    assert image_leaks(other, ImageFindings()) == []


def test_repeated_pairs_and_missing_groups_are_named(glyph_store, tmp_path, checks):
    root = shutil.copytree(glyph_store, tmp_path / "s")
    store = Store(root)
    examine_images(store, checks)
    assert not any(checks.values())
    (root / "train" / "groups.npy").unlink()
    examine_images(Store(root, verify="none"), checks)
    assert "groups.npy" in checks["shape"][0]


def test_the_sheet_is_drawn(glyph_store, tmp_path):
    write_sheet(str(glyph_store), str(tmp_path / "s.png"), count=8)
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
