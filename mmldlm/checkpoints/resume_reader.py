"""A checkpoint of any engine, stage and world size, read by flat element ranges: what a resume is made of.

Every engine loads through this, also its own files at its own world size, and every rank asks for what it owns and no
more. Nothing is unpickled but descriptions, and neither torch nor deepspeed is imported.

Checksums: the files must have been verified against the manifest first (manifest.verify with checksums, which rank 0
does once for all). Here only what is read from a record's start to its end in order is compared with the record's CRC;
to run it for every range would make each of 64 ranks read nearly everything.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mmldlm.checkpoints.formats.adam_state import MOMENTS
from mmldlm.checkpoints.formats.dcp.reader import DcpCheckpoint
from mmldlm.checkpoints.formats.deepspeed.files import find_zero_folder
from mmldlm.checkpoints.formats.deepspeed.reader import ZeroCheckpoint
from mmldlm.checkpoints.formats.detect import is_dcp_folder
from mmldlm.checkpoints.formats.dtypes import DTYPES, cast
from mmldlm.checkpoints.formats.ema import add_ema, list_ema
from mmldlm.checkpoints.formats.model_pt.reader import ModelFile
from mmldlm.checkpoints.formats.torch_save.reader import CHUNK_BYTES
from mmldlm.checkpoints.formats.weight_source import FileRange, TensorInfo, WeightSource, read_parts_into
from mmldlm.errors import UserError

MODEL_FILE, OPTIMIZER_FILE = "model.pt", "optimizer.pt"
STATES = ("weight", *MOMENTS, "ema")


def open_training_state(engine_folder: Path | str) -> ResumeReader:
    """Opens the `engine/` folder of a step folder, whichever engine wrote it.

    Raises:
        UserError: no training state there, or files that are missing, damaged, unsafe or of different saves.
    """
    folder = Path(engine_folder)
    source, files_at = _open_source(folder)
    try:
        unknown = [name for name, info in source.tensors.items() if info.kind == "parameter"]
        if unknown:
            raise UserError(
                f"the names of the trained parameters in {files_at}",
                f"none for {unknown[0]} and {len(unknown) - 1} more (saved by another program than mmldlm)",
                "take the weights alone with training.init_from",
            )
        add_ema(source, folder if list_ema(folder) else files_at)
    except BaseException:
        source.close()
        raise
    return ResumeReader(source)


def _open_source(folder: Path) -> tuple[WeightSource, Path]:
    zero = find_zero_folder(folder)
    if zero is not None:
        return ZeroCheckpoint.open(zero, allow_nonfinite=True, with_moments=True, is_ranged=True), zero
    for candidate in (folder, folder / "dcp"):
        if is_dcp_folder(candidate):
            opened = DcpCheckpoint.open(candidate, allow_nonfinite=True, with_moments=True, is_ranged=True)
            return opened, candidate
    model, optimizer = folder / MODEL_FILE, folder / OPTIMIZER_FILE
    if model.is_file() and optimizer.is_file():
        opened = ModelFile.open(model, allow_nonfinite=True, optimizer=optimizer, with_moments=True, is_ranged=True)
        return opened, folder
    inside = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else ["no such folder"]
    raise UserError(
        f"the training state of an engine in {folder} (*_states.pt, .metadata, or {MODEL_FILE} and {OPTIMIZER_FILE})",
        ", ".join(inside[:6]) or "an empty folder",
        "resume from another checkpoint of the run, or take the weights alone with training.init_from",
    )


class ResumeReader:
    """Weights, AdamW's moments and EMA of one checkpoint, by name. Use as a context manager or call close().

    Attributes:
        names: every parameter and persistent buffer, the second names of tied weights included.
        engine, stage, world_size: who saved it ("deepspeed", "fsdp", "model.pt"); None where not recorded.
        has_moments: False where the optimizer had not stepped yet.
        has_ema: whether a moving average of the weights was saved.
    """

    def __init__(self, source: WeightSource):
        self._source = source
        self.names = list(source.tensors)
        self.engine, self.stage, self.world_size = source.engine, source.stage, source.world_size
        self.has_moments = bool(source.moments)
        self.has_ema = bool(source.ema)

    def close(self) -> None:
        """Closes the files."""
        self._source.close()

    def __enter__(self) -> ResumeReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._source.tensors[name].shape

    def owner(self, name: str) -> str:
        """The name that stores the tensor: another one for the second name of a tied weight."""
        return self._source.tensors[name].alias_of or name

    def kind(self, name: str) -> str:
        """ "trainable", "frozen" or "buffer"; a tied name has its owner's."""
        return self._source.tensors[self.owner(name)].kind

    def read(self, name: str, what: str, start: int, count: int) -> np.ndarray:
        """Flat elements [start, start + count) as a new float32 array.

        Args:
            what: "weight" (of a trainable one its fp32 master; else the stored values, widened), or of a trainable
                one "exp_avg", "exp_avg_sq", "ema".

        Raises:
            UserError: a damaged file, which is named.
            KeyError: a name, or a state of it, that the checkpoint does not have.
            ValueError: a range outside the tensor, or a tensor that float32 cannot carry.
        """
        info, parts = self._find(name, what)
        if start < 0 or count < 0 or start + count > info.numel:
            raise ValueError(f"elements {start}..{start + count} of {name}, which has {info.numel}")
        out = np.empty(count, np.float32)
        if count == 0:
            return out
        stored = parts[0].ref
        if stored.is_contiguous and stored.dtype == "float32":
            read_parts_into(parts, start, out)
            return out
        if not stored.is_contiguous:
            whole = parts[0].file.read_strided(stored, name)
            out[:] = _to_float32(whole[start : start + count], stored.dtype, name)
            return out
        step = CHUNK_BYTES // DTYPES[stored.dtype].itemsize
        for low in range(0, count, step):
            chunk = np.empty(min(step, count - low), DTYPES[stored.dtype].raw)
            read_parts_into(parts, start + low, chunk)
            out[low : low + chunk.size] = _to_float32(chunk, stored.dtype, name)
        return out

    def read_tensor(self, name: str) -> tuple[np.ndarray, str, tuple[int, ...]]:
        """A whole tensor in its stored dtype: (flat raw array, torch's name of the dtype, shape).

        numpy has no bfloat16: its bits come as uint16. For torch:
        torch.from_numpy(raw.view(np.uint8)).view(getattr(torch, dtype)).reshape(shape), 0 elements aside.
        """
        return self._source.read(name).reshape(-1), self._source.tensors[name].dtype, self.shape(name)

    def finish(self) -> None:
        """Call once after the last read: compares the CRCs that are left to compare (see the module's text).

        Raises:
            UserError: a record is not what was saved; its file is named.
        """
        self._source.finish()

    def _find(self, name: str, what: str) -> tuple[TensorInfo, list[FileRange]]:
        if what not in STATES:
            raise KeyError(f"{what!r} is none of {', '.join(STATES)}")
        owner = self.owner(name)
        tables = {"weight": self._source._parts, "ema": self._source.ema}
        table = tables[what] if what in tables else self._source.moments.get(what, {})
        if owner not in table:
            raise KeyError(f"no {what} of {name} in {self._source.path}")
        return self._source.tensors[owner], table[owner]


def _to_float32(chunk: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """float32 of any dtype that it can carry; integers only where nothing is lost."""
    if DTYPES[dtype].is_float:
        return cast(chunk, dtype, "float32")
    values = chunk.astype(np.float32)
    if np.abs(values).max() >= 2**24:
        raise ValueError(f"{name} is {dtype} with values that float32 cannot carry: use read_tensor")
    return values
