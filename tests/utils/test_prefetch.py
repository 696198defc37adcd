"""Prefetched items: the same ones in the same order, errors in their turn, no thread left
behind.
"""

from __future__ import annotations

import threading

import pytest

from mmldlm.utils.prefetch import prefetch


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_same_items_same_order():
    assert list(prefetch(range(100), 4)) == list(range(100)) and not _threads()


def test_at_most_depth_items_ahead():
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


def test_error_is_raised_in_its_turn():
    def items():
        yield 1
        raise ValueError("a bad batch")

    batches = prefetch(items(), 4)
    assert next(batches) == 1
    with pytest.raises(ValueError, match="a bad batch"):
        next(batches)
    assert not _threads()


def test_all_items_before_an_error_arrive():
    def items():
        yield 1
        yield 2
        raise ValueError("the third")

    received = []
    with pytest.raises(ValueError, match="the third"):
        for item in prefetch(items(), 8):
            received.append(item)
    assert received == [1, 2] and not _threads()


def test_an_error_of_the_consumer_ends_the_thread():
    with pytest.raises(KeyError):
        for _ in prefetch(iter(int, 1), 8):  # zeros without end
            raise KeyError
    assert list(prefetch([], 8)) == [] and not _threads()
