"""A training checkpoint becomes model.safetensors + config.json + tokenizer, tensor by tensor in bounded memory.

Nothing is unpickled but descriptions, torch and deepspeed are not imported, and OUT appears only when it is whole.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mmldlm import __version__
from mmldlm.checkpoints.formats.detect import INDEX, SINGLE, TOKENIZER_FILES
from mmldlm.checkpoints.formats.dtypes import DTYPES, cast, nonfinite_count
from mmldlm.checkpoints.formats.open import OpenedCheckpoint, open_source
from mmldlm.checkpoints.formats.safetensors.writer import SafetensorsWriter
from mmldlm.checkpoints.formats.weight_source import TensorInfo, WeightSource
from mmldlm.checkpoints.io.crc32 import RangedCrc32
from mmldlm.checkpoints.io.parallel import run_in_threads
from mmldlm.checkpoints.late_numpy import np
from mmldlm.checkpoints.layout import MODEL_CONFIG
from mmldlm.convert.config_compat import check_config
from mmldlm.convert.output_dir import write_atomically
from mmldlm.errors import MmldlmError, UserError

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "keep": None}
WIDE_FLOATS = ("float64", "float32", "float16", "bfloat16")


class Summary(NamedTuple):
    """What one conversion wrote. `num_parameters` counts stored elements of parameters, not buffers or aliases."""

    num_tensors: int
    num_aliases: int
    num_parameters: int
    num_bytes: int
    num_files: int
    seconds: float
    notes: list[str]


class PlannedTensor(NamedTuple):
    """One tensor to write: its name in the source, its name and dtype in the output."""

    info: TensorInfo
    name: str
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.info.numel * DTYPES[self.dtype].itemsize


class ExportPlan(NamedTuple):
    """Source name -> what to write, in the model's order; `aliases` are second names in the output -> names.

    `names` are all names in the output, in the model's order.
    """

    tensors: dict[str, PlannedTensor]
    aliases: dict[str, str]
    names: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(planned.nbytes for planned in self.tensors.values())


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
    is_flushed: bool = True,
) -> Summary:
    """Converts a checkpoint into the folder `out`.

    Args:
        source: whatever open_source takes.
        dtype: fp32, bf16, fp16 or keep (the dtype of each tensor in the source; masters are fp32). Applies to
            parameters; buffers keep their dtype, integers always do.
        force: replace `out` if it is an earlier conversion.
        on_bytes: called with bytes written so far and in all.
        ema: write the moving average of the weights instead of the weights.
        shard_bytes: cut the output into files of at most this many bytes of tensors (a larger tensor has one of its
            own), with model.safetensors.index.json; None: one file.
        only: names to write, as shell patterns (`blocks.0.*`); empty: all.
        verify: read the output back and compare every byte with what was written.
        is_flushed: wait until all of it is on the disk, before it gets its name.

    Raises:
        UserError: the source is damaged or unsafe, `out` exists, there is no space, or values do not fit `dtype`.
        MmldlmError: writing failed. In both cases `out` is as it was before.
    """
    started = time.monotonic()
    out = Path(os.path.abspath(out))
    opened = open_source(source, allow_nonfinite, with_ema=ema)
    with opened.weights as weights:
        check_config(weights, opened.checkpoint)
        if ema:
            weights.use_ema()
        plan = plan_tensors(weights, dtype, only)
        files = _shards(plan, shard_bytes)
        notes: list[str] = []
        num_bytes = 0

        def write(folder: Path) -> None:
            nonlocal num_bytes
            sums = _write_model(opened, plan, files, folder, ema, verify, on_bytes, is_flushed)
            notes.extend([*weights.notes, *copy_tokenizer_files(opened, plan.tensors, folder)])
            if verify:
                _verify(folder, sums)
            num_bytes = sum((folder / name).stat().st_size for name in files)

        # A tokenizer's files could be anybody's: beside them the marker says that all of it may be replaced.
        marker = {"to": "safetensors", "from": source_metadata(opened)} if model_folder(opened) else None
        write_atomically(opened.checkpoint or weights.path, out, force, plan.nbytes, write, marker, is_flushed)
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


# -- the plan ---------------------------------------------------------------------------------------------------------


def plan_tensors(weights: WeightSource, dtype: str, only: Sequence[str] = ()) -> ExportPlan:
    """What to write of a source.

    Raises:
        UserError: an unknown dtype, a source without tensors, or patterns that nothing fits.
    """
    if dtype not in DTYPE_NAMES:
        raise UserError(f"--dtype one of {', '.join(DTYPE_NAMES)}", dtype, "choose one of them")
    if all(info.alias_of for info in weights.tensors.values()):
        raise UserError(f"weights in {weights.path}", "a checkpoint without a single tensor", "check what was saved")
    # DistributedDataParallel puts "module." before every name; a model may have a child of that name, so all or none.
    prefix = "module." if all(name.startswith("module.") for name in weights.tensors) else ""
    bare = {name: name.removeprefix(prefix) for name in weights.tensors}
    chosen = {name for name in bare if not only or any(fnmatch.fnmatchcase(bare[name], pattern) for pattern in only)}
    # A tied weight is stored under its first name: it is wanted where any of its names is.
    wanted = {weights.tensors[name].alias_of or name for name in chosen}
    if not wanted:
        raise UserError(f"a tensor that fits {' or '.join(only)}", "none", "see `mmldlm convert inspect` for the names")
    target = DTYPE_NAMES[dtype]
    tensors, aliases = {}, {}
    for name, info in weights.tensors.items():
        if info.alias_of:
            if info.alias_of in wanted and name in chosen:
                aliases[bare[name]] = bare[info.alias_of]
        elif name in wanted:
            is_cast = target is not None and info.kind != "buffer" and info.dtype in WIDE_FLOATS
            tensors[name] = PlannedTensor(info, bare[name], target if is_cast and target else info.dtype)
    names = tuple(bare[name] for name in weights.tensors if name in tensors or bare[name] in aliases)
    return ExportPlan(tensors, aliases, names)


def _shards(plan: ExportPlan, shard_bytes: int | None) -> dict[str, list[str]]:
    """File name -> source names in it, in the model's order, filled greedily."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, planned in plan.tensors.items():
        if shard_bytes is not None and groups[-1] and size + planned.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += planned.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


# -- writing ----------------------------------------------------------------------------------------------------------


def copy_planned(
    weights: WeightSource,
    plan: ExportPlan,
    write: Callable[[PlannedTensor, int, memoryview], None],
    is_direct: bool = False,
) -> None:
    """Calls write(planned, first byte, bytes) for every planned tensor, chunk by chunk in its output dtype.

    Several threads do; the source is read in one sweep, and all of it is proven when this returns.

    Raises:
        UserError: a damaged source, or values that do not fit the output dtype.
    """

    def copy(item: tuple[str, int, int]) -> None:
        name, low, high = item
        planned = plan.tensors[name]
        position = low * DTYPES[planned.dtype].itemsize
        is_copied = weights.is_stored_as(name, planned.dtype)
        for view in weights.copies(name, low, high) if is_copied else _cast(weights, planned, low, high):
            write(planned, position, view)
            position += len(view)

    if not all(weights.is_stored_as(name, planned.dtype) for name, planned in plan.tensors.items()):
        np.ndarray  # noqa: B018  # imported now: in a thread it would hold up the others
    wanted = (name for name in weights.reading_order() if name in plan.tensors)
    run_in_threads(copy, ((name, *span) for name in wanted for span in weights.spans(name)), is_direct)
    weights.finish()


def _cast(weights: WeightSource, planned: PlannedTensor, low: int, high: int) -> Iterator[memoryview]:
    """The bytes of a tensor's elements [low, high) in its output dtype, chunk by chunk."""
    for chunk, _ in weights.pieces(planned.info.name, low, high):
        converted = cast(chunk, planned.info.dtype, planned.dtype)
        _check_fits(weights, planned, converted)
        yield memoryview(np.ascontiguousarray(converted).view(np.uint8))


def _write_model(
    opened: OpenedCheckpoint,
    plan: ExportPlan,
    files: dict[str, list[str]],
    folder: Path,
    ema: bool,
    verify: bool,
    on_bytes: Callable[[int, int], None],
    is_flushed: bool,
) -> dict[str, int]:
    """Writes the files and their index; returns the CRC-32 of every tensor where they are to be verified."""
    metadata = _metadata(opened, plan, ema)
    writers: list[SafetensorsWriter] = []
    writer_of: dict[str, SafetensorsWriter] = {}
    sums = {planned.name: RangedCrc32() for planned in plan.tensors.values()}
    try:
        for name, members in files.items():
            tensors = [plan.tensors[member] for member in members]
            entries = [(planned.name, planned.dtype, planned.info.shape) for planned in tensors]
            writers.append(SafetensorsWriter(folder / name, entries, metadata, is_flushed))
            writer_of.update({planned.name: writers[-1] for planned in tensors})
        done, total = 0, plan.nbytes
        counting = threading.Lock()

        def write(planned: PlannedTensor, position: int, view: memoryview) -> None:
            nonlocal done
            writer_of[planned.name].write(planned.name, position, view)
            if verify:
                sums[planned.name].add(position, view)
            with counting:
                done += len(view)
                on_bytes(done, total)

        copy_planned(opened.weights, plan, write, any(writer.is_direct for writer in writers))
        for writer in writers:
            writer.finish()
    finally:
        for writer in writers:
            writer.close()
    if len(files) > 1:
        weight_map = {plan.tensors[member].name: name for name, members in files.items() for member in members}
        index = {"metadata": {"total_size": plan.nbytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return {name: runs.value()[1] for name, runs in sums.items()}


def _metadata(opened: OpenedCheckpoint, plan: ExportPlan, ema: bool) -> dict[str, str]:
    facts = {
        "format": "pt",
        **source_metadata(opened),
        "ema": "true" if ema else None,
        "aliases": json.dumps(plan.aliases) if plan.aliases else None,
    }
    return {key: str(value) for key, value in facts.items() if value is not None}


def source_metadata(opened: OpenedCheckpoint) -> dict[str, object]:
    """What a conversion says of where it came from."""
    return {
        "mmldlm_version": __version__,
        "source": str(opened.checkpoint or opened.weights.path),
        "source_manifest_sha256": opened.manifest_sha256(),
        "engine": opened.engine,
        "stage": opened.weights.stage,
        "world_size": opened.world_size,
        "step": opened.step,
    }


def _check_fits(weights: WeightSource, planned: PlannedTensor, converted: np.ndarray) -> None:
    if planned.dtype == planned.info.dtype or weights.allow_nonfinite:
        return
    lost = nonfinite_count(converted, planned.dtype)
    if lost:
        raise UserError(
            f"the weights to fit {planned.dtype}",
            f"{lost} elements of {planned.name} that overflow it",
            "use --dtype fp32 or bf16, or --allow-nonfinite",
        )


def _verify(folder: Path, sums: dict[str, int]) -> None:
    """Reads the written tensors back; MmldlmError where one is not what was written."""
    from mmldlm.checkpoints.formats.safetensors.reader import SafetensorsModel

    with SafetensorsModel.open(folder, allow_nonfinite=True) as written:
        for name, expected in sums.items():
            found = 0
            for chunk in written.iter_chunks(name):
                found = zlib.crc32(chunk.view(np.uint8), found)
            if found != expected:
                raise MmldlmError(f"{name} read back from {folder} differs from what was written: the disk is failing")


def copy_tokenizer_files(opened: OpenedCheckpoint, tensors: dict[str, PlannedTensor], folder: Path) -> list[str]:
    """config.json, the run's config.yaml and the tokenizer, as far as the source has them. Returns notes."""
    if opened.checkpoint is None:
        beside = model_folder(opened)
        if beside is None:
            return ["no mmldlm checkpoint around these weights: no config.json and no tokenizer were written"]
        _copy_config(beside / "config.json", tensors, folder)
        for path in sorted(beside.iterdir()):
            if TOKENIZER_FILES.fullmatch(path.name) and path.name != "config.json":
                (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
        return []
    notes = []
    config_path = opened.checkpoint / MODEL_CONFIG
    if config_path.is_file():
        _copy_config(config_path, tensors, folder)
    else:
        notes.append(f"{config_path.name} is not in the checkpoint: no config.json was written")
    if (opened.checkpoint / "config.yaml").is_file():
        shutil.copyfile(opened.checkpoint / "config.yaml", folder / "config.yaml")
    if (opened.checkpoint / "tokenizer").is_dir():
        shutil.copytree(opened.checkpoint / "tokenizer", folder / "tokenizer")
    else:
        notes.append("the checkpoint has no tokenizer/: none was written")
    return notes


def model_folder(opened: OpenedCheckpoint) -> Path | None:
    """The model's folder that the weights lie in, Hugging Face's or of `--to model.pt`; None for other sources."""
    path = opened.weights.path
    folder = path if path.is_dir() else path.parent
    is_file_of_weights = opened.checkpoint is None and opened.weights.engine in ("safetensors", "model.pt")
    return folder if is_file_of_weights and (folder / "config.json").is_file() else None


def _copy_config(path: Path, tensors: dict[str, PlannedTensor], folder: Path) -> None:
    """A model's config as config.json, with the dtype that its weights have now."""
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("no JSON object")
    except ValueError as error:
        raise UserError(f"the config of a model in {path}", str(error), "restore the file, or move it away") from error
    sizes: dict[str, int] = {}
    for planned in tensors.values():
        if planned.dtype in WIDE_FLOATS and planned.info.kind != "buffer":
            sizes[planned.dtype] = sizes.get(planned.dtype, 0) + planned.info.numel
    if sizes:
        # transformers has renamed it; it reads both.
        config["dtype" if "dtype" in config else "torch_dtype"] = max(sizes, key=lambda name: sizes[name])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
