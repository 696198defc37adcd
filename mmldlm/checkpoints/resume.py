"""Read a checkpoint of any engine, stage and world size by flat element ranges, for a resume.

Every engine loads through this reader, even its own files at the same world size. Every rank reads
only what it owns. Only descriptions are unpickled, and neither torch nor deepspeed is imported.
A reader can be pickled: rank 0 opens every file of a checkpoint, once, and the other ranks those
from which they read.

Checksums: rank 0 must have compared the files with the manifest before (locate.check_complete or
find_latest_valid, with checksums). Here only records that are read from end to end are compared
with their CRC; otherwise every rank would read nearly everything.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mmldlm.checkpoints.files.dtypes import DTYPES, cast
from mmldlm.checkpoints.files.file_io import closed_on_error
from mmldlm.checkpoints.formats import registry
from mmldlm.checkpoints.formats.ema import add_ema
from mmldlm.checkpoints.formats.weight_source import (
    Parts,
    ReadOptions,
    TensorInfo,
    WeightSource,
    read_parts,
)
from mmldlm.checkpoints.manifest import DCP_METADATA, MODEL_FILE, OPTIMIZER_FILE
from mmldlm.errors import UserError


def open_training_state(engine_folder: Path | str) -> ResumeReader:
    """Open the `engine/` folder of a step folder of any engine.

    Raises:
        UserError: no training state, or files that are missing, damaged, unsafe or of different
            saves.
    """
    folder = Path(engine_folder)
    source = _open_source(folder)
    with closed_on_error(source):
        if unknown := source.unclassified:
            raise UserError(
                f"the names of the trained parameters in {source.path}",
                f"none for {unknown[0]} and {len(unknown) - 1} more (saved by another program than"
                " mmldlm)",
                "take the weights alone with training.init_from",
            )
        add_ema(source, folder)
    return ResumeReader(source)


def _open_source(folder: Path) -> WeightSource:
    detected = registry.detect(folder) if folder.is_dir() else None
    if detected is None or not detected.format.can_resume(detected.path):
        inside = (
            sorted(path.name for path in folder.iterdir())
            if folder.is_dir()
            else ["no such folder"]
        )
        files = f"*_states.pt, {DCP_METADATA}, or {MODEL_FILE} and {OPTIMIZER_FILE}"
        raise UserError(
            f"the training state of an engine in {folder} ({files})",
            ", ".join(inside[:6]) or "an empty folder",
            "resume from another checkpoint of the run, or take the weights alone with"
            " training.init_from",
        )
    return detected.format.open(
        detected.path, ReadOptions(True, with_moments=True, random_access=True, is_one_save=True)
    )


class ResumeReader:
    """Weights, the optimizer's moments and EMA of one checkpoint, by name. Use as a context
    manager or call close().

    Attributes:
        names: Every parameter and persistent buffer, including the second names of tied weights.
        engine: Engine that saved it ("deepspeed", "fsdp", "model.pt").
        stage: ZeRO stage; None if not recorded.
        world_size: Number of ranks that saved it; None if not recorded.
        has_moments: False before the optimizer's first step.
        has_ema: Whether a moving average of the weights was saved.
    """

    def __init__(self, source: WeightSource):
        self._source = source
        self.names = list(source.tensors)
        self.engine, self.stage, self.world_size = source.engine, source.stage, source.world_size
        self.has_moments = bool(source.moments)
        self.has_ema = bool(source.ema)

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def __enter__(self) -> ResumeReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the unsharded tensor."""
        return self._source.tensors[name].shape

    def owner(self, name: str) -> str:
        """Return the name that stores the tensor, which differs for the second name of a tied
        weight.
        """
        return self._source.tensors[name].alias_of or name

    def kind(self, name: str) -> str:
        """Return "trainable", "frozen" or "buffer"; of a tied name that of its owner."""
        return self._source.tensors[self.owner(name)].kind

    def moments_of(self, name: str) -> tuple[str, ...]:
        """Return which moments a trainable tensor has: ("exp_avg", "exp_avg_sq") of AdamW,
        ("exp_avg",) of Muon.
        """
        return self._source.moments_of(self.owner(name))

    def read(self, name: str, what: str, start: int, count: int) -> np.ndarray:
        """Return flat elements [start, start + count) as a new float32 array.

        Args:
            name: Name of the tensor.
            what: "weight" (the fp32 master of a trainable one, else the stored values, widened),
                or for a trainable one "exp_avg", "exp_avg_sq" (see moments_of) or "ema".
            start: First element.
            count: Number of elements.

        Raises:
            UserError: a damaged file; the error names it.
            KeyError: the checkpoint does not have this name or state.
            ValueError: a range outside the tensor, or values that float32 cannot represent.
        """
        info, parts = self._find(name, what)
        if start < 0 or count < 0 or start + count > info.numel:
            raise ValueError(
                f"elements {start}..{start + count} of {name}, which has {info.numel}"
            )
        if count == 0:
            return np.empty(0, np.float32)
        stored = parts[0].ref
        if stored.is_contiguous:
            values = read_parts(parts, start, count)
        else:
            values = parts[0].file.read_strided(stored, name)[start : start + count]
        return _to_float32(values, stored.dtype, name)

    def read_tensor(self, name: str) -> tuple[np.ndarray, str, tuple[int, ...]]:
        """Return a complete tensor in its stored dtype: (flat raw array, torch's name of the
        dtype, shape).

        numpy has no bfloat16: its bits are uint16. For torch (if not empty):
        torch.from_numpy(raw.view(np.uint8)).view(getattr(torch, dtype)).reshape(shape).
        """
        return (
            self._source.read(name).reshape(-1),
            self._source.tensors[name].dtype,
            self.shape(name),
        )

    def finish(self) -> None:
        """Compare the remaining CRCs (see the module docstring); call once after the last read.

        Raises:
            UserError: a record has changed since it was saved; the error names the file.
        """
        self._source.finish()

    def _find(self, name: str, what: str) -> tuple[TensorInfo, Parts]:
        owner = self.owner(name)
        tables = {"weight": self._source.parts, "ema": self._source.ema}
        table = tables[what] if what in tables else self._source.moments.get(what, {})
        if owner not in table:
            raise KeyError(f"no {what} of {name} in {self._source.path}")
        return self._source.tensors[owner], table[owner]


def _to_float32(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """Convert any dtype to float32; integers only if exact.

    Raises:
        ValueError: integers beyond 2**24.
    """
    if DTYPES[dtype].is_float:
        return cast(values, dtype, "float32")
    floats = values.astype(np.float32)
    if np.abs(floats).max() >= 2**24:
        raise ValueError(
            f"{name} is {dtype} with values that float32 cannot represent: use read_tensor"
        )
    return floats
