"""Batches made ahead: the same ones in the same order, errors where they are waited for, no thread left behind."""

from __future__ import annotations

import sys
import threading

import pytest

from mmldlm.data.batching.loader import prefetch
from tests.helpers import launch


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def test_same_items_same_order():
    assert list(prefetch(range(100), 4)) == list(range(100)) and not _threads()


def test_no_further_ahead_than_asked_for():
    made, go = [], threading.Semaphore(0)

    def items():
        for number in range(50):
            made.append(number)
            go.release()
            yield number

    batches = prefetch(items(), 3)
    assert next(batches) == 0
    for _ in range(5):  # one taken, three waiting, one in the thread's hand
        assert go.acquire(timeout=10)
    assert not go.acquire(timeout=0.3) and made == [0, 1, 2, 3, 4]
    batches.close()
    assert not _threads()


def test_an_error_comes_in_its_turn():
    def items():
        yield 1
        raise ValueError("a bad batch")

    batches = prefetch(items(), 4)
    assert next(batches) == 1
    with pytest.raises(ValueError, match="a bad batch"):
        next(batches)
    assert not _threads()


def test_workers_that_ignore_signals_do_not_outlive_the_run():
    """After an error the stream may still be held when Python ends, and multiprocessing waits for its children."""
    code = (
        "from mmldlm.data.batching.loader import MicroBatches, iterate_steps\n"
        "MicroBatches.__getitem__ = lambda self, item: item\n"
        "stream = iterate_steps(MicroBatches(*[None] * 5, accum=1), 0, 100, num_workers=1)\n"
        "held = [stream, next(stream)]\n"
        "held.append(held)\n"
        "import atexit, sys\n"
        "atexit._run_exitfuncs()\n"  # what train.end_process does while the stream lives
        "print('ended')"
    )
    assert "ended" in launch([sys.executable, "-c", code], timeout=60).stdout
