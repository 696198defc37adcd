"""What every readable source of weights offers the converter: named tensors in chunks, checked on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmldlm.checkpoints.dtypes import DTYPES, bf16_to_fp32, cast, nonfinite_count
from mmldlm.checkpoints.torch_file import CHUNK_BYTES, TorchFile
from mmldlm.checkpoints.zero_pickle import TensorRef
from mmldlm.errors import UserError

# trainable: given as its fp32 master. frozen, buffer: in their stored dtype. parameter: the file does not say which.
# alias: another name of a tensor that is stored once (tied weights).
KINDS = ("trainable", "frozen", "buffer", "parameter", "alias")


@dataclass(frozen=True)
class TensorInfo:
    """One named tensor. `dtype` is what read() gives; `alias_of` names the stored tensor of an alias."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    alias_of: str | None = None

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Part:
    """`count` consecutive elements of a flat tensor, found from element `start` of a tensor in a file."""

    file: TorchFile
    ref: TensorRef
    start: int
    count: int


def read_parts(parts: list[Part], start: int, count: int) -> np.ndarray:
    """Elements [start, start + count) of the concatenation of `parts`, which all have one dtype."""
    pieces = []
    position = 0
    for part in parts:
        low, high = max(start, position), min(start + count, position + part.count)
        if low < high:
            pieces.append(part.file.read_elements(part.ref, part.start + low - position, high - low))
        position += part.count
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, DTYPES[parts[0].ref.dtype].raw)


class WeightSource:
    """Base of ZeroCheckpoint and ModelFile. Subclasses fill the fields; reading is here.

    Attributes:
        path: what was opened.
        engine: "deepspeed" or "model.pt".
        stage, world_size, step: None where the source does not record them.
        tensors: name -> TensorInfo, in the order of the model's state_dict; aliases included.
        notes: facts a user should see (tensors of the checkpoint that are not weights, ...).
    """

    engine = ""

    def __init__(self, path: Path, allow_nonfinite: bool = False):
        self.path = path
        self.allow_nonfinite = allow_nonfinite
        self.stage: int | None = None
        self.world_size: int | None = None
        self.step: int | None = None
        self.tensors: dict[str, TensorInfo] = {}
        self.notes: list[str] = []
        self.files: list[TorchFile] = []
        self._parts: dict[str, list[Part]] = {}
        # The low-precision copy that training computed with; it must be the rounded master.
        self._mirrors: dict[str, list[Part]] = {}

    # -- life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- reading --------------------------------------------------------------------------------------------------

    def reading_order(self) -> list[str]:
        """Stored names in the order in which their bytes lie in the files, so that reading is one sweep."""

        rank = {id(file): number for number, file in enumerate(self.files)}

        def place(name: str) -> tuple[int, int]:
            first = self._parts[name][0]
            offset = (first.ref.offset + first.start) * DTYPES[first.ref.dtype].itemsize
            return rank[id(first.file)], first.file.records[f"data/{first.ref.key}"].start + offset

        stored = [name for name, info in self.tensors.items() if info.kind != "alias" and self._parts[name]]
        empty = [name for name, info in self.tensors.items() if info.kind != "alias" and not self._parts[name]]
        return sorted(stored, key=place) + empty

    def iter_chunks(self, name: str) -> Iterator[np.ndarray]:
        """The tensor's elements in order, flat, as DTYPES[info.dtype].raw (bfloat16 as uint16 bits).

        The CRC of what was read is proven only once finish() has been called.

        Raises:
            UserError: a damaged file, a non-finite weight, or a master that is not what the model computed with.
        """
        info = self.tensors[name]
        parts = self._parts[info.alias_of or name]
        if not parts:
            return
        stored = parts[0].ref
        if not stored.is_contiguous:
            chunks = iter([(0, parts[0].file.read_strided(stored, name))])
        else:
            step = CHUNK_BYTES // DTYPES[stored.dtype].itemsize
            ranges = range(0, info.numel, step)
            chunks = ((low, read_parts(parts, low, min(step, info.numel - low))) for low in ranges)
        for low, chunk in chunks:
            self._check_finite(info, chunk, stored.dtype)
            if self._mirrors.get(name):
                self._check_mirror(name, low, chunk, stored.dtype)
            yield cast(chunk, stored.dtype, info.dtype)

    def read(self, name: str) -> np.ndarray:
        """The whole tensor in its shape, as DTYPES[info.dtype].raw, with every byte's CRC compared."""
        info = self.tensors[name]
        chunks = list(self.iter_chunks(name))
        for part in self._parts[info.alias_of or name] + self._mirrors.get(name, []):
            part.file.check_record(f"data/{part.ref.key}")
        flat = np.concatenate(chunks) if chunks else np.empty(0, DTYPES[info.dtype].raw)
        return flat.reshape(info.shape)

    def finish(self) -> None:
        """Compares the CRC of every record of which anything was read. Raises UserError naming the file."""
        for file in self.files:
            file.check_touched()

    def _check_finite(self, info: TensorInfo, chunk: np.ndarray, dtype: str) -> None:
        # Buffers may hold infinities by design (attention masks).
        if self.allow_nonfinite or info.kind == "buffer":
            return
        count = nonfinite_count(chunk, dtype)
        if count:
            raise UserError(
                f"finite weights in {self.path}",
                f"{count} NaN or infinite elements in {info.name}",
                "use an older checkpoint, or --allow-nonfinite to convert it all the same",
            )

    def _check_mirror(self, name: str, low: int, master: np.ndarray, dtype: str) -> None:
        mirror_parts = self._mirrors[name]
        mirror_dtype = mirror_parts[0].ref.dtype
        mirror = read_parts(mirror_parts, low, master.size)
        rounded = cast(master, dtype, mirror_dtype)
        if np.array_equal(rounded.view(np.uint8), mirror.view(np.uint8)):
            return
        floats = [bf16_to_fp32(x) if mirror_dtype == "bfloat16" else x for x in (rounded, mirror)]
        wrong = floats[0] != floats[1]
        wrong &= ~(np.isnan(floats[0]) & np.isnan(floats[1]))
        if wrong.any():
            masters = sorted({part.file.path.name for part in self._parts[name]})
            raise UserError(
                f"{name} in {', '.join(masters)} to be the fp32 master of {name} in {mirror_parts[0].file.path.name}",
                f"{int(wrong.sum())} of {wrong.size} elements that differ by more than rounding: the files are of "
                "different steps, or of swapped ranks",
                f"restore all files in {self.path} from one and the same save",
            )
