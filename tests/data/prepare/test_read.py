"""Reading: any number of units in few open files."""

from __future__ import annotations

import os
import resource

import pytest

from mmldlm.data.corpora.text_files import ReadUnit
from mmldlm.data.prepare.read import TextShards, read_unit


@pytest.fixture
def few_open_files():
    """Leave room for 64 more files than are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))
    for descriptor in free:
        os.close(descriptor)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_corpus_may_have_more_units_than_a_process_may_open_files(tmp_path, few_open_files):
    folders = [tmp_path / f"{number:03}" for number in range(100)]
    for number, folder in enumerate(folders):
        # Every third unit has no text.
        texts = [f"{number} one", f"{number} two"] * bool(number % 3)
        read_unit(ReadUnit(folder.name, lambda counts, texts=texts: iter(texts)), folder)
    shards = TextShards(folders)
    expected = [f"{n} {word}" for n in range(100) if n % 3 for word in ("one", "two")]
    assert shards.get(range(len(shards))) == expected
    assert shards.get(range(len(shards) - 1, -1, -1)) == expected[::-1]
