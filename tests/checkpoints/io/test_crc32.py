"""The CRC of a whole from pieces that come in any order, from several threads, twice, or not at
all.
"""

from __future__ import annotations

import random
import zlib

import pytest

from mmldlm.checkpoints.io.crc32 import RangedCrc32, combine
from mmldlm.checkpoints.io.parallel import run_in_threads

DATA = random.Random(3).randbytes(100_000)


@pytest.mark.parametrize("cut", [0, 1, 7, 4096, 99_999, 100_000])
def test_combine_is_the_crc_of_both(cut):
    first, second = DATA[:cut], DATA[cut:]
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(DATA)


def pieces(seed: int) -> list[tuple[int, int]]:
    chooser = random.Random(seed)
    cuts = sorted({0, len(DATA), *(chooser.randrange(len(DATA)) for _ in range(200))})
    found = list(zip(cuts, cuts[1:]))
    chooser.shuffle(found)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_pieces_in_any_order(seed):
    runs = RangedCrc32()
    run_in_threads(lambda piece: runs.add(piece[0], DATA[piece[0] : piece[1]]), pieces(seed))
    assert runs.gaps(len(DATA)) == [] and runs.value() == (len(DATA), zlib.crc32(DATA))


def test_what_is_missing_is_told_and_can_be_added():
    runs = RangedCrc32()
    for start, end in ((10, 30), (50, 60), (30, 40)):
        runs.add(start, DATA[start:end])
    assert runs.gaps(100) == [(0, 10), (40, 50), (60, 100)] and runs.value() == (0, 0)
    for start, end in runs.gaps(100):
        runs.add(start, DATA[start:end])
    assert runs.gaps(100) == [] and runs.value() == (100, zlib.crc32(DATA[:100]))


def test_bytes_that_come_twice_count_once():
    runs = RangedCrc32()
    for start, end in ((0, 50), (20, 30), (0, 50), (50, 80), (40, 70)):
        runs.add(start, DATA[start:end])
    assert runs.gaps(80) == [] and runs.value() == (80, zlib.crc32(DATA[:80]))
    runs.add(70, DATA[70:100])  # overlaps what is there: its own end is a gap, to be read again
    for start, end in runs.gaps(100):
        runs.add(start, DATA[start:end])
    assert runs.value() == (100, zlib.crc32(DATA[:100]))
