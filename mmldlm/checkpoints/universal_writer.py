"""`mmldlm convert SRC OUT --to universal`: what DeepSpeed's ds_to_universal makes, in one pass and bounded memory.

    OUT/latest_universal                                 the word "universal"
    OUT/universal/*_model_states.pt                      copied byte for byte, after their CRCs were compared
    OUT/universal/zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt, and step.pt from ZeRO-1 and 2
    OUT/universal/zero/optimizer_state.pt                AdamW's settings and step

DeepSpeed then loads it at another world size with {"checkpoint": {"load_universal": true}}. The loss scaler, a Python
object that DeepSpeed would unpickle, is left out: DeepSpeed keeps its own. Unlike DeepSpeed's tool this one follows
param_shapes, and so is right under round_robin_gradients too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.checkpoints.dtypes import DTYPES, cast
from mmldlm.checkpoints.moments import MOMENTS
from mmldlm.checkpoints.output_folder import write_beside
from mmldlm.checkpoints.sources import open_source
from mmldlm.checkpoints.torch_file import CHUNK_BYTES, TorchFile, damaged
from mmldlm.checkpoints.torch_writer import NewTensor, write_torch
from mmldlm.checkpoints.weights import Part, read_parts
from mmldlm.checkpoints.zero_files import inner_optimizer, load_dict
from mmldlm.checkpoints.zero_pickle import TensorRef
from mmldlm.checkpoints.zero_reader import ZeroCheckpoint
from mmldlm.errors import UserError

TAG = "universal"
_PLAIN = (str, int, float, bool, type(None))


def convert_to_universal(
    source: Path | str,
    out: Path | str,
    force: bool = False,
    allow_nonfinite: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Converts a ZeRO-1, 2 or 3 checkpoint into the folder `out`; returns the number of bytes written.

    Raises:
        UserError: another kind of source, a damaged one, one saved before the optimizer's first step, `out` exists, or
            there is no space. MmldlmError: writing failed. In all cases `out` is as it was before.
    """
    opened = open_source(source, allow_nonfinite, with_moments=True)
    with opened.weights as weights:
        if not isinstance(weights, ZeroCheckpoint) or not weights.stage or not weights.moments:
            stepped = "" if weights.moments else ", without the state of an optimizer that has stepped"
            raise UserError(
                f"a ZeRO-1, 2 or 3 checkpoint with optimizer state at {source}",
                opened.engine + (f" ZeRO-{weights.stage}" if weights.stage is not None else "") + stepped,
                "training.resume continues any checkpoint on any engine without a conversion",
            )
        written = 0

        def write(folder: Path) -> None:
            nonlocal written
            written = write_universal(weights, folder, on_bytes)

        origin = opened.checkpoint or weights.path
        write_beside(origin, Path(os.path.abspath(out)), force, universal_bytes(weights), write)
        return written


def universal_bytes(weights: ZeroCheckpoint) -> int:
    """Bytes that will be written, small files aside."""
    trained = sum(info.numel for info in weights.tensors.values() if info.kind == "trainable")
    return 4 * 3 * trained + sum(path.stat().st_size for path in weights.path.glob("*model_states.pt"))


def write_universal(
    weights: ZeroCheckpoint, folder: Path, on_bytes: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Writes the checkpoint below `folder`; returns the number of bytes of tensors.

    Raises:
        UserError: a damaged source. OSError: a failed write.
    """
    out = folder / TAG
    done, total = 0, universal_bytes(weights)
    (out / "zero").mkdir(parents=True)
    steps = optimizer_steps(weights)
    for name in [*weights.reading_order(), *(name for name, info in weights.tensors.items() if info.alias_of)]:
        info = weights.tensors[name]
        place = out / "zero" / name
        if info.kind != "trainable":
            # DeepSpeed's tool writes these from ZeRO-1 and 2 alone, widened; its loader reads them in the model files.
            if weights.stage < 3:
                place.mkdir()
                chunks = (_widened(chunk, info.dtype) for chunk in weights.iter_chunks(name))
                write_torch(place / "fp32.pt", {"param": NewTensor("float32", info.shape, chunks)})
            continue
        place.mkdir()
        # ZeRO-3 is loaded flat, ZeRO-1 and 2 in the parameter's shape: as ds_to_universal leaves them.
        shape = (info.numel,) if weights.stage == 3 else info.shape
        tables = {"fp32": None, **{key: weights.moments[key][name] for key in MOMENTS}}
        for key, parts in tables.items():
            chunks = weights.iter_chunks(name) if parts is None else _float32_chunks(parts)
            tensor = NewTensor("float32", shape, chunks)
            done += write_torch(place / f"{key}.pt", tensor if weights.stage == 3 else {"cat_dim": 0, "param": tensor})
            on_bytes(done, total)
        if weights.stage < 3:
            write_torch(place / "step.pt", _scalar(steps))
    write_torch(out / "zero" / "optimizer_state.pt", _optimizer_state(weights, steps))
    for file in weights.files:
        if file.path.name.endswith("model_states.pt"):
            for record in file.records:
                file.check_record(record)
            shutil.copyfile(file.path, out / file.path.name)
            done += file.file_size
            on_bytes(done, total)
    weights.finish()
    (folder / "latest_universal").write_text(TAG)
    return done


def _float32_chunks(parts: list[Part]) -> Iterator[np.ndarray]:
    count = sum(part.count for part in parts)
    if not count:
        return
    dtype = parts[0].ref.dtype
    step = CHUNK_BYTES // DTYPES[dtype].itemsize
    for low in range(0, count, step):
        yield cast(read_parts(parts, low, min(step, count - low)), dtype, "float32")


def _widened(chunk: np.ndarray, dtype: str) -> np.ndarray:
    return cast(chunk, dtype, "float32") if DTYPES[dtype].is_float else chunk.astype(np.float32)


def optimizer_steps(weights: ZeroCheckpoint) -> float:
    """How often AdamW has stepped (check_same_step has compared the ranks)."""
    state = _first_optimizer(weights)[1]["state"]
    first = next(iter(state.values())).get("step")
    return float(_plain(_first_optimizer(weights)[0], first))


def _optimizer_state(weights: ZeroCheckpoint, steps: float) -> dict[str, Any]:
    file, optimizer = _first_optimizer(weights)
    groups = _plain(file, optimizer["param_groups"])
    inner = inner_optimizer(file)
    kept = ("dynamic_loss_scale", "overflow", "clip_grad")
    facts = {key: inner[key] for key in kept if key in inner and type(inner[key]) in _PLAIN}
    version = load_dict(file).get("ds_version") or inner.get("ds_version")
    state = {**facts, "ds_version": version, "param_groups": groups}
    if weights.stage == 3:
        state["optimizer_state_dict"] = {"state": {0: {"step": _scalar(steps)}}, "param_groups": groups}
    return state


def _first_optimizer(weights: ZeroCheckpoint) -> tuple[TorchFile, dict]:
    """The first rank's file and the state_dict of the torch optimizer in it."""
    file = next(file for file in weights.files if file.path.name.endswith("optim_states.pt"))
    inner = inner_optimizer(file)
    optimizer = inner.get("base_optimizer_state", inner.get("optimizer_state_dict"))
    if not isinstance(optimizer, dict) or not optimizer.get("state"):
        raise damaged(
            file.path,
            "no state_dict of a torch optimizer (elastic_checkpoint keeps no param_groups)",
            "save without elastic_checkpoint",
        )
    return file, optimizer


def _plain(file: TorchFile, value: Any) -> Any:
    """Numbers and words as they are, a one-element tensor as its number; UserError for anything else."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(file, item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(file, item) for key, item in value.items()}
    if isinstance(value, TensorRef) and value.numel == 1 and value.dtype in ("float32", "float64", "int64", "int32"):
        file.check_ref(value, "a setting of the optimizer")
        return file.read_elements(replace(value, shape=(1,), stride=(1,)), 0, 1)[0].item()
    raise damaged(file.path, f"{str(value)[:80]} among the settings of the optimizer, where a number should stand")


def _scalar(value: float) -> NewTensor:
    return NewTensor("float32", (), [np.array([value], np.float32)])
