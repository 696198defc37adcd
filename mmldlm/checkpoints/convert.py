"""Convert a training checkpoint to model.safetensors, config.json, tokenizer and model card in
bounded memory.

Torch and deepspeed are not imported, nothing is executed, and OUT appears when it is complete.
The order of reads, here and in to_checkpoint:

1. Manifest (of mmldlm's own checkpoints): presence, size and tail checksum of every file.
2. Descriptions: the pickles and headers of all files are read, and no weight (of the optimizer the
   one-element step counters, which must agree). They give the names,
   shapes and places of the tensors; names come from the format (DeepSpeed's `param_shapes`, DCP's
   `.metadata`, the keys of a state dict), without the prefixes of torch's wrappers. Tensors are
   read here only where no name is recorded: ZeRO-0's masters, and weights that were saved twice,
   are recognized by their values.
3. Plan: what is written under which name and dtype. Links that leave the source, names and shapes
   that are not the manifest's (an older checkpoint: not those of model_config.json), an OUT that
   exists and a full disk are errors before a byte is written.
4. Tensors: one sequential pass in the order of the files. Each chunk is checked for NaN, infinity
   and, where ZeRO keeps a low-precision copy, against that copy; it is cast and written. At the
   end the rest of every record that was read is read too, and all CRCs are compared.
5. Small files: config, tokenizer, what turns latents into pixels, and the model card.
6. Comparison: every name of the source is in the output with as many elements, or was left out by
   `only`; `verify` reads the bytes again.
"""

from __future__ import annotations

import fnmatch
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
from mmldlm.checkpoints.files.dtypes import DTYPES, cast, count_nonfinite, nbytes
from mmldlm.checkpoints.files.file_io import RangedCrc32, run_in_threads
from mmldlm.checkpoints.formats.base import WEIGHT, check_nothing_left
from mmldlm.checkpoints.formats.open import open_source, reports_deletion
from mmldlm.checkpoints.formats.safetensors import SafetensorsModel, SafetensorsWriter
from mmldlm.checkpoints.formats.weight_source import (
    OpenedCheckpoint,
    ReadOptions,
    TensorInfo,
    WeightSource,
)
from mmldlm.checkpoints.manifest import SAFETENSORS_FILE, SAFETENSORS_INDEX
from mmldlm.checkpoints.model_card import write_model_card
from mmldlm.checkpoints.output_folder import (
    check_links,
    copy_tokenizer_files,
    model_folder,
    write_atomically,
)
from mmldlm.checkpoints.tensor_table import check_tensors
from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils.formatting import join_some


class Summary(NamedTuple):
    """Summary of a conversion.

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
    """Convert a checkpoint into the folder `out`: open, check, plan, copy, compare.

    The module's docstring says which bytes are read when.

    Args:
        source: Any path that open_source accepts.
        out: New folder.
        dtype: Dtype of the parameters: fp32, bf16, fp16 or keep (that of each tensor in the
            source; masters are fp32). Buffers keep their dtype, integers always do.
        force: Whether to replace an earlier conversion at `out`.
        allow_nonfinite: Whether to write NaN and infinite weights.
        on_bytes: Callback with the bytes written so far and in total.
        ema: Whether to write the moving average of the weights in their place.
        shard_bytes: Maximum size of a file (a larger tensor has its own), with
            model.safetensors.index.json; None for one file.
        only: Names to write, as shell patterns (`blocks.0.*`); empty: all.
        verify: Whether to read the output back and compare every byte.
        fsync: Whether to flush everything to the disk before `out` appears.
        keep_names: Whether to keep what torch's wrappers put before the names of a state_dict.
        strip_prefix: Prefix that is removed from all names that begin with it.
        key: State dict of a file or DCP folder that is the model, if it holds several.

    Raises:
        UserError: the source is damaged or unsafe, `out` exists, the disk has no space, or values
            overflow `dtype`.
        MmldlmError: writing failed. In both cases `out` is unchanged.
    """
    started = time.monotonic()
    out = Path(os.path.abspath(out))
    # 1. and 2.: the manifest, and the descriptions of all tensors.
    opened = open_source(source, allow_nonfinite, with_ema=ema, keep_names=keep_names, key=key)
    with opened.weights as weights:
        # 3.: what is written.
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
            # 4. to 6.: tensors, small files, comparison.
            sums = _write_model(opened, plan, files, folder, ema, verify, on_bytes, fsync)
            notes.extend([*weights.notes, *copy_tokenizer_files(opened, plan.dtype, folder)])
            if verify:
                _verify(folder, sums)
            if not only:
                dtypes = "the types of the checkpoint" if dtype == "keep" else dtype
                stored = f"{dtypes}, the moving average" if ema else dtypes
                write_model_card(opened, folder, out.name, plan.num_parameters, stored)
                covered = {(name, WEIGHT): item.info.numel for name, item in plan.tensors.items()}
                check_nothing_left(weights, covered)
            num_bytes = sum((folder / name).stat().st_size for name in files)

        # Tokenizer files and cards may come from anywhere; next to them the marker permits --force
        # to replace the folder.
        marker = (
            {"to": "safetensors", "from": source_metadata(opened)}
            if opened.checkpoint or model_folder(opened)
            else None
        )
        write_atomically(
            opened.checkpoint or weights.path, out, force, plan.nbytes, write, marker, fsync
        )
        infos = [planned.info for planned in plan.tensors.values()]
        return Summary(
            num_tensors=len(infos),
            num_aliases=len(plan.aliases),
            num_parameters=plan.num_parameters,
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
        "source": _source_name(opened),
        "source_manifest_sha256": opened.manifest_sha256(),
        "engine": opened.engine,
        "stage": opened.weights.stage,
        "world_size": opened.world_size,
        "step": opened.step,
    }


def _source_name(opened: OpenedCheckpoint) -> str:
    """Return RUN/checkpoints/STEP, or the last part of another path: OUT is made to be passed on,
    and says nothing of this machine's folders.
    """
    if opened.checkpoint is None:
        return opened.weights.path.absolute().name
    return "/".join(opened.checkpoint.absolute().parts[-3:])


def _check_range(
    weights: WeightSource, planned: PlannedTensor, chunk: np.ndarray, converted: np.ndarray
) -> None:
    if planned.dtype == planned.info.dtype or weights.options.allow_nonfinite:
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
    with SafetensorsModel.open(folder, ReadOptions(allow_nonfinite=True)) as output:
        for name, expected in sums.items():
            crc = 0
            for chunk in output.iter_chunks(name):
                crc = zlib.crc32(chunk.view(np.uint8), crc)
            if crc != expected:
                raise MmldlmError(
                    f"{name} read back from {folder} differs from what was written: the disk is"
                    " failing"
                )


# -- The plan
# -------------------------------------------------------------------------------------------------

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "keep": None}
WIDE_FLOATS = ("float64", "float32", "float16", "bfloat16")


class PlannedTensor(NamedTuple):
    """One tensor to write.

    Attributes:
        info: Tensor in the source.
        name: Name in the output.
        dtype: Dtype in the output.
    """

    info: TensorInfo
    name: str
    dtype: str

    @property
    def nbytes(self) -> int:
        """Number of bytes in the output."""
        return nbytes(self.info.shape, self.dtype)


class ExportPlan(NamedTuple):
    """Plan of an export.

    Attributes:
        tensors: Source name -> what to write, in the model's order.
        aliases: Second name of a tied weight in the output -> its first name.
        names: All names in the output, in the model's order.
    """

    tensors: dict[str, PlannedTensor]
    aliases: dict[str, str]
    names: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(planned.nbytes for planned in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        """Number of elements of the parameters, without buffers and aliases."""
        infos = (planned.info for planned in self.tensors.values())
        return sum(info.numel for info in infos if info.kind != "buffer")

    @property
    def dtype(self) -> str | None:
        """The dtype of most elements of the parameters; None without parameters of wide floats."""
        sizes: dict[str, int] = {}
        for planned in self.tensors.values():
            if planned.dtype in WIDE_FLOATS and planned.info.kind != "buffer":
                sizes[planned.dtype] = sizes.get(planned.dtype, 0) + planned.info.numel
        return max(sizes, key=lambda name: sizes[name]) if sizes else None


def plan_tensors(
    weights: WeightSource, dtype: str, only: Sequence[str] = (), strip_prefix: str = ""
) -> ExportPlan:
    """Plan what to write of a source.

    Args:
        weights: Source of the weights.
        dtype: Key of DTYPE_NAMES.
        only: Names to write, as shell patterns; empty: all.
        strip_prefix: Prefix that is removed from the names that begin with it, before `only` is
            applied.

    Raises:
        UserError: an unknown dtype, a source without tensors, patterns or a prefix without a
            match, or 16-bit weights that would be written as fp32 though their masters are in the
            checkpoint.
    """
    if dtype not in DTYPE_NAMES:
        raise UserError(f"--dtype one of {', '.join(DTYPE_NAMES)}", dtype, "choose one of them")
    if all(info.alias_of for info in weights.tensors.values()):
        raise UserError(
            f"weights in {weights.path}",
            "a checkpoint without a single tensor",
            "check what was saved",
        )
    if not only:
        check_complete(weights, "--only '*' converts all others")
    bare = strip_names(weights, strip_prefix)
    chosen = {
        name
        for name in bare
        if not only or any(fnmatch.fnmatchcase(bare[name], pattern) for pattern in only)
    }
    # A tied weight is stored under its first name, and selected by any of its names.
    selected = {weights.tensors[name].alias_of or name for name in chosen}
    if not selected:
        raise UserError(
            f"a tensor that matches {' or '.join(only)}",
            "none",
            "see `mmldlm convert inspect` for the names",
        )
    target = DTYPE_NAMES[dtype]
    tensors, aliases = {}, {}
    for name, info in weights.tensors.items():
        if info.alias_of:
            if info.alias_of in selected and name in chosen:
                aliases[bare[name]] = bare[info.alias_of]
        elif name in selected:
            is_cast = target is not None and info.kind != "buffer" and info.dtype in WIDE_FLOATS
            tensors[name] = PlannedTensor(
                info, bare[name], target if is_cast and target else info.dtype
            )
    rounded = [
        name
        for name in weights.without_masters
        if name in tensors and tensors[name].dtype != tensors[name].info.dtype
    ]
    if rounded:
        low = {"bfloat16": "bf16", "float16": "fp16"}.get(tensors[rounded[0]].info.dtype, "keep")
        raise UserError(
            f"the fp32 masters of every weight in {weights.path}",
            f"none that are known to be those of {join_some(rounded)}:"
            f" {weights.optimizer_left_out}",
            f"--dtype {low} takes the 16-bit weights, --dtype keep these and the masters that are"
            " known; a checkpoint saved with"
            " client_state={'optimizer_param_names': [[names of group 0], ...]} has the names",
        )
    names = tuple(
        bare[name] for name in weights.tensors if name in tensors or bare[name] in aliases
    )
    return ExportPlan(tensors, aliases, names)


def check_complete(weights: WeightSource, fix: str) -> None:
    """Raise UserError if the checkpoint lacks the value of a tensor of the model."""
    if weights.absent:
        raise UserError(
            f"a value of every tensor of the model in {weights.path}",
            f"none of {join_some(weights.absent)}: DeepSpeed saves none of a trainable parameter"
            " that its optimizer does not have",
            fix,
        )


def strip_names(weights: WeightSource, prefix: str) -> dict[str, str]:
    """Return name -> name without `prefix`; the same name where it does not begin with it.

    Raises:
        UserError: no name begins with it, or two names would become one.
    """
    bare = {name: name.removeprefix(prefix) for name in weights.tensors}
    expected = f"names in {weights.path} that begin with --strip-prefix {prefix!r}"
    if prefix and all(name == new for name, new in bare.items()):
        raise UserError(
            expected, f"none, e.g. {join_some(bare)}", "see `mmldlm convert inspect` for the names"
        )
    if not prefix and "" in bare:
        raise UserError(
            f"names of tensors in {weights.path}",
            "an empty one",
            "give it a name in the model and save again",
        )
    if len(set(bare.values())) < len(bare) or "" in bare.values():
        raise UserError(
            f"{expected}, different without it",
            "two names that become one",
            "leave --strip-prefix out",
        )
    return bare


def split_into_files(plan: ExportPlan, shard_bytes: int | None) -> dict[str, list[str]]:
    """Return file name -> source names in it, in the model's order, filled greedily."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, planned in plan.tensors.items():
        if shard_bytes is not None and groups[-1] and size + planned.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += planned.nbytes
    if len(groups) == 1:
        return {SAFETENSORS_FILE: groups[0]}
    return {
        f"model-{index:05d}-of-{len(groups):05d}.safetensors": group
        for index, group in enumerate(groups, 1)
    }
