"""What every readable source of weights offers: named tensors in chunks, checked on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mmldlm.checkpoints.finite import are_finite
from mmldlm.checkpoints.formats.dtypes import DTYPES, bf16_to_fp32, cast, is_rounded, nonfinite_count
from mmldlm.checkpoints.formats.torch_save.reader import CHUNK_BYTES, TorchFile, corrupt_file_error
from mmldlm.checkpoints.formats.torch_save.unpickler import TensorRef
from mmldlm.checkpoints.late_numpy import np
from mmldlm.errors import UserError

# trainable: given as its fp32 master. frozen, buffer: in their stored dtype. parameter: the file does not say which.
# alias: another name of a tensor that is stored once (tied weights).
SPAN_ELEMENTS = 4 << 20
KINDS = ("trainable", "frozen", "buffer", "parameter", "alias")


class TensorInfo(NamedTuple):
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


class FileRange(NamedTuple):
    """`count` consecutive elements of a flat tensor, found from element `start` of a tensor in a file."""

    file: TorchFile
    ref: TensorRef
    start: int
    count: int


def read_parts(parts: list[FileRange], start: int, count: int) -> np.ndarray:
    """Elements [start, start + count) of the concatenation of `parts`, which all have one dtype."""
    out = np.empty(count, DTYPES[parts[0].ref.dtype].raw)
    read_parts_into(parts, start, out)
    return out


def read_parts_into(parts: list[FileRange], start: int, out: np.ndarray | memoryview) -> int | None:
    """Fills `out` with the elements from `start` of the concatenation of `parts`; it is an array of their raw dtype, or
    its bytes.

    Returns the CRC-32 of its bytes, where it is known: when they came from one part.
    """
    view = out if isinstance(out, memoryview) else memoryview(out.view(np.uint8))
    size = DTYPES[parts[0].ref.dtype].itemsize if parts else 1
    position, end, done, crc = 0, start + len(view) // size, 0, None
    for part in parts:
        low, high = max(start, position), min(end, position + part.count)
        if low < high:
            piece = view[(low - start) * size : (high - start) * size]
            crc = part.file.read_elements_into(part.ref, part.start + low - position, piece)
            crc = crc if len(piece) == len(view) else None
            done += high - low
        position += part.count
    assert done * size == len(view), f"elements {start}..{end} of a tensor of {position}"
    return crc


class WeightSource:
    """Base of ZeroCheckpoint and ModelFile. Subclasses fill the fields; reading is here.

    Attributes:
        path: what was opened.
        engine: "deepspeed" or "model.pt".
        stage, world_size, step: None where the source does not record them.
        tensors: name -> TensorInfo, in the order of the model's state_dict; aliases included.
        notes: facts a user should see (tensors of the checkpoint that are not weights, ...).
        moments: "exp_avg" and "exp_avg_sq" -> trainable name -> parts. Filled where opened `with_moments`; empty where
            the optimizer has not stepped yet.
        ema: trainable name -> parts of its moving average (ema_files.add_ema); empty where there is none.
    """

    engine = ""

    def __init__(self, path: Path, allow_nonfinite: bool = False, is_ranged: bool = False):
        self.path = path
        self.allow_nonfinite = allow_nonfinite
        self.is_ranged = is_ranged  # see torch_file
        self.moments: dict[str, dict[str, list[FileRange]]] = {}
        self.ema: dict[str, list[FileRange]] = {}
        self.stage: int | None = None
        self.world_size: int | None = None
        self.step: int | None = None
        self.tensors: dict[str, TensorInfo] = {}
        self.notes: list[str] = []
        self.files: list[TorchFile] = []
        self._parts: dict[str, list[FileRange]] = {}
        # The low-precision copy that training computed with; it must be the rounded master.
        self._mirrors: dict[str, list[FileRange]] = {}

    # -- life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- names ----------------------------------------------------------------------------------------------------

    def owners_of(self, names: list[str], told_by: TorchFile) -> list[str]:
        """The names that store these parameters: of two tied names a file may have kept the other.

        Raises:
            UserError: a name that is not in the checkpoint, or two of one tensor; `told_by` is the file named.
        """
        unknown = [name for name in names if name not in self.tensors]
        if unknown:
            raise corrupt_file_error(
                told_by.path, f"it names {unknown[0]} as a parameter, which the weights do not have"
            )
        owners = [self.tensors[name].alias_of or name for name in names]
        if len(set(owners)) != len(owners):
            raise corrupt_file_error(told_by.path, "it names one and the same parameter twice")
        return owners

    def set_kinds(self, trained: set[str], buffers: set[str]) -> None:
        """Sorts tensors of unknown kind: trained ones, buffers (integers can be nothing else), and frozen ones."""
        for name, info in self.tensors.items():
            if info.kind == "parameter":
                is_buffer = name in buffers or not DTYPES[info.dtype].is_float
                self.retype(name, "trainable" if name in trained else "buffer" if is_buffer else "frozen")

    def mark_aliases(self, aliases: dict[str, str], told_by: Path) -> None:
        """Makes second names of what were tensors of their own: {second name: name}.

        Raises:
            UserError: two tensors of different shapes; `told_by` is the file named.
        """
        for alias, owner in aliases.items():
            mine, other = self.tensors.get(alias), self.tensors.get(owner)
            if mine is None or other is None or mine.alias_of or other.alias_of:
                continue
            if (mine.dtype, mine.shape) != (other.dtype, other.shape):
                raise corrupt_file_error(told_by, f"it says that {alias} {mine.shape} is tied to {owner} {other.shape}")
            self.tensors[alias] = TensorInfo(alias, other.dtype, other.shape, "alias", owner)

    def retype(self, name: str, kind: str, dtype: str | None = None) -> None:
        """Says what a tensor is, once the checkpoint has told."""
        info = self.tensors[name]
        self.tensors[name] = TensorInfo(name, dtype or info.dtype, info.shape, kind)

    def retype_aliases(self) -> None:
        """Aliases may have been found among 16-bit weights; what they give is what their owner gives."""
        for name, info in self.tensors.items():
            if info.alias_of:
                owner = self.tensors[info.alias_of]
                self.tensors[name] = TensorInfo(name, owner.dtype, owner.shape, "alias", owner.name)

    def use_ema(self) -> None:
        """From now on the trainable weights read as their moving average.

        Raises:
            UserError: the checkpoint has none.
        """
        if not self.ema:
            raise UserError(
                f"a moving average of the weights beside {self.path} (ema_rank*.pt)",
                "none: the run kept none",
                "leave --ema out; a run keeps one with optimizer.ema_decay=0.999",
            )
        self._find_tied()
        for name, parts in self.ema.items():
            self._parts[name] = parts
            self._mirrors.pop(name, None)
            self.retype(name, self.tensors[name].kind, "float32")
        self.retype_aliases()

    def _find_tied(self) -> None:
        """A matrix that was not trained and holds the very values of one that was is its second name, saved apart.

        Where the checkpoint does not say so, the two names would otherwise part: one averaged, one not.
        """
        for name, info in list(self.tensors.items()):
            if info.kind == "frozen" and len(info.shape) > 1:
                twins = [owner for owner in self.ema if self.tensors[owner].shape == info.shape]
                tied = next((owner for owner in twins if self._same_values(name, owner)), None)
                if tied is not None:
                    self.notes.append(f"{name} holds the values of {tied} and was taken as tied to it")
                    self.tensors[name] = TensorInfo(name, self.tensors[tied].dtype, info.shape, "alias", tied)

    def _same_values(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same bytes, and not one value throughout (as freshly initialised ones may)."""
        if self.tensors[name].dtype != self.tensors[other].dtype:
            return False
        varies = False
        for one, two in zip(self.iter_chunks(name), self.iter_chunks(other)):
            if not np.array_equal(one.view(np.uint8), two.view(np.uint8)):
                return False
            varies = varies or bool((one != one[0]).any())
        return varies

    # -- reading --------------------------------------------------------------------------------------------------

    def reading_order(self) -> list[str]:
        """Stored names in the order in which their bytes lie in the files, so that reading is one sweep."""
        stored = [name for name, info in self.tensors.items() if info.kind != "alias"]
        return self.in_file_order({name: self._parts[name] for name in stored})

    def in_file_order(self, table: dict[str, list[FileRange]]) -> list[str]:
        """The names of `table` in the order in which their parts lie in the files, empty ones last."""
        rank = {id(file): number for number, file in enumerate(self.files)}

        def place(name: str) -> tuple[int, int]:
            first = table[name][0]
            return rank[id(first.file)], first.file.position_of(first.ref, first.start)

        empty = [name for name, parts in table.items() if not parts]
        return sorted((name for name, parts in table.items() if parts), key=place) + empty

    def spans(self, name: str) -> Iterator[tuple[int, int]]:
        """(first element, end) of the ranges in which a tensor and its moments may be read by several threads."""
        parts, count = self._parts[name], self.tensors[name].numel
        # What is not contiguous is read whole, and an empty tensor not at all.
        step = SPAN_ELEMENTS if parts and parts[0].ref.is_contiguous else max(count, 1)
        return ((low, min(low + step, count)) for low in range(0, count, step))

    def iter_moment(self, what: str, name: str) -> Iterator[np.ndarray]:
        """A moment's elements in order, flat float32; see iter_chunks."""
        return (chunk.copy() for chunk, _ in self.moment_pieces(what, name))

    def moment_pieces(
        self, what: str, name: str, low: int = 0, high: int | None = None
    ) -> Iterator[tuple[np.ndarray, int | None]]:
        """Elements [low, high) of a moment in order, flat float32; see pieces.

        Raises:
            UserError: a damaged file, or an element that is not finite.
        """
        parts = self.moments[what][name]
        count = sum(part.count for part in parts)
        dtype = parts[0].ref.dtype if parts else "float32"
        step = CHUNK_BYTES // DTYPES[dtype].itemsize
        info = TensorInfo(f"{what} of {name}", dtype, (count,), "trainable")
        high = count if high is None else high
        buffer = np.empty(min(step, high - low), DTYPES[dtype].raw)
        for start in range(low, high, step):
            chunk = buffer[: high - start]
            crc = read_parts_into(parts, start, chunk)
            self._check_finite(info, chunk, dtype)
            yield cast(chunk, dtype, "float32"), crc if dtype == "float32" else None

    def iter_chunks(self, name: str) -> Iterator[np.ndarray]:
        """The tensor's elements in order, flat, as DTYPES[info.dtype].raw (bfloat16 as uint16 bits); see pieces."""
        return (chunk.copy() for chunk, _ in self.pieces(name))

    def pieces(self, name: str, low: int = 0, high: int | None = None) -> Iterator[tuple[np.ndarray, int | None]]:
        """The tensor's elements [low, high) in order, as in iter_chunks; each with its CRC-32, where that is known.

        An array is valid until the next one is asked for: they share their memory, because new memory for every chunk
        costs as much as reading it.

        The CRC of what was read is proven only once finish() has been called.

        Raises:
            UserError: a damaged file, a non-finite weight, or a master that is not what the model computed with.
        """
        info = self.tensors[name]
        parts = self._parts[info.alias_of or name]
        if not parts:
            return
        stored = parts[0].ref
        high = info.numel if high is None else high
        is_cast = stored.dtype != info.dtype
        step = CHUNK_BYTES // DTYPES[stored.dtype].itemsize
        buffer = np.empty(min(step, high - low) if stored.is_contiguous else 0, DTYPES[stored.dtype].raw)
        for start in range(low, high, step if stored.is_contiguous else max(high - low, 1)):
            if stored.is_contiguous:
                chunk = buffer[: high - start]
                crc = read_parts_into(parts, start, chunk)
            else:
                chunk, crc = parts[0].file.read_strided(stored, name)[low:high], None
            self._check_finite(info, chunk, stored.dtype)
            if self._mirrors.get(name) and not self.is_ranged:
                self._check_mirror(name, start, chunk, stored.dtype)
            yield cast(chunk, stored.dtype, info.dtype), None if is_cast else crc

    def is_stored_as(self, name: str, dtype: str) -> bool:
        """Whether its bytes can be copied as they are: nothing to cast, to gather or to compare; see copies()."""
        parts = self._parts[name]
        if self._mirrors.get(name) or self.tensors[name].dtype != dtype:
            return False
        return not parts or parts[0].ref.dtype == dtype and parts[0].ref.is_contiguous

    def copies(self, name: str, low: int, high: int) -> Iterator[memoryview]:
        """The bytes of the tensor's elements [low, high) in order, of one that is_stored_as it should be; see pieces.

        numpy is not needed for them.
        """
        info, parts = self.tensors[name], self._parts[name]
        itemsize = DTYPES[info.dtype].itemsize
        step = CHUNK_BYTES // itemsize
        buffer = memoryview(bytearray(min(step, high - low) * itemsize))
        for start in range(low, high, step):
            view = buffer[: (high - start) * itemsize]
            read_parts_into(parts, start, view)
            if info.dtype != "float32" or not are_finite(view):
                self._check_finite(info, view, info.dtype)
            yield view

    def read(self, name: str) -> np.ndarray:
        """The whole tensor in its shape, as DTYPES[info.dtype].raw; its CRC is compared, except in ranged mode."""
        info = self.tensors[name]
        chunks = list(self.iter_chunks(name))
        for part in [] if self.is_ranged else self._parts[info.alias_of or name] + self._mirrors.get(name, []):
            part.file.check_ref_crc(part.ref)
        flat = np.concatenate(chunks) if chunks else np.empty(0, DTYPES[info.dtype].raw)
        return flat.reshape(info.shape)

    def finish(self) -> None:
        """Compares the CRC of every record of which anything was read. Raises UserError naming the file."""
        for file in self.files:
            file.check_touched()

    def _check_finite(self, info: TensorInfo, chunk: np.ndarray | memoryview, dtype: str) -> None:
        # Buffers may hold infinities by design (attention masks).
        if self.allow_nonfinite or info.kind == "buffer" or not DTYPES[dtype].is_float:
            return
        count = nonfinite_count(np.frombuffer(chunk, DTYPES[dtype].raw), dtype)
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
        if (dtype, mirror_dtype) == ("float32", "bfloat16") and is_rounded(master, mirror):
            return
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
