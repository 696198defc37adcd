"""Named tensors of an opened checkpoint, read in chunks and verified while reading."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from mmldlm.checkpoints.files.dtypes import (
    DTYPES,
    as_numbers,
    cast,
    count_nonfinite,
    is_mask,
    is_rounded,
    nbytes,
    numel,
)
from mmldlm.checkpoints.files.file_io import closed_on_error
from mmldlm.checkpoints.files.torch_file import (
    CHUNK_BYTES,
    SAME_SAVE_HINT,
    corrupt_file_error,
)
from mmldlm.checkpoints.files.unpickler import TensorRef
from mmldlm.checkpoints.manifest import MANIFEST, read_manifest
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.moments import MOMENTS

# The number of elements of a range that one thread reads.
RANGE_ELEMENTS = 4 << 20
# The state of a tensor that is no moment.
WEIGHT = "weight"


class TensorInfo(NamedTuple):
    """One named tensor.

    Attributes:
        name: Name in the model's state_dict.
        dtype: Dtype that read() returns; for a trainable tensor that of its fp32 master.
        shape: Shape of the unsharded tensor.
        kind: "trainable", "frozen", "buffer", "alias" (another name of a tied weight), or
            "parameter" where the checkpoint does not record which of these it is.
        alias_of: Name that stores the weight of an alias.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    alias_of: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes in `dtype`."""
        return nbytes(self.shape, self.dtype)


class OpenFile(Protocol):
    """A file of a checkpoint, or a part of one."""

    path: Path

    def verify_read_records(self) -> None: ...
    def close(self) -> None: ...


class TensorFile(OpenFile, Protocol):
    """A file that stores tensors: TorchFile, SafetensorsFile."""

    def position_of(self, ref: TensorRef, start: int = 0) -> int: ...
    def read_elements_into(self, ref: TensorRef, start: int, view: memoryview) -> int | None: ...
    def read_strided(self, ref: TensorRef, what: str) -> np.ndarray: ...


class FileRange(NamedTuple):
    """`count` consecutive elements of a flat tensor, stored from element `start` of a tensor in a
    file.
    """

    file: TensorFile
    ref: TensorRef
    start: int
    count: int  # type: ignore[assignment]


def tied_names(saved: Any, listed_in: Path) -> dict[str, str]:
    """Return second name -> name of tied weights, as a file records them; {} for None.

    Raises:
        UserError: anything else; it names `listed_in`.
    """
    saved = {} if saved is None else saved
    if not isinstance(saved, dict) or not all(
        isinstance(name, str) for pair in saved.items() for name in pair
    ):
        raise corrupt_file_error(
            listed_in, f"tied weights that are not pairs of names: {str(saved)[:80]}"
        )
    return saved


def whole_tensor(file: TensorFile, ref: TensorRef) -> list[FileRange]:
    """Return the parts of a tensor that is stored in one piece."""
    return [FileRange(file, ref, 0, ref.numel)] if ref.numel else []


class RegularParts(Sequence[FileRange]):
    """The parts of a tensor that many ranks saved, each made when it is read: 1,024 ranks and 500
    tensors with two moments have 1.5 million.

    Attributes:
        starts: First element of every part, ascending.
    """

    starts: Sequence[int]

    def __len__(self) -> int:
        return len(self.starts)


Parts = Sequence[FileRange]


@dataclass
class NamedOptimizer:
    """An optimizer by the names of the model.

    Attributes:
        groups: (names, settings) of every parameter group.
        state: Name -> what was saved for it (leaves); empty before the first step.
        steps: Number of steps; None before the first.
    """

    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: float | None = None

    @property
    def names(self) -> list[str]:
        """Every parameter in the optimizer's order."""
        return [name for names, _ in self.groups for name in names]


def read_parts(parts: Parts, start: int, count: int) -> np.ndarray:
    """Return elements [start, start + count) of the concatenation of `parts`, which all have one
    dtype.
    """
    out = np.empty(count, DTYPES[parts[0].ref.dtype].raw)
    read_parts_into(parts, start, out)
    return out


def read_parts_into(parts: Parts, start: int, out: np.ndarray | memoryview) -> int | None:
    """Fill `out`, an array of the raw dtype or its bytes, with the elements from `start` of
    concatenated `parts`.

    Returns:
        The CRC-32 of the bytes, or None if they came from more than one part.
    """
    view = out if isinstance(out, memoryview) else out.view(np.uint8).data
    size = DTYPES[parts[0].ref.dtype].itemsize if parts else 1
    end, done, crc = start + len(view) // size, 0, None
    for position, part in _parts_from(parts, start):
        if position >= end:
            break
        low, high = max(start, position), min(end, position + part.count)
        if low < high:
            piece = view[(low - start) * size : (high - start) * size]
            crc = part.file.read_elements_into(part.ref, part.start + low - position, piece)
            crc = crc if len(piece) == len(view) else None
            done += high - low
    assert done * size == len(view), f"elements {start}..{end}, of which the tensor has {done}"
    return crc


def _parts_from(parts: Parts, start: int) -> Iterator[tuple[int, FileRange]]:
    """Yield (first element, part) of the parts in order; those that end before `start` may be left
    out.
    """
    if isinstance(parts, RegularParts):
        for index in range(max(bisect_right(parts.starts, start) - 1, 0), len(parts)):
            yield int(parts.starts[index]), parts[index]
        return
    position = 0
    for part in parts:
        yield position, part
        position += part.count


def _renamed(table: dict[str, Parts], names: dict[str, str]) -> dict[str, Parts]:
    return {names[name]: parts for name, parts in table.items() if name in names}


@dataclass(frozen=True)
class ReadOptions:
    """How to open a checkpoint.

    Attributes:
        allow_nonfinite: Whether to return NaN and infinite weights instead of raising.
        with_moments: Whether to find the moments too, and to refuse a checkpoint of another
            optimizer than AdamW and Muon.
        random_access: Whether to read only what is requested (see torch_file).
        is_one_save: Whether a manifest was compared with the files, so that the steps of model and
            optimizer are not compared with each other. Those of mmldlm's runs may differ (skipped
            steps, rollbacks); the ranks' are always compared.
        key: State dict of a file or DCP folder that is the model (see selection); None for the
            only one.
    """

    allow_nonfinite: bool = False
    with_moments: bool = False
    random_access: bool = False
    is_one_save: bool = False
    key: str | None = None


READ_DEFAULTS = ReadOptions()


class WeightSource:
    """Base class of the readers of all formats. Subclasses fill the attributes (`_read`); this
    class reads tensors.

    Attributes:
        path: Path that was opened.
        engine: "deepspeed", "fsdp", "model.pt" or "safetensors".
        options: How it was opened.
        stage: ZeRO stage; None if not recorded.
        world_size: Number of ranks that saved it; None if not recorded.
        step: Training step; None if not recorded.
        tensors: Name -> TensorInfo, in the order of the model's state_dict; aliases included.
        notes: Facts for the user (tensors of the checkpoint that are not weights, ...).
        parts: Name -> parts of a stored tensor.
        moments: "exp_avg" and "exp_avg_sq" -> trainable name -> parts; Muon's weights lack
            exp_avg_sq. Filled if opened `with_moments`; empty if the optimizer has not stepped
            yet.
        ema: Trainable name -> parts of its moving average (formats/ema); empty if there is none.
        named_optimizer: Optimizer of another program that names its parameters (see
            named_optimizer.py).
        optimizer_left_out: Reason why an optimizer that is in the files cannot be carried over;
            empty if there is none.
        names_of_groups: Names of every parameter group, if the reader found them by the weights
            (ZeRO-0).
        without_masters: Names of the weights of which there are fp32 masters, without a sign of
            which is whose (ZeRO-0); read() returns their 16 bits.
        absent: Names in the model of which the checkpoint holds no value.
        other_models: Paths of the other state dicts in the file (see selection).
        low_precision_copies: Trainable name -> parts of the copy that training computed with,
            which must equal the rounded master.
        module_names: Names of all modules of the model, if a state_dict lists them; None if
            unknown.
    """

    engine = ""

    def __init__(self, path: Path, options: ReadOptions = READ_DEFAULTS):
        self.path, self.options = path, options
        self.stage: int | None = None
        self.world_size: int | None = None
        self.step: int | None = None
        self.tensors: dict[str, TensorInfo] = {}
        self.notes: list[str] = []
        self.files: list[Any] = []  # each an OpenFile, of a class that the format knows
        self.parts: dict[str, Parts] = {}
        self.moments: dict[str, dict[str, Parts]] = {}
        self.ema: dict[str, Parts] = {}
        self.low_precision_copies: dict[str, Parts] = {}
        self.module_names: frozenset[str] | None = None
        self.named_optimizer: NamedOptimizer | None = None
        self.optimizer_left_out = ""
        self.names_of_groups: list[list[str]] = []
        self.without_masters: list[str] = []
        self.absent: list[str] = []
        self.other_models: list[str] = []

    @classmethod
    def open(cls, path: Path | str, options: ReadOptions = READ_DEFAULTS, **more: Any) -> Self:
        """Open a checkpoint of this format.

        Raises:
            UserError: missing, damaged, unsafe or mismatched files, or an unsupported kind of
                parallelism or storage. It names the file.
        """
        source = cls(Path(path), options, **more)
        with closed_on_error(source):
            source._read()
        return source

    def _read(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for other ranks, which read tensors.
        return self.__dict__ | {"named_optimizer": None}

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- names ------------------------------------------------------------------------------------

    @property
    def unclassified(self) -> list[str]:
        """Names of the tensors of which the checkpoint does not record whether they are
        trained.
        """
        return [name for name, info in self.tensors.items() if info.kind == "parameter"]

    def moments_of(self, name: str) -> tuple[str, ...]:
        """Return which moments a stored weight has."""
        return tuple(what for what in MOMENTS if name in self.moments.get(what, {}))

    def rename(self, names: dict[str, str]) -> None:
        """Give tensors new names: {name: new name} of all that are to be kept."""
        # A name that is left out may have stored the elements of one that is kept.
        heirs: dict[str, str] = {}
        for name, info in list(self.tensors.items()):
            if name in names and info.alias_of is not None and info.alias_of not in names:
                heir = heirs.setdefault(info.alias_of, name)
                if heir == name:
                    self.tensors[name] = self.tensors[info.alias_of]._replace(name=name)
                    self.parts[name] = self.parts[info.alias_of]
                else:
                    self.tensors[name] = info._replace(alias_of=heir)
        self.tensors = {
            names[name]: info._replace(
                name=names[name], alias_of=info.alias_of and names[info.alias_of]
            )
            for name, info in self.tensors.items()
            if name in names
        }
        for what, moments in self.moments.items():
            self.moments[what] = _renamed(moments, names)
        self.parts = _renamed(self.parts, names)
        self.ema = _renamed(self.ema, names)
        self.low_precision_copies = _renamed(self.low_precision_copies, names)

    def resolve_tied(self, names: list[str], listed_in: Path) -> list[str]:
        """Return the names that store these parameters: of two tied names a file may have kept the
        other.

        Raises:
            UserError: a name that is not in the checkpoint, or two names of one tensor; it names
                `listed_in`.
        """
        unknown = [name for name in names if name not in self.tensors]
        if unknown:
            raise corrupt_file_error(
                listed_in, f"a parameter {unknown[0]} that is not among the weights"
            )
        owners = [self.tensors[name].alias_of or name for name in names]
        if len(set(owners)) != len(owners):
            raise corrupt_file_error(listed_in, "the same parameter twice")
        return owners

    def classify(self, trained: set[str], buffers: set[str]) -> None:
        """Set the kind of unclassified tensors: trained ones, buffers (all integers are), frozen
        ones.
        """
        for name in self.unclassified:
            is_buffer = name in buffers or not DTYPES[self.tensors[name].dtype].is_float
            self.set_kind_and_dtype(
                name, "trainable" if name in trained else "buffer" if is_buffer else "frozen"
            )

    def mark_tied(self, aliases: Any, listed_in: Path) -> None:
        """Make second names aliases, whether their tensors were saved too or not: {second name:
        name}, or None.

        Raises:
            UserError: no such dict, or two tensors of different dtypes or shapes; it names
                `listed_in`.
        """
        for alias, owner in tied_names(aliases, listed_in).items():
            other = self.tensors.get(owner)
            info = self.tensors.get(alias, other)
            if info is None or other is None or info.alias_of or other.alias_of:
                continue
            # DeepSpeed lists all tensors without elements as shared.
            if not info.numel and not other.numel:
                continue
            if (info.dtype, info.shape) != (other.dtype, other.shape):
                found = f"{alias} {info.shape} listed as tied to {owner} {other.shape}"
                raise corrupt_file_error(listed_in, found)
            self.tensors[alias] = TensorInfo(alias, other.dtype, other.shape, "alias", owner)

    def set_kind_and_dtype(self, name: str, kind: str, dtype: str | None = None) -> None:
        """Change the kind of a tensor, and its dtype if given."""
        info = self.tensors[name]
        self.tensors[name] = TensorInfo(name, dtype or info.dtype, info.shape, kind)

    def update_aliases(self) -> None:
        """Give aliases the dtype of their owners, which may have become fp32 masters since."""
        for name, info in self.tensors.items():
            if info.alias_of:
                owner = self.tensors[info.alias_of]
                self.tensors[name] = TensorInfo(
                    name, owner.dtype, owner.shape, "alias", owner.name
                )

    def use_ema(self) -> None:
        """Read the moving average of the trainable weights instead of the weights.

        Raises:
            UserError: the checkpoint has none.
        """
        if not self.ema and self.other_models:
            raise UserError(
                f"a moving average of the weights next to {self.path} (ema_rank*.pt)",
                f"none, but other state dicts in the file: {join_some(self.other_models)}",
                f"name the average instead of --ema: --key {self.other_models[0]}",
            )
        if not self.ema:
            raise UserError(
                f"a moving average of the weights next to {self.path} (ema_rank*.pt)",
                "none: the run kept none",
                "leave --ema out; a run keeps one with optimizer.ema_decay=0.999",
            )
        self.find_tied(self.ema)
        for name, parts in self.ema.items():
            self.parts[name] = parts
            self.low_precision_copies.pop(name, None)
            self.set_kind_and_dtype(name, self.tensors[name].kind, "float32")
        self.update_aliases()

    def find_tied(self, owners: Iterable[str]) -> None:
        """Mark frozen matrices with the values of one of `owners` as its alias.

        A checkpoint may have saved a tied weight twice without recording it; averages and
        optimizers cover one name.
        """
        owners = list(owners)
        for name, info in list(self.tensors.items()):
            if info.kind == "frozen" and len(info.shape) > 1:
                candidates = [owner for owner in owners if self.tensors[owner].shape == info.shape]
                tied = next(
                    (owner for owner in candidates if self._same_values(name, owner)), None
                )
                if tied is not None:
                    self.notes.append(
                        f"{name} holds the values of {tied} and was taken as tied to it"
                    )
                    self.tensors[name] = TensorInfo(
                        name, self.tensors[tied].dtype, info.shape, "alias", tied
                    )

    def begins_as_mask(self, name: str) -> bool:
        """Return whether the first elements of a matrix are those of a mask of infinities."""
        info = self.tensors[name]
        first = next(self.iter_chunks(name), None) if len(info.shape) > 1 else None
        if first is None or not count_nonfinite(first, info.dtype):
            return False
        return is_mask(first, info.dtype)

    def _same_values(self, name: str, other: str) -> bool:
        """Return whether two tensors hold the same bytes, and not one constant (as freshly
        initialized ones may).
        """
        if self.tensors[name].dtype != self.tensors[other].dtype:
            return False
        varies = False
        for a, b in zip(self.iter_chunks(name), self.iter_chunks(other)):
            if not np.array_equal(a.view(np.uint8), b.view(np.uint8)):
                return False
            varies = varies or bool((a != a[0]).any())
        return varies

    # -- reading ----------------------------------------------------------------------------------

    def in_file_order(self, table: dict[str, Parts]) -> list[str]:
        """Return the names of `table` in the order of their first part in the files, empty tensors
        last.
        """
        index_of = {file.path: index for index, file in enumerate(self.files)}

        def position(name: str) -> tuple[int, int]:
            first = table[name][0]
            return index_of[first.file.path], first.file.position_of(first.ref, first.start)

        empty = [name for name, parts in table.items() if not parts]
        return sorted((name for name, parts in table.items() if parts), key=position) + empty

    def ranges(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield (first element, end) of the ranges in which threads may read a tensor and its
        moments.
        """
        parts, count = self.parts[name], self.tensors[name].numel
        # A non-contiguous tensor is read as one range, an empty one not at all.
        step = RANGE_ELEMENTS if parts and parts[0].ref.is_contiguous else max(count, 1)
        return ((low, min(low + step, count)) for low in range(0, count, step))

    def iter_chunks(self, name: str, what: str = WEIGHT) -> Iterator[np.ndarray]:
        """Yield the elements of a weight or moment in order, flat, in new arrays; see
        iter_range.
        """
        return (chunk.copy() for chunk, _ in self.iter_range(name, what))

    def iter_range(
        self, name: str, what: str = WEIGHT, low: int = 0, high: int | None = None
    ) -> Iterator[tuple[np.ndarray, int | None]]:
        """Yield elements [low, high) of a weight or moment in order, flat, as
        DTYPES[info.dtype].raw (moments as float32); each with its CRC-32 if known.

        An array is valid until the next one is requested: they share memory, because allocating
        each chunk would cost as much as reading it. CRCs are verified by finish() only.

        Raises:
            UserError: a damaged file, a non-finite weight, or a master that does not match its
                low-precision copy.
        """
        info = self.tensors[name]
        parts = self.parts[info.alias_of or name] if what == WEIGHT else self.moments[what][name]
        if not parts:
            return
        if what != WEIGHT:
            info = TensorInfo(f"{what} of {name}", "float32", info.shape, "trainable")
        stored = parts[0].ref
        high = info.numel if high is None else high
        is_cast = stored.dtype != info.dtype
        step = CHUNK_BYTES // DTYPES[stored.dtype].itemsize
        buffer = np.empty(
            min(step, high - low) if stored.is_contiguous else 0, DTYPES[stored.dtype].raw
        )
        for start in range(low, high, step if stored.is_contiguous else max(high - low, 1)):
            if stored.is_contiguous:
                chunk = buffer[: high - start]
                crc = read_parts_into(parts, start, chunk)
            else:
                chunk, crc = parts[0].file.read_strided(stored, name)[low:high], None
            self._check_finite(info, chunk, stored.dtype)
            has_copy = what == WEIGHT and self.low_precision_copies.get(name)
            if has_copy and not self.options.random_access:
                self._check_copy(name, start, chunk, stored.dtype)
            yield cast(chunk, stored.dtype, info.dtype), None if is_cast else crc

    def read(self, name: str) -> np.ndarray:
        """Return the complete tensor in its shape, as DTYPES[info.dtype].raw, its CRC verified
        (see ReadOptions.random_access).
        """
        info = self.tensors[name]
        chunks = list(self.iter_chunks(name))
        if not self.options.random_access:
            copies = self.low_precision_copies.get(name, [])
            for part in [*self.parts[info.alias_of or name], *copies]:
                part.file.verify_read_records()
        flat = np.concatenate(chunks) if chunks else np.empty(0, DTYPES[info.dtype].raw)
        return flat.reshape(info.shape)

    def finish(self) -> None:
        """Verify the CRC of every record that was read.

        Raises:
            UserError: a record has changed since it was saved; the error names the file.
        """
        for file in self.files:
            file.verify_read_records()

    def _check_finite(self, info: TensorInfo, chunk: np.ndarray, dtype: str) -> None:
        # Buffers may hold infinities by design (attention masks).
        if self.options.allow_nonfinite or info.kind == "buffer":
            return
        count = count_nonfinite(chunk, dtype)
        if count and info.kind == "parameter" and len(info.shape) > 1 and is_mask(chunk, dtype):
            note = f"{info.name} holds zeros and infinities alone, and was taken as a mask"
            self.notes += [] if note in self.notes else [note]
            return
        if count:
            raise UserError(
                f"finite weights in {self.path}",
                f"{count} NaN or infinite elements in {info.name}",
                "use an older checkpoint, or --allow-nonfinite to convert it anyway",
            )

    def _check_copy(self, name: str, low: int, master: np.ndarray, dtype: str) -> None:
        """Raise UserError if elements of the low-precision copy are not the rounded master."""
        parts = self.low_precision_copies[name]
        low_dtype = parts[0].ref.dtype
        copy = read_parts(parts, low, master.size)
        if (dtype, low_dtype) == ("float32", "bfloat16") and is_rounded(master, copy):
            return
        rounded = as_numbers(cast(master, dtype, low_dtype), low_dtype)
        copy = as_numbers(copy, low_dtype)
        differs = (rounded != copy) & ~(np.isnan(rounded) & np.isnan(copy))
        if differs.any():
            masters = sorted({part.file.path.name for part in self.parts[name]})
            raise UserError(
                f"{name} in {', '.join(masters)} to be the fp32 master of {name} in"
                f" {parts[0].file.path.name}",
                f"{int(differs.sum())} of {differs.size} elements that differ by more than"
                " rounding: the files are of different steps, or of swapped ranks",
                f"{SAME_SAVE_HINT} in {self.path}",
            )


class OpenedCheckpoint:
    """An opened source of weights.

    Attributes:
        weights: Source of the weights.
        checkpoint: Folder of the mmldlm checkpoint that contains it; None for weights of other
            programs.
    """

    def __init__(self, weights: WeightSource, checkpoint: Path | None):
        self.weights, self.checkpoint = weights, checkpoint

    def manifest_sha256(self) -> str | None:
        """Return the SHA-256 of the manifest, which lists the checksum of every file; None without
        a manifest.
        """
        if self.checkpoint is None:
            return None
        return hashlib.sha256(read_bytes(self.checkpoint / MANIFEST)).hexdigest()

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        return {} if self.checkpoint is None else read_manifest(self.checkpoint)

    @property
    def engine(self) -> str:
        """The engine that saved it, or the kind of file."""
        return str(self._manifest.get("engine", self.weights.engine))

    @property
    def step(self) -> int | None:
        """Training step; None if not recorded."""
        return self._manifest.get("step", self.weights.step)

    @property
    def world_size(self) -> int | None:
        """Number of ranks that saved it; None if not recorded."""
        return self._manifest.get("world_size", self.weights.world_size)
