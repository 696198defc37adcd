"""A file written in any order by threads holds what was written, past the page cache as through it."""

import random
import threading

import numpy as np
import pytest

from mmldlm.checkpoints.io import output_file
from mmldlm.checkpoints.io.output_file import OutputFile

BLOCK = 8192


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(output_file, "DIRECT_BYTES", 0)
    monkeypatch.setattr(output_file, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(output_file, "_pool", output_file._Pool())


def pieces_of(size: int, chooser: random.Random) -> list[tuple[int, int]]:
    ends = sorted({size, *(chooser.randrange(1, size) for _ in range(size // 3000))})
    return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.parametrize("is_flushed", [True, False])
@pytest.mark.parametrize("order", ["forward", "shuffled", "four threads"])
def test_every_byte_arrives(tmp_path, small_blocks, order, is_flushed):
    """Shuffled, more blocks are half full than there is memory for."""
    chooser = random.Random(7)
    size = BLOCK * output_file.MAX_BLOCKS * 3 + 1237
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    pieces = pieces_of(size, chooser)
    if order != "forward":
        chooser.shuffle(pieces)
    file = OutputFile(tmp_path / "out", size, is_flushed)
    if not file.is_direct and is_flushed:
        pytest.skip("this file system is not written past the page cache")
    assert file.is_direct == is_flushed

    def write(mine):
        for first, end in mine:
            file.write(memoryview(data)[first:end], first)

    num = 4 if order == "four threads" else 1
    threads = [threading.Thread(target=write, args=(pieces[start::num],)) for start in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.finish()
    assert (tmp_path / "out").read_bytes() == data


def test_a_small_file_takes_the_page_cache(tmp_path):
    file = OutputFile(tmp_path / "out", 10)
    assert not file.is_direct
    file.write(b"0123456789", 0)
    file.finish()
    assert (tmp_path / "out").read_bytes() == b"0123456789"
    with pytest.raises(FileExistsError):
        OutputFile(tmp_path / "out", 10)


def test_a_conversion_left_half_way_lets_go_of_its_memory(tmp_path, small_blocks):
    file = OutputFile(tmp_path / "out", BLOCK * 5)
    file.write(bytes(100), 0)
    file.close()
    assert output_file._pool._num_taken == 0
