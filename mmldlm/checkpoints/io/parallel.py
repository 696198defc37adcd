"""Reading, writing and the disk at the same time: threads, space reserved at once, write-back that starts early."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_DEPTH = 8  # chunks of CHUNK_BYTES that wait between the two threads
_SYNC_FILE_RANGE_WRITE = 2
WRITEBACK_BYTES = 32 << 20
# More than a few only help a file system far away, and each holds some chunks.
_WORKERS = max(2, min(4, os.cpu_count() or 1))
# Who writes past the page cache waits for the disk; with four, two cores still have work meanwhile (1,000M parameters:
# 3.4 s instead of 4.1).
_DIRECT_WORKERS = 4
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Gives `items` in order, which a thread of its own works out a few ahead.

    Reading, CRCs and numpy let go of Python's lock, so this uses a second core. An exception in the thread is raised
    here, after the items before it; leaving early ends the thread.
    """
    waiting: queue.Queue[tuple[str, Any]] = queue.Queue(_DEPTH)
    stopped = threading.Event()

    def work() -> None:
        try:
            for item in items:
                waiting.put(("item", item))
                if stopped.is_set():
                    return
            waiting.put(("end", None))
        except BaseException as error:  # whatever it is, it belongs to the thread that asked
            waiting.put(("error", error))

    thread = threading.Thread(target=work, name="reader", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = waiting.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stopped.set()
        while thread.is_alive():  # it may wait for room
            try:
                waiting.get(timeout=0.01)
            except queue.Empty:
                pass
        thread.join()


def run_in_threads(work: Callable[[T], None], items: Iterable[T], is_direct: bool = False) -> None:
    """Calls work(item) for all items, in their order but a few at a time; is_direct: it writes past the page cache.

    Reading, CRCs, numpy and writing let go of Python's lock; and one thread that does all of it to a chunk finds it in
    its processor's cache. The first exception of any is raised when all threads have stopped, and ends the rest.
    """
    lock, waiting = threading.Lock(), iter(items)
    failures: list[BaseException] = []
    ended: Any = object()

    def loop() -> None:
        while not failures:
            try:
                with lock:
                    item = next(waiting, ended)
                if item is ended:
                    return
                work(item)
            except BaseException as error:  # whatever it is, it belongs to the thread that asked
                failures.append(error)

    count = max(_DIRECT_WORKERS, _WORKERS) if is_direct else _WORKERS
    threads = [threading.Thread(target=loop, name="worker", daemon=True) for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    loop()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def find_function(name: str, *types: Any) -> Any:
    """A function of the C library that Python does not offer; None where the system has no such."""
    try:
        function = ctypes.CDLL(None, use_errno=True)[name]
    except (AttributeError, OSError):  # only Linux has them
        return None
    function.argtypes = types
    return function


_mallopt = find_function("mallopt", ctypes.c_int, ctypes.c_int)
_sync_file_range = find_function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_syncfs = find_function("syncfs", ctypes.c_int)


def raise_malloc_thresholds() -> None:
    """Lets this process keep the memory it frees, up to 256 MiB, instead of giving it back to the kernel at once.

    Chunks come and go by the ten thousand, and each would be new pages that the kernel fills with zeros: at 1,000M
    parameters 1.8 million page faults, 40 % of the time. Without glibc nothing happens.
    """
    if _mallopt is not None:
        _mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its largest
        _mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD


def start_writeback(fd: int) -> None:
    """Asks the kernel to write a file's dirty pages to the disk now, without waiting: the fsync at the end is short.

    A hint: where there is no such call, or it fails, the fsync does all of it and reports what is wrong.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


def preallocate(fd: int, size: int) -> None:
    """Reserves a new file's space at once; a sparse file of that size where the file system cannot.

    Raises:
        OSError: the disk has no room for it.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) in _NO_SPACE:
            raise
        os.truncate(fd, size)


def sync_file_system(folder: os.PathLike) -> bool:
    """Flushes all of a folder's file system to the disk; False where there is no such call.

    Raises:
        OSError: it could not be written.
    """
    if _syncfs is None:
        return False
    fd = os.open(folder, os.O_RDONLY)
    try:
        if _syncfs(fd):
            raise OSError(ctypes.get_errno(), f"syncfs of {folder}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)
    return True
