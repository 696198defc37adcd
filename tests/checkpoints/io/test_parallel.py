"""Threads: every item once, errors re-raised by the caller, no thread left."""

from __future__ import annotations

import threading

import pytest

from mmldlm.checkpoints.io.parallel import run_in_threads


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
