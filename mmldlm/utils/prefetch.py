"""Compute the items of an iterable ahead of its consumer, in one thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetch(
    items: Iterable[T],
    depth: int,
    *,
    on_start: Callable[[], None] | None = None,
) -> Iterator[T]:
    """Yield the items in order while a thread computes up to `depth` of them ahead.

    An exception of the iterable is raised here after the items before it. Closing the iterator
    ends the thread.

    Args:
        items: Items, which the thread consumes.
        depth: Largest number of items that wait for the consumer.
        on_start: Function called first in the thread, for example to select a CUDA device.
    """
    ready: queue.Queue[tuple[str, object]] = queue.Queue(depth)
    stop = threading.Event()

    def put(kind: str, value: object) -> None:
        while not stop.is_set():
            try:
                return ready.put((kind, value), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            if on_start is not None:
                on_start()
            for item in items:
                put("item", item)
                if stop.is_set():
                    return
            put("end", None)
        except BaseException as error:  # re-raised by the consumer
            put("error", error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value  # type: ignore[misc]
            if kind == "end":
                return
            yield value  # type: ignore[misc]
    finally:  # also when the consumer drops the iterator
        stop.set()
        thread.join()
