"""One new file of known size, written in any order by several threads; a large one past the page cache.

Whatever is written must be on the disk before a conversion is whole. Through the page cache every byte takes a page
first, and once gigabytes of them are dirty the disk decides the pace; written directly (O_DIRECT) it goes there at
once, several times as fast, and a login node's cache stays with its other users. Direct writes need aligned blocks, so
bytes are gathered in such first. Below DIRECT_BYTES the page cache is as fast.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path

from mmldlm.checkpoints.formats.torch_save.reader import raise_file_limit
from mmldlm.checkpoints.io.parallel import WRITEBACK_BYTES, find_function, preallocate, start_writeback
from mmldlm.checkpoints.late_numpy import np

DIRECT_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 16  # of all files together; more half-filled ones than that go through the page cache
_SECTOR = 4096
# Where a direct write is neither slower nor refused: ext2 to 4, xfs. Network file systems gather writes in the cache.
_LOCAL = (0xEF53, 0x58465342)

_fstatfs = find_function("fstatfs", ctypes.c_int, ctypes.c_void_p)


class _Pool:
    """Aligned memory that blocks take turns in: new pages for every block would cost as much as writing it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []
        self._num_taken = 0

    def take(self) -> np.ndarray | None:
        """A block's memory; None where all of it is in use."""
        with self._lock:
            if self._num_taken == MAX_BLOCKS:
                return None
            self._num_taken += 1
            # A mapping starts at a page, which bytes of Python or numpy do not.
            return self._free.pop() if self._free else np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)

    def give(self, memory: np.ndarray) -> None:
        with self._lock:
            self._num_taken -= 1
            self._free.append(memory)
            if not self._num_taken:
                del self._free[2:]  # nobody is writing: a process that lives on should not keep it


_pool = _Pool()


class _Block:
    """Bytes of one aligned block of a file, as far as they have come."""

    def __init__(self, memory: np.ndarray):
        self.memory = memory
        self.ranges: list[tuple[int, int]] = []  # first byte, end
        self.num_writing = 0

    @property
    def num_bytes(self) -> int:
        return sum(end - first for first, end in self.ranges)


class OutputFile:
    """Creates `path`, which must not exist, with room for `size` bytes. Every byte must be written exactly once.

    Args:
        is_flushed: see to it that it is on the disk when finish() returns.

    Raises:
        OSError: no space for the whole file (reserved at once where the file system can), or a failed write.
    """

    def __init__(self, path: Path, size: int, is_flushed: bool = True):
        self._size, self._is_flushed = size, is_flushed
        self._lock = threading.Lock()
        self._blocks: dict[int, _Block] = {}
        self._cached: set[int] = set()  # blocks that go through the page cache
        self._unsent = 0
        self._direct = -1
        self._fd = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            preallocate(self._fd, size)
            if is_flushed and size >= max(DIRECT_BYTES, 2 * BLOCK_BYTES) and _is_local(self._fd):
                self._direct = _open_direct(path)
        except BaseException:
            self.close()
            raise

    def write(self, data: bytes | memoryview, position: int) -> None:
        """Writes bytes at `position`. Several threads may."""
        view = memoryview(data)
        if self._direct < 0:
            self._write_cached(view, position)
            return
        while view:
            number, offset = divmod(position, BLOCK_BYTES)
            piece = view[: BLOCK_BYTES - offset]
            self._fill(number, offset, piece)
            view, position = view[len(piece) :], position + len(piece)

    @property
    def is_direct(self) -> bool:
        """Whether it is written past the page cache."""
        return self._direct >= 0

    def finish(self) -> None:
        """Closes, flushed to the disk if it should be."""
        while self._blocks:
            self._send_cached(*self._blocks.popitem())
        if self._is_flushed:
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Lets go of everything; the file is whole only after finish()."""
        for block in self._blocks.values():
            _pool.give(block.memory)
        self._blocks.clear()
        for fd in (self._direct, self._fd):
            if fd >= 0:
                os.close(fd)
        self._direct = self._fd = -1

    # -- blocks -----------------------------------------------------------------------------------------------------

    def _fill(self, number: int, offset: int, piece: memoryview) -> None:
        block, full = self._block(number), None
        if block is None:
            self._write_cached(piece, number * BLOCK_BYTES + offset)
            return
        end = offset + len(piece)
        block.memory[offset:end] = np.frombuffer(piece, np.uint8)  # lets go of Python's lock, unlike memoryview
        with self._lock:
            block.num_writing -= 1
            block.ranges.append((offset, end))
            if block.num_bytes == min(BLOCK_BYTES, self._size - number * BLOCK_BYTES):
                full = self._blocks.pop(number)
        if full is not None:
            self._send(number, full)

    def _block(self, number: int) -> _Block | None:
        """The block to fill, which nobody takes away meanwhile; None: write through the page cache."""
        evicted = None
        with self._lock:
            if number in self._cached:
                return None
            block = self._blocks.get(number)
            if block is None:
                memory = _pool.take()
                if memory is None:
                    # The one that has waited longest: what is missing of it will not come soon.
                    at = next((at for at, other in self._blocks.items() if not other.num_writing), None)
                    if at is None:
                        self._cached.add(number)
                        return None
                    evicted = at, self._blocks.pop(at)
                    self._cached.add(at)
                    self._cached.add(number)
                else:
                    block = self._blocks[number] = _Block(memory)
            if block is not None:
                block.num_writing += 1
        if evicted is not None:
            self._send_cached(*evicted)
        return block

    def _send(self, number: int, block: _Block) -> None:
        """Writes a full block; the last one of a file ends where it must, the others are whole sectors."""
        position, count = number * BLOCK_BYTES, block.num_bytes
        done, whole = 0, count // _SECTOR * _SECTOR
        view = memoryview(block.memory)
        try:
            while done < whole and done % _SECTOR == 0:
                done += os.pwrite(self._direct, view[done:whole], position + done)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: not as aligned as this disk wants it
                _pool.give(block.memory)
                raise
        try:
            self._write_cached(view[done:count], position + done)
        finally:
            _pool.give(block.memory)

    def _send_cached(self, number: int, block: _Block) -> None:
        try:
            for first, end in block.ranges:
                self._write_cached(memoryview(block.memory)[first:end], number * BLOCK_BYTES + first)
        finally:
            _pool.give(block.memory)

    def _write_cached(self, view: memoryview, position: int) -> None:
        self._unsent += len(view)
        while view:
            done = os.pwrite(self._fd, view, position)
            view, position = view[done:], position + done
        if self._is_flushed and self._unsent >= WRITEBACK_BYTES:
            self._unsent = 0
            start_writeback(self._fd)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        raise_file_limit(error)
        return os.open(path, flags, 0o644)


def _open_direct(path: Path) -> int:
    """A second descriptor for direct writes; -1 where the file system has none."""
    flag = getattr(os, "O_DIRECT", None)
    try:
        return -1 if flag is None else _open(path, os.O_WRONLY | flag)
    except OSError:
        return -1


def _is_local(fd: int) -> bool:
    if _fstatfs is None:
        return False
    answer = ctypes.create_string_buffer(512)
    return _fstatfs(fd, answer) == 0 and ctypes.cast(answer, ctypes.POINTER(ctypes.c_long))[0] in _LOCAL
