"""Reading, writing and the disk at the same time: a reader one step ahead, and write-back that starts early."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_DEPTH = 8  # chunks of CHUNK_BYTES that wait between the two threads
_SYNC_FILE_RANGE_WRITE = 2
WRITEBACK_BYTES = 32 << 20


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


def _find_sync_file_range():
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):  # only Linux has it
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _find_sync_file_range()


def start_writeback(fd: int) -> None:
    """Asks the kernel to write a file's dirty pages to the disk now, without waiting: the fsync at the end is short.

    A hint: where there is no such call, or it fails, the fsync does all of it and reports what is wrong.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)
