"""Convert a training checkpoint to model.safetensors, config.json and tokenizer in bounded memory.

Only descriptions are unpickled, torch and deepspeed are not imported, and OUT appears when it is
complete.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmldlm import __version__
from mmldlm.checkpoints.formats.base import OpenedCheckpoint
from mmldlm.checkpoints.formats.dtypes import DTYPES, cast, count_nonfinite
from mmldlm.checkpoints.formats.open import open_source, reports_deletion
from mmldlm.checkpoints.formats.safetensors.writer import SafetensorsWriter
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.io.crc32 import RangedCrc32
from mmldlm.checkpoints.io.parallel import run_in_threads
from mmldlm.checkpoints.layout import (
    CONFIG_FILE,
    MODEL_CONFIG,
    RUN_CONFIG,
    SAFETENSORS_FILE,
    SAFETENSORS_INDEX,
)
from mmldlm.checkpoints.manifest import MANIFEST, read_manifest
from mmldlm.checkpoints.tensor_table import check_tensors
from mmldlm.convert.copy_files import check_links, copy_file, copy_tree, real_path
from mmldlm.convert.export_plan import (
    WIDE_FLOATS,
    ExportPlan,
    PlannedTensor,
    plan_tensors,
    split_into_files,
)
from mmldlm.convert.output_dir import TOKENIZER_FILES, write_atomically
from mmldlm.data.image_codec import FILES
from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.json_files import read_json

TOKENIZER_FOLDER = "tokenizer"


class Summary(NamedTuple):
    """What a conversion wrote.

    `num_parameters` counts stored elements of parameters, without buffers and aliases.
    """

    num_tensors: int
    num_aliases: int
    num_parameters: int
    num_bytes: int
    num_files: int
    seconds: float
    notes: list[str]


@reports_deletion
def convert(
    source: Path | str,
    out: Path | str,
    dtype: str = "fp32",
    force: bool = False,
    allow_nonfinite: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    ema: bool = False,
    shard_bytes: int | None = None,
    only: Sequence[str] = (),
    verify: bool = False,
    fsync: bool = True,
    keep_names: bool = False,
    strip_prefix: str = "",
    key: str | None = None,
) -> Summary:
    """Convert a checkpoint into the folder `out`.

    Args:
        source: any path that open_source accepts.
        out: the new folder.
        dtype: fp32, bf16, fp16 or keep (the dtype of each tensor in the source; masters are fp32).
            Applies to parameters; buffers keep their dtype, integers always do.
        force: replace `out` if it is an earlier conversion.
        allow_nonfinite: write NaN and infinite weights too.
        on_bytes: called with the bytes written so far and in total.
        ema: write the moving average of the weights instead of the weights.
        shard_bytes: split the output into files of at most this many bytes (a larger tensor has
            its own file), with model.safetensors.index.json; None for one file.
        only: names to write, as shell patterns (`blocks.0.*`); empty: all.
        verify: read the output back and compare every byte with what was written.
        fsync: flush everything to the disk before `out` appears.
        keep_names: see open_source.
        strip_prefix: removed from all names that begin with it.
        key: see open_source.

    Raises:
        UserError: the source is damaged or unsafe, `out` exists, the disk has no space, or values
            overflow `dtype`.
        MmldlmError: writing failed. In both cases `out` is unchanged.
    """
    started = time.monotonic()
    out = Path(os.path.abspath(out))
    opened = open_source(source, allow_nonfinite, with_ema=ema, keep_names=keep_names, key=key)
    with opened.weights as weights:
        check_links(opened)
        check_tensors(weights, opened.checkpoint)
        if ema:
            weights.use_ema()
        plan = plan_tensors(weights, dtype, only, strip_prefix)
        files = split_into_files(plan, shard_bytes)
        notes: list[str] = []
        num_bytes = 0

        def write(folder: Path) -> None:
            nonlocal num_bytes
            sums = _write_model(opened, plan, files, folder, ema, verify, on_bytes, fsync)
            notes.extend([*weights.notes, *copy_tokenizer_files(opened, plan.tensors, folder)])
            if verify:
                _verify(folder, sums)
            num_bytes = sum((folder / name).stat().st_size for name in files)

        # Tokenizer files may come from anywhere; next to them the marker permits --force to
        # replace the folder.
        marker = (
            {"to": "safetensors", "from": source_metadata(opened)}
            if model_folder(opened)
            else None
        )
        write_atomically(
            opened.checkpoint or weights.path, out, force, plan.nbytes, write, marker, fsync
        )
        infos = [planned.info for planned in plan.tensors.values()]
        return Summary(
            num_tensors=len(infos),
            num_aliases=len(plan.aliases),
            num_parameters=sum(info.numel for info in infos if info.kind != "buffer"),
            num_bytes=num_bytes,
            num_files=len(files),
            seconds=time.monotonic() - started,
            notes=notes,
        )


# -- writing
# -------------------------------------------------------------------------------------------------


def copy_planned(
    weights: WeightSource,
    plan: ExportPlan,
    write: Callable[[PlannedTensor, int, memoryview], None],
) -> None:
    """Call write(planned, first byte, bytes) for every planned tensor, in chunks of its output
    dtype.

    Several threads call it; the source is read in one sequential pass and verified before this
    returns.

    Raises:
        UserError: a damaged source, or values outside the range of the output dtype.
    """

    def copy(item: tuple[str, int, int]) -> None:
        name, low, high = item
        planned = plan.tensors[name]
        position = low * DTYPES[planned.dtype].itemsize
        for chunk, _ in weights.iter_range(name, low, high):
            converted = cast(chunk, planned.info.dtype, planned.dtype)
            _check_range(weights, planned, chunk, converted)
            view = memoryview(np.ascontiguousarray(converted).view(np.uint8))
            write(planned, position, view)
            position += len(view)

    names = (name for name in weights.reading_order() if name in plan.tensors)
    run_in_threads(copy, ((name, *bounds) for name in names for bounds in weights.ranges(name)))
    weights.finish()


def _write_model(
    opened: OpenedCheckpoint,
    plan: ExportPlan,
    files: dict[str, list[str]],
    folder: Path,
    ema: bool,
    verify: bool,
    on_bytes: Callable[[int, int], None],
    fsync: bool,
) -> dict[str, int]:
    """Write the files and their index; return the CRC-32 of every tensor (0 without `verify`)."""
    metadata = _metadata(opened, plan, ema)
    writers: list[SafetensorsWriter] = []
    writer_of: dict[str, SafetensorsWriter] = {}
    sums = {planned.name: RangedCrc32() for planned in plan.tensors.values()}
    try:
        for name, members in files.items():
            tensors = [plan.tensors[member] for member in members]
            entries = [(planned.name, planned.dtype, planned.info.shape) for planned in tensors]
            writers.append(SafetensorsWriter(folder / name, entries, metadata, fsync))
            writer_of.update({planned.name: writers[-1] for planned in tensors})
        done, total = 0, plan.nbytes
        lock = threading.Lock()

        def write(planned: PlannedTensor, position: int, view: memoryview) -> None:
            nonlocal done
            writer_of[planned.name].write(planned.name, position, view)
            if verify:
                sums[planned.name].add(position, view)
            with lock:
                done += len(view)
                on_bytes(done, total)

        copy_planned(opened.weights, plan, write)
        for writer in writers:
            writer.finish()
    finally:
        for writer in writers:
            writer.close()
    if len(files) > 1:
        weight_map = {
            plan.tensors[member].name: name
            for name, members in files.items()
            for member in members
        }
        index = {"metadata": {"total_size": plan.nbytes}, "weight_map": weight_map}
        (folder / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return {name: runs.value()[1] for name, runs in sums.items()}


def _metadata(opened: OpenedCheckpoint, plan: ExportPlan, ema: bool) -> dict[str, str]:
    entries = {
        "format": "pt",
        **source_metadata(opened),
        "ema": "true" if ema else None,
        "aliases": json.dumps(plan.aliases) if plan.aliases else None,
    }
    return {key: str(value) for key, value in entries.items() if value is not None}


def source_metadata(opened: OpenedCheckpoint) -> dict[str, object]:
    """Return what a conversion records of its source."""
    return {
        "mmldlm_version": __version__,
        "source": str(opened.checkpoint or opened.weights.path),
        "source_manifest_sha256": opened.manifest_sha256(),
        "engine": opened.engine,
        "stage": opened.weights.stage,
        "world_size": opened.world_size,
        "step": opened.step,
    }


def _check_range(
    weights: WeightSource, planned: PlannedTensor, chunk: np.ndarray, converted: np.ndarray
) -> None:
    if planned.dtype == planned.info.dtype or weights.allow_nonfinite:
        return
    count = count_nonfinite(converted, planned.dtype)
    if count > count_nonfinite(chunk, planned.info.dtype):
        raise UserError(
            f"weights in the range of {planned.dtype}",
            f"{count} elements of {planned.name} that overflow it",
            "use --dtype fp32 or bf16, or --allow-nonfinite",
        )


def _verify(folder: Path, sums: dict[str, int]) -> None:
    """Read the written tensors back.

    Raises:
        MmldlmError: one differs from what was written.
    """
    from mmldlm.checkpoints.formats.safetensors.reader import SafetensorsModel

    with SafetensorsModel.open(folder, allow_nonfinite=True) as written:
        for name, expected in sums.items():
            crc = 0
            for chunk in written.iter_chunks(name):
                crc = zlib.crc32(chunk.view(np.uint8), crc)
            if crc != expected:
                raise MmldlmError(
                    f"{name} read back from {folder} differs from what was written: the disk is"
                    " failing"
                )


def copy_tokenizer_files(
    opened: OpenedCheckpoint, tensors: dict[str, PlannedTensor], folder: Path
) -> list[str]:
    """Copy config.json, config.yaml, the tokenizer and the basis of images, if the source has
    them. Return notes.
    """
    if opened.checkpoint is None:
        source = model_folder(opened)
        if source is None:
            return [
                "no mmldlm checkpoint around these weights: no config.json and no tokenizer were"
                " written"
            ]
        config = _copy_config(source, source / CONFIG_FILE, tensors, folder)
        for path in sorted(source.iterdir()):
            if TOKENIZER_FILES.fullmatch(path.name) and path.name != CONFIG_FILE:
                (copy_tree if path.is_dir() else copy_file)(source, path, folder / path.name)
        if "_class_name" in config:
            return [
                "diffusers looks for diffusion_pytorch_model.safetensors: rename"
                f" {SAFETENSORS_FILE}"
            ]
        return []
    return _copy_listed_files(opened.checkpoint, tensors, folder)


def _copy_listed_files(
    checkpoint: Path, tensors: dict[str, PlannedTensor], folder: Path
) -> list[str]:
    """Copy what the manifest of a checkpoint of mmldlm lists beside the engine's files; return
    notes.

    A file that the manifest does not list is not the checkpoint's: it was added later, by
    whomever.
    """
    notes = []
    listed = read_manifest(checkpoint)["files"]
    if MODEL_CONFIG in listed:
        _copy_config(checkpoint, checkpoint / MODEL_CONFIG, tensors, folder)
    else:
        notes.append(f"{MODEL_CONFIG} is not in the checkpoint: no config.json was written")
    names = [
        name
        for name in listed
        if name in (RUN_CONFIG, *FILES) or name.startswith(f"{TOKENIZER_FOLDER}/")
    ]
    for name in names:
        copy_file(checkpoint, checkpoint / name, folder / name)
    if not any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in names):
        notes.append(f"the checkpoint has no {TOKENIZER_FOLDER}/: none was written")
    known = (MODEL_CONFIG, RUN_CONFIG, TOKENIZER_FOLDER, *FILES)
    for name in known:
        if os.path.lexists(checkpoint / name) and not any(
            name in (entry, entry.split("/")[0]) for entry in listed
        ):
            notes.append(
                f"{name} is not listed in {MANIFEST} and was not copied: it was added after the"
                " save"
            )
    return notes


def model_folder(opened: OpenedCheckpoint) -> Path | None:
    """Return the model folder of the weights, Hugging Face's or of `--to model.pt`; None for other
    sources.

    Trainers save the config of the model beside the folder of the ranks' files.
    """
    if opened.checkpoint is not None:
        return None
    path = opened.weights.path
    folder = path if path.is_dir() else path.parent
    if opened.weights.engine in ("safetensors", "model.pt"):
        return folder if os.path.lexists(folder / CONFIG_FILE) else None
    return next(
        (place for place in (folder, folder.parent) if _is_model_config(place / CONFIG_FILE)), None
    )


def _is_model_config(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        config = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and any(
        key in config for key in ("model_type", "architectures", "architecture")
    )


def _copy_config(root: Path, path: Path, tensors: dict[str, PlannedTensor], folder: Path) -> dict:
    """Copy a model's config as config.json, with the dtype of the written weights; return it."""
    config = read_json(real_path(root, path), "restore the file, or move it away")
    sizes: dict[str, int] = {}
    for planned in tensors.values():
        if planned.dtype in WIDE_FLOATS and planned.info.kind != "buffer":
            sizes[planned.dtype] = sizes.get(planned.dtype, 0) + planned.info.numel
    if sizes:
        # transformers has renamed the key and reads both.
        config["dtype" if "dtype" in config else "torch_dtype"] = max(
            sizes, key=lambda name: sizes[name]
        )
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    return config
