"""The prefetch thread: items in order, errors re-raised by the consumer, no thread left."""

from __future__ import annotations

import threading

import pytest

from mmldlm.utils.prefetch import prefetch


def prefetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_the_same_items_in_order():
    assert list(prefetch(range(1000), 8)) == list(range(1000)) and list(prefetch([], 8)) == []
    assert not prefetchers()


def test_it_runs_ahead_but_not_without_bound():
    seen = []

    def items():
        for number in range(100):
            seen.append(number)
            yield number

    stream = prefetch(items(), 8)
    assert next(stream) == 0
    deadline = threading.Event()
    while len(seen) < 9 and not deadline.wait(0.01):
        pass
    deadline.wait(0.05)
    assert 9 <= len(seen) <= 11
    stream.close()
    assert not prefetchers()


def test_an_error_comes_after_the_items_before_it():
    def items():
        yield 1
        yield 2
        raise ValueError("the third")

    got = []
    with pytest.raises(ValueError, match="the third"):
        for item in prefetch(items(), 8):
            got.append(item)
    assert got == [1, 2] and not prefetchers()


def test_an_error_of_the_consumer_ends_the_thread():
    with pytest.raises(KeyError):
        for _ in prefetch(iter(int, 1), 8):  # zeros without end
            raise KeyError
    assert not prefetchers()
