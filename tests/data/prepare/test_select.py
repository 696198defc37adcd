"""Groups and splits of images: what joins them, what may be held out, and an order that captions
do not decide.
"""

from __future__ import annotations

import numpy as np

from mmldlm.data.prepare.select import (
    caption_hashes,
    join_groups,
    order_hashes,
    split_groups,
)


def test_a_group_reaches_through_others_and_none_joins_nothing():
    assert join_groups([1, 2, 2, 3, 4], [None, "a", "b", "b", None]).tolist() == [0, 1, 1, 1, 2]


def test_only_eligible_groups_are_held_out_and_keep_every_word_in_training():
    captions = [
        f"{thing} {tone}" for thing in "abcdefghij" for tone in ("plain", "dark", "light")
    ] + ["rare dark"]
    eligible = np.array(["plain" not in caption for caption in captions])
    groups = np.arange(len(captions))
    groups[1] = groups[0]  # one picture for two captions, of which one may not be held out
    words = [caption.split() for caption in captions]
    inside = split_groups(groups, caption_hashes(captions), None, 0.3, 0, words, eligible)
    held = [caption for caption, own in zip(captions, inside) if own]
    assert len(held) == round(0.3 * eligible.sum()) and not any(
        "plain" in caption for caption in held
    )
    assert "a dark" not in held and "rare dark" not in held
    assert {word for caption in held for word in caption.split()} <= {
        word for caption, own in zip(words, inside) if not own for word in caption
    }


def test_repeated_captions_are_ordered_by_the_names_of_their_images():
    captions = ["cat", "dog", "cat"]
    hashes = caption_hashes(captions)
    found = order_hashes(captions, hashes, ["1.png", "2.png", "3.png"])
    assert found[1] == hashes[1] and len(set(found.tolist())) == 3
    again = order_hashes(
        ["cat", "owl", "cat"], caption_hashes(["cat", "owl", "cat"]), ["3.png", "4.png", "1.png"]
    )
    # Whatever their order and their neighbors.
    assert again[[2, 0]].tolist() == found[[0, 2]].tolist()
