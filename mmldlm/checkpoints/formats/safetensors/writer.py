"""Write a safetensors file in pieces of tensors, in bounded memory.

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length,
a JSON header, then the tensors without gaps. safetensors' own save_file needs every tensor in
memory at once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path

from mmldlm.checkpoints.formats.dtypes import DTYPES, nbytes
from mmldlm.checkpoints.io.output_file import OutputFile
from mmldlm.errors import UserError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
METADATA_KEY = "__metadata__"  # the entry of the header that is no tensor


class SafetensorsWriter:
    """Write a new file, in any order.

    Args:
        path: the file to create; it must not exist.
        tensors: (name, dtype name, shape) of every tensor. Wide elements are laid out first, so
            that every tensor starts at a multiple of its element size, as readers that map the
            file expect; otherwise in this order.
        metadata: strings for the header's `__metadata__`.
        fsync: flush it to the disk in finish().

    Raises:
        UserError: a name that the format reserves. OSError: no space for the complete file, or a
            failed write.
    """

    def __init__(
        self,
        path: Path,
        tensors: Iterable[tuple[str, str, tuple[int, ...]]],
        metadata: dict[str, str],
        fsync: bool = True,
    ):
        self.path = path
        header: dict[str, object] = {METADATA_KEY: metadata}
        self._spans: dict[str, tuple[int, int]] = {}  # name -> first byte, end
        self._missing: dict[str, int] = {}
        self._lock = threading.Lock()
        position = 0
        for name, dtype, shape in sorted(tensors, key=lambda item: -DTYPES[item[1]].itemsize):
            if name == METADATA_KEY:
                found = f"a tensor named {name!r}, which the format uses for something else"
                raise UserError(
                    f"names that safetensors can hold in {path.name}",
                    found,
                    "convert with --to model.pt",
                )
            count = nbytes(shape, dtype)
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
            raise ValueError(
                f"a header of {len(text)} bytes, safetensors allows {MAX_HEADER_BYTES}"
            )
        self._base = 8 + len(text)
        self.total_bytes = self._base + position
        self._file = OutputFile(path, self.total_bytes, fsync)
        try:
            self._file.write(len(text).to_bytes(8, "little") + text, 0)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, position: int, view: memoryview) -> None:
        """Write bytes of tensor `name` from its byte `position` on. Thread-safe."""
        first, end = self._spans[name]
        assert first + position + len(view) <= end, f"more bytes for {name} than its shape holds"
        self._file.write(view, self._base + first + position)
        with self._lock:
            self._missing[name] -= len(view)

    def finish(self) -> None:
        """Flush to the disk, if requested, and close. Every tensor must be complete."""
        short = [name for name, count in self._missing.items() if count]
        assert not short, f"unfinished tensors: {short[:3]}"
        self._file.finish()

    def close(self) -> None:
        """Close the file, complete or not."""
        self._file.close()
