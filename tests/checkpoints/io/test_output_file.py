"""A file written in any order by threads holds what was written."""

import errno
import os
import random

import numpy as np
import pytest

from mmldlm.checkpoints.io.output_file import OutputFile
from mmldlm.checkpoints.io.parallel import run_in_threads

SIZE = 400_003


@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("order", ["forward", "shuffled", "threads"])
def test_every_byte_is_written(tmp_path, order, fsync):
    chooser = random.Random(7)
    data = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()
    ends = sorted({SIZE, *(chooser.randrange(1, SIZE) for _ in range(130))})
    pieces = list(zip([0, *ends[:-1]], ends, strict=True))
    if order != "forward":
        chooser.shuffle(pieces)
    file = OutputFile(tmp_path / "out", SIZE, fsync)

    def write(piece):
        file.write(memoryview(data)[piece[0] : piece[1]], piece[0])

    run_in_threads(write, pieces) if order == "threads" else [write(piece) for piece in pieces]
    file.finish()
    assert (tmp_path / "out").read_bytes() == data


@pytest.mark.parametrize("fsync", [True, False])
def test_fsync_only_on_request(tmp_path, monkeypatch, fsync):
    calls = []
    monkeypatch.setattr(os, "fsync", calls.append)
    file = OutputFile(tmp_path / "out", 10, fsync)
    file.write(b"0123456789", 0)
    assert not calls
    file.finish()
    assert len(calls) == fsync and (tmp_path / "out").read_bytes() == b"0123456789"


def test_an_existing_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("kept")
    with pytest.raises(FileExistsError):
        OutputFile(tmp_path / "out", 10)
    assert (tmp_path / "out").read_text() == "kept"


def test_a_full_disk_is_reported_at_once(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        OutputFile(tmp_path / "out", 10)


def test_no_preallocation_makes_a_sparse_file(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    file = OutputFile(tmp_path / "out", 10)
    file.write(b"9", 9)
    file.finish()
    assert (tmp_path / "out").read_bytes() == bytes(9) + b"9"


def test_close_twice(tmp_path):
    file = OutputFile(tmp_path / "out", 10)
    file.close()
    file.close()
