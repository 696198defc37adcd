"""The CRC of a whole from pieces that come in any order, from several threads, twice, or not at
all.

A file written in any order by threads holds what was written.

Threads: every item once, errors re-raised by the caller, no thread left.
"""

from __future__ import annotations

import random
import threading
import zlib

import numpy as np
import pytest

from mmldlm.checkpoints.files.file_io import OutputFile, RangedCrc32, combine, run_in_threads

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


def test_missing_ranges_are_reported_and_can_be_added():
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


SIZE = 400_003


@pytest.mark.parametrize("order", ["forward", "shuffled", "threads"])
def test_every_byte_is_written(tmp_path, order):
    chooser = random.Random(7)
    data = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()
    ends = sorted({SIZE, *(chooser.randrange(1, SIZE) for _ in range(130))})
    pieces = list(zip([0, *ends[:-1]], ends, strict=True))
    if order != "forward":
        chooser.shuffle(pieces)
    file = OutputFile(tmp_path / "out", SIZE)

    def write(piece):
        file.write(memoryview(data)[piece[0] : piece[1]], piece[0])

    run_in_threads(write, pieces) if order == "threads" else [write(piece) for piece in pieces]
    file.close()
    assert (tmp_path / "out").read_bytes() == data


def test_an_existing_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("kept")
    with pytest.raises(FileExistsError):
        OutputFile(tmp_path / "out", 10)
    assert (tmp_path / "out").read_text() == "kept"


def test_a_new_file_takes_no_space_before_it_is_written(tmp_path):
    """Where a file system cannot reserve space, glibc writes to every block of the file."""
    OutputFile(tmp_path / "large", 1 << 30).close()
    assert (tmp_path / "large").stat().st_blocks < 100
    file = OutputFile(tmp_path / "out", 10)
    file.write(b"9", 9)
    file.close()
    assert (tmp_path / "out").read_bytes() == bytes(9) + b"9"


def test_close_twice(tmp_path):
    file = OutputFile(tmp_path / "out", 10)
    file.close()
    file.close()


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "worker"]


def test_threads_do_every_item_once():
    done = []
    run_in_threads(done.append, range(1000))
    assert sorted(done) == list(range(1000)) and not workers()
    run_in_threads(done.append, [])


@pytest.mark.parametrize(
    "error", [ValueError("the seventh"), StopIteration(), KeyboardInterrupt()]
)
def test_the_first_error_ends_all_threads(error):
    done = []

    def work(number: int) -> None:
        if number == 7:
            raise error
        done.append(number)

    with pytest.raises(type(error)):
        run_in_threads(work, iter(range(10**9)))
    assert len(done) < 10**6 and not workers()


def test_an_error_of_the_items_is_raised():
    def items():
        yield 1
        raise UserWarning("no more")

    done = []
    with pytest.raises(UserWarning, match="no more"):
        run_in_threads(done.append, items())
    assert done == [1] and not workers()
