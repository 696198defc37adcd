"""Threads: every item once, errors where they belong, none left behind."""

from __future__ import annotations

import threading

import pytest

from mmldlm.checkpoints.io.parallel import run_in_threads
from mmldlm.utils.prefetch import prefetch


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_the_same_items_in_order():
    assert list(prefetch(range(1000), 8)) == list(range(1000)) and list(prefetch([], 8)) == []
    assert not readers()


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
    assert not readers()


def test_an_error_comes_after_the_items_before_it():
    def items():
        yield 1
        yield 2
        raise ValueError("the third")

    got = []
    with pytest.raises(ValueError, match="the third"):
        for item in prefetch(items(), 8):
            got.append(item)
    assert got == [1, 2] and not readers()


def test_an_error_of_the_consumer_ends_the_reader():
    with pytest.raises(KeyError):
        for _ in prefetch(iter(int, 1), 8):  # zeros without end
            raise KeyError
    assert not readers()


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "worker"]


def test_threads_do_every_item_once():
    done = []
    run_in_threads(done.append, range(1000))
    assert sorted(done) == list(range(1000)) and not workers()
    run_in_threads(done.append, [])


@pytest.mark.parametrize("error", [ValueError("the seventh"), StopIteration(), KeyboardInterrupt()])
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
