"""Writing one safetensors file tensor by tensor, so that no tensor need ever be whole in memory.

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON header,
then the tensors without gaps. safetensors' own save_file wants every tensor in memory at once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path

from mmldlm.checkpoints.formats.dtypes import DTYPES
from mmldlm.checkpoints.io.output_file import OutputFile

MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class SafetensorsWriter:
    """Writes `path`, pre-sized, with tensors in any order of writing.

    Args:
        path: the file to create; it must not exist.
        tensors: (name, dtype name, shape) of every tensor. Wide elements are laid out first, so that every tensor
            starts at a multiple of its element size, as readers that map the file expect; otherwise in this order.
        metadata: strings for the header's `__metadata__`.
        is_flushed: see to it that it is on the disk when finish() returns.

    Raises:
        OSError: no space for the whole file (reserved at once where the file system can), or a failed write.
    """

    def __init__(
        self,
        path: Path,
        tensors: Iterable[tuple[str, str, tuple[int, ...]]],
        metadata: dict[str, str],
        is_flushed: bool = True,
    ):
        self.path = path
        header: dict[str, object] = {"__metadata__": metadata}
        self._spans: dict[str, tuple[int, int]] = {}  # name -> first byte, end
        self._missing: dict[str, int] = {}
        self._lock = threading.Lock()
        position = 0
        for name, dtype, shape in sorted(tensors, key=lambda item: -DTYPES[item[1]].itemsize):
            count = DTYPES[dtype].itemsize
            for size in shape:
                count *= size
            header[name] = {
                "dtype": DTYPES[dtype].safetensors,
                "shape": list(shape),
                "data_offsets": [position, position + count],
            }
            self._spans[name], self._missing[name] = (position, position + count), count
            position += count
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(text)} bytes, safetensors allows {MAX_HEADER_BYTES}")
        self._base = 8 + len(text)
        self.total_bytes = self._base + position
        self._file = OutputFile(path, self.total_bytes, is_flushed)
        try:
            self._file.write(len(text).to_bytes(8, "little") + text, 0)
        except BaseException:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        """Whether the file is written past the page cache."""
        return self._file.is_direct

    def write(self, name: str, position: int, view: memoryview) -> None:
        """Writes bytes of tensor `name`, from its byte `position` on. Several threads may write at once."""
        first, end = self._spans[name]
        assert first + position + len(view) <= end, f"more bytes for {name} than its shape holds"
        self._file.write(view, self._base + first + position)
        with self._lock:
            self._missing[name] -= len(view)

    def finish(self) -> None:
        """Flushes to the disk, if it should, and closes. Every tensor must be complete by now."""
        short = [name for name, count in self._missing.items() if count]
        assert not short, f"unfinished tensors: {short[:3]}"
        self._file.finish()

    def close(self) -> None:
        self._file.close()
