"""Threads that read, check and write chunks, and the allocator settings for them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from mmldlm.utils.resources import available_cpus

T = TypeVar("T")
# More threads only help a remote file system, and each of them holds several chunks.
_NUM_WORKERS = max(2, min(4, available_cpus()))


def run_in_threads(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Call work(item) for every item, started in order, a few at a time.

    Reading, CRCs, numpy and writing release the GIL; one thread per chunk keeps the chunk in its
    processor's cache.

    Raises:
        BaseException: the first exception of `work` or `items`, after all threads have stopped.
    """
    lock, remaining = threading.Lock(), iter(items)
    errors: list[BaseException] = []
    end: Any = object()

    def loop() -> None:
        while not errors:
            try:
                with lock:
                    item = next(remaining, end)
                if item is end:
                    return
                work(item)
            except BaseException as error:  # re-raised by the calling thread
                errors.append(error)

    threads = [
        threading.Thread(target=loop, name="worker", daemon=True) for _ in range(_NUM_WORKERS - 1)
    ]
    for thread in threads:
        thread.start()
    loop()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def raise_malloc_thresholds() -> None:
    """Keep up to 256 MiB of freed memory in this process instead of returning it to the kernel;
    glibc only.

    Chunks are allocated by the ten thousand, and fresh pages would cost more time than reading
    them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, its maximum
    mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD
