"""Convert a checkpoint to another format, in bounded memory: to weights alone with config,
tokenizer and model card, or to a training checkpoint.

Torch and deepspeed are not imported, nothing is executed, and OUT appears when it is complete.
The order of reads:

1. Manifest (of mmldlm's own checkpoints): presence and size of every file, and the checksum of
   its last MiB.
2. Descriptions: the headers of all files, and of torch's zips the directory and `data.pkl`, are
   read, and no weight (of the optimizer tensors of one element, steps and rates, which must
   agree). They give the names, shapes and places of the tensors; names come from the format
   (DeepSpeed's `param_shapes`, DCP's `.metadata`, the keys of a state dict, there without the
   prefixes of torch's wrappers). Tensors are read here only where no name is recorded: ZeRO-0's
   masters, and weights that were saved twice, are recognized by their values.
3. Plan: what is written under which name and dtype. Links that leave the source, a
   manifest that lists other tensors, an OUT that exists and a full disk are errors before a
   byte is written.
4. Tensors: one pass in the order of the files. Each chunk is checked for NaN, infinity
   and, where ZeRO keeps a low-precision copy, against that copy; it is cast and written. At the
   end the rest of every record that was read is read too, and all CRCs are compared.
5. Comparison: every name of the source is in the output with as many elements, or was left out by
   `only`; `verify` reads the bytes again.
6. Small files: config, tokenizer, what turns latents into pixels, and the model card.

A checkpoint of mmldlm stays one if the target has an optimizer: OUT becomes a run's folder with
one committed checkpoint, from which training.resume continues. For other programs OUT holds the
files alone: DeepSpeed's `latest` and tag folder, or DCP's.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmldlm import __version__
from mmldlm.checkpoints import commit
from mmldlm.checkpoints.formats import registry
from mmldlm.checkpoints.formats.base import (
    WEIGHT,
    WritePlan,
    WriteRequest,
    check_nothing_left,
    execute,
)
from mmldlm.checkpoints.formats.export_plan import ExportPlan, check_values_present, plan_export
from mmldlm.checkpoints.formats.open import open_source, reports_deletion
from mmldlm.checkpoints.formats.optimizer import OptimizerMetadata
from mmldlm.checkpoints.formats.safetensors import SafetensorsModel, SafetensorsWriter
from mmldlm.checkpoints.formats.weight_source import OpenedCheckpoint, ReadOptions, WeightSource
from mmldlm.checkpoints.inspect import compare, summarize
from mmldlm.checkpoints.manifest import (
    ENGINE_FOLDER,
    EXPORTS,
    LATEST,
    MANIFEST,
    SUB_GROUP_SIZE,
    TARGETS,
    TENSOR_TABLE,
    ZERO_TAG,
    read_manifest,
    tensor_table,
)
from mmldlm.checkpoints.model_card import write_model_card
from mmldlm.checkpoints.output_folder import (
    check_links,
    check_target,
    copy_companion_files,
    partial_path,
    write_atomically,
)
from mmldlm.checkpoints.to_checkpoint import copy_run, list_run_files, optimizer_for
from mmldlm.config.renamed_keys import is_removed_weight
from mmldlm.distributed.collectives import Ranks
from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils.moments import MOMENTS

MAX_WORLD_SIZE = 1 << 17


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert.

    Attributes:
        to: One of TARGETS.
        world_size: Number of ranks of the new checkpoint; None for the source's (1 if not
            recorded).
        dtype: fp32, bf16, fp16 or keep. Of safetensors and model.pt the dtype of the parameters
            (None: fp32; keep: that of each tensor in the source, masters are fp32); buffers keep
            their dtype, integers always do. Of ZeRO that of the low-precision copy next to the
            fp32 masters (None and keep: the source's). Other targets round nothing, and take
            none.
        force: Whether to replace an earlier conversion.
        allow_nonfinite: Whether to write NaN and infinite weights.
        on_bytes: Callback with the bytes written so far and in total.
        ema: Whether to write the moving average in place of the weights (EXPORTS).
        shard_bytes: Maximum size of a safetensors file (a larger tensor has its own), with
            model.safetensors.index.json; None for one file.
        only: Names to write, as shell patterns such as `blocks.0.*`; empty: all (EXPORTS).
        strip_prefix: Prefix that is removed from all names that begin with it (EXPORTS).
        keep_names: Whether to keep what torch's wrappers put before the names of a state_dict.
        key: State dict of a file or DCP folder that is the model, if it holds several.
        sub_group_size: Size of ZeRO-3's sub-groups, as in the DeepSpeed config that will load it.
        verify: Whether to read the output back and compare it (not for model.pt).
        fsync: Whether to flush everything to the disk before the output appears; a checkpoint of a
            run always is.
    """

    to: str = "safetensors"
    world_size: int | None = None
    dtype: str | None = None
    force: bool = False
    allow_nonfinite: bool = False
    on_bytes: Callable[[int, int], None] = lambda done, total: None
    ema: bool = False
    shard_bytes: int | None = None
    only: Sequence[str] = ()
    strip_prefix: str = ""
    keep_names: bool = False
    key: str | None = None
    sub_group_size: int = SUB_GROUP_SIZE
    verify: bool = False
    fsync: bool = True


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


def convert(
    source: Path | str, out: Path | str, dtype: str | None = None, **options: Any
) -> Summary:
    """Convert a checkpoint to model.safetensors in the new folder `out`; see run_conversion."""
    return run_conversion(source, out, ConvertOptions(dtype=dtype, **options))


def convert_state(
    source: Path | str,
    out: Path | str,
    to: str,
    world_size: int | None = None,
    dtype: str | None = None,
    **options: Any,
) -> Summary:
    """Convert a checkpoint to any target, into the new folder `out`; see run_conversion."""
    return run_conversion(source, out, ConvertOptions(to, world_size, dtype, **options))


@reports_deletion
def run_conversion(source: Path | str, out: Path | str, options: ConvertOptions) -> Summary:
    """Convert a checkpoint into the folder `out`: open, check, plan, copy, compare.

    The module's docstring says which bytes are read when.

    Args:
        source: Any path that open_source accepts.
        out: New folder.
        options: How to convert.

    Raises:
        UserError: the source is damaged, unsafe or incomplete for the target, `out` exists, the
            disk has no space, or values overflow the dtype.
        MmldlmError: writing failed. In both cases `out` is unchanged.
    """
    started = time.monotonic()
    out = Path(os.path.abspath(out))
    # 1. and 2.: the manifest, and the descriptions of all tensors.
    opened = _open(source, options)
    with opened.weights as weights:
        # 3.: what is written.
        origin = opened.checkpoint or weights.path
        check_target(origin, out, options.force)
        planned = _plan(opened, options, partial_path(out))
        notes: list[str] = []

        def write(folder: Path) -> None:
            # 4. to 6.: tensors, comparison, small files.
            notes.extend(_write(opened, options, planned, folder, out.name))

        needed = planned.plan.nbytes + planned.plan.copied_bytes
        if _stays_run(opened, options):
            files = list_run_files(opened, planned.world_size)
            needed += sum(entry["bytes"] for entry in files.values())
        world = {} if options.to == "safetensors" else {"world_size": planned.world_size}
        marker = {"to": options.to, **world, "from": _source_metadata(opened)}
        write_atomically(origin, out, options.force, needed, write, marker, options.fsync)
        if planned.export is not None:
            infos = [tensor.info for tensor in planned.export.tensors.values()]
            num_aliases = len(planned.export.aliases)
        else:
            infos = [info for info in weights.tensors.values() if not info.alias_of]
            num_aliases = len(weights.tensors) - len(infos)
        return Summary(
            num_tensors=len(infos),
            num_aliases=num_aliases,
            num_parameters=sum(info.numel for info in infos if info.kind != "buffer"),
            num_bytes=planned.plan.nbytes,
            num_files=len(planned.plan.files),
            seconds=time.monotonic() - started,
            notes=notes,
        )


def dry_run(source: Path | str, options: ConvertOptions) -> list[tuple[str, str]]:
    """Read and check what a conversion would read.

    Returns:
        Rows (label, value) that describe the source and what would be written.

    Raises:
        UserError: as run_conversion, except for the output.
    """
    opened = _open(source, options)
    with opened.weights as weights:
        plan = _plan(opened, options, Path("OUT")).plan
        execute(weights, plan, write=False)
        size = f"{plan.nbytes:,} bytes ({plan.nbytes / 2**20:.1f} MiB)"
        return [*summarize(opened), ("would write", f"{len(plan.files)} files, {size}")]


def _open(source: Path | str, options: ConvertOptions) -> OpenedCheckpoint:
    if options.to not in TARGETS:
        raise UserError(f"--to one of {', '.join(TARGETS)}", options.to, "choose one of them")
    world = options.world_size
    if world is not None and not 1 <= world <= MAX_WORLD_SIZE:
        raise UserError(
            f"--world from 1 to {MAX_WORLD_SIZE:,}", str(world), "give the number of ranks"
        )
    return open_source(
        source,
        options.allow_nonfinite,
        with_ema=options.ema,
        with_moments=options.to not in EXPORTS,
        keep_names=options.keep_names,
        key=options.key,
    )


# -- The plan -------------------------------------------------------------------------------------


class _Planned(NamedTuple):
    """What a conversion writes.

    Attributes:
        world_size: Number of ranks of the new checkpoint.
        export: Plan of the weights; None for a target with an optimizer.
        optimizer: Optimizer metadata; None to write weights alone.
        folder: Folder of the tensor files.
        plan: Plan of the tensor files.
        write_others: Function that writes all other files of the format into that folder.
    """

    world_size: int
    export: ExportPlan | None
    optimizer: OptimizerMetadata | None
    folder: Path
    plan: WritePlan
    write_others: Callable[[Path], object]


def _plan(opened: OpenedCheckpoint, options: ConvertOptions, folder: Path) -> _Planned:
    weights = opened.weights
    check_links(opened)
    if opened.checkpoint is not None:
        _check_tensors(weights, opened.checkpoint)
    if options.ema:
        weights.use_ema()
    world_size, export, optimizer = _world_size(opened, options), None, None
    if options.to in EXPORTS:
        export = plan_export(weights, options.dtype or "fp32", options.only, options.strip_prefix)
    else:
        optimizer = optimizer_for(opened, options.to, options.dtype)
        check_values_present(
            weights, "take the weights that are there: --to safetensors --only '*'"
        )
    if _stays_run(opened, options):
        folder = commit.PendingCheckpoint(folder, opened.step or 0, Ranks()).path / ENGINE_FOLDER
    request = WriteRequest(
        source=weights,
        target=options.to,
        folder=folder,
        world_size=world_size,
        optimizer=optimizer,
        sub_group_size=options.sub_group_size,
        export=export,
        metadata=_header(opened, export, options.ema),
        shard_bytes=options.shard_bytes,
        verify=options.verify,
    )
    plan, write_others = registry.writer_of(options.to).plan_write(request)
    return _Planned(world_size, export, optimizer, folder, plan, write_others)


def _check_tensors(weights: WeightSource, checkpoint: Path) -> None:
    """Compare the weights of a checkpoint of mmldlm with the table in its manifest, which those of
    0.1.0 do not have, and note those that no model of today has.

    Raises:
        UserError: a weight is missing, is one too many, or has another shape.
    """
    removed = sorted({name.split(".")[0] for name in weights.tensors if is_removed_weight(name)})
    if removed:
        weights.notes.append(
            f"mmldlm does not read {', '.join(removed)}.* any more (docs/results/options.md)"
        )
    found = tensor_table({name: info.shape for name, info in weights.tensors.items()})
    expected = read_manifest(checkpoint).get(TENSOR_TABLE, found)
    if not isinstance(expected, dict):
        expected = {}
    for name in expected | found:
        shapes = [table.get(name, "no such weight") for table in (expected, found)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"{name}: {shapes[0]}, as {checkpoint / MANIFEST} says",
                f"{shapes[1]} in {weights.path}",
                "restore the checkpoint as it was saved; the two are of different runs",
            )


def _stays_run(opened: OpenedCheckpoint, options: ConvertOptions) -> bool:
    """Return whether the output is a run's folder with one checkpoint."""
    return opened.checkpoint is not None and options.to not in (*EXPORTS, "dcp")


def _world_size(opened: OpenedCheckpoint, options: ConvertOptions) -> int:
    """Return the number of ranks of the new checkpoint.

    Raises:
        UserError: the source records one that no checkpoint has.
    """
    world_size = options.world_size or opened.world_size or 1
    if world_size > MAX_WORLD_SIZE and options.to not in EXPORTS:
        raise UserError(
            f"a recorded number of ranks up to {MAX_WORLD_SIZE:,}",
            f"{world_size:,} in {opened.checkpoint or opened.weights.path}",
            "give the number with --world",
        )
    return world_size


def _header(opened: OpenedCheckpoint, export: ExportPlan | None, ema: bool) -> dict[str, str]:
    """Return the strings for the header of a safetensors file."""
    aliases = export.aliases if export is not None else {}
    entries = {
        "format": "pt",
        **_source_metadata(opened),
        "ema": "true" if ema else None,
        "aliases": json.dumps(aliases) if aliases else None,
    }
    return {key: str(value) for key, value in entries.items() if value is not None}


def _source_metadata(opened: OpenedCheckpoint) -> dict[str, object]:
    """Return what a conversion records of its source.

    OUT is made to be passed on: the source is RUN/checkpoints/STEP, or the last part of another
    path, and nothing of this machine's folders.
    """
    name = opened.weights.path.absolute().name
    if opened.checkpoint is not None:
        name = "/".join(opened.checkpoint.absolute().parts[-3:])
    return {
        "mmldlm_version": __version__,
        "source": name,
        "source_manifest_sha256": opened.manifest_sha256(),
        "engine": opened.engine,
        "stage": opened.weights.stage,
        "world_size": opened.world_size,
        "step": opened.step,
    }


# -- Writing --------------------------------------------------------------------------------------


def _write(
    opened: OpenedCheckpoint, options: ConvertOptions, planned: _Planned, folder: Path, name: str
) -> list[str]:
    """Write everything into `folder`, which will be called `name`; return notes."""
    weights, plan, to = opened.weights, planned.plan, options.to
    pending = commit.begin(folder, opened.step or 0) if _stays_run(opened, options) else None
    planned.folder.mkdir(parents=True, exist_ok=True)
    execute(weights, plan, options.on_bytes)
    planned.write_others(planned.folder)
    if to.startswith("zero") and pending is None:
        (folder / LATEST).write_text(ZERO_TAG)
    if not options.only:
        copied = {(key, WEIGHT): weights.tensors[key].numel for key in plan.copied}
        check_nothing_left(weights, plan.covered() | copied, MOMENTS if planned.optimizer else ())
    if options.verify and to == "safetensors":
        _compare_checksums(plan, folder)
    elif options.verify:
        _compare_elements(weights, planned.folder)
    notes = [*(planned.optimizer.notes if planned.optimizer else ()), *weights.notes]
    export = planned.export if to == "safetensors" else None
    if to in (*EXPORTS, "dcp"):
        dtype = export.dtype if export is not None else None
        notes += copy_companion_files(opened, dtype, folder)
    if export is not None and not options.only:
        stored = "the types of the checkpoint" if options.dtype == "keep" else options.dtype
        size = export.num_parameters
        write_model_card(opened, folder, name, size, stored or "fp32", is_average=options.ema)
    if pending is not None:
        kept = copy_run(opened, pending.path, planned.world_size)
        pending.commit(
            **kept,
            engine=to.replace("zero", "deepspeed ZeRO-"),
            world_size=planned.world_size,
            converted_from=opened.engine,
            tensors=tensor_table({key: info.shape for key, info in weights.tensors.items()}),
        )
    return notes


def _compare_checksums(plan: WritePlan, out: Path) -> None:
    """Read the written safetensors back.

    Raises:
        MmldlmError: a tensor differs from what was written.
    """
    with SafetensorsModel.open(out, ReadOptions(allow_nonfinite=True)) as output:
        files = (file for file in plan.files if isinstance(file, SafetensorsWriter))
        for name, expected in (item for file in files for item in file.crcs.items()):
            crc = 0
            for chunk in output.iter_chunks(name):
                crc = zlib.crc32(chunk.view(np.uint8), crc)
            if crc != expected.value()[1]:
                raise _failing_disk_error(name, out)


def _compare_elements(source: WeightSource, folder: Path) -> None:
    """Read the output like any checkpoint and compare it element by element, moments included.

    Raises:
        MmldlmError: an element differs.
    """
    options = ReadOptions(source.options.allow_nonfinite, with_moments=bool(source.moments))
    output = registry.open_path(folder, options)
    assert output is not None, f"nothing readable in {folder}"
    with output:
        difference = compare(source, output)
    if difference.any:
        names = [*difference.values, *difference.shapes, *difference.only_a, *difference.only_b]
        raise _failing_disk_error(names[0], folder)


def _failing_disk_error(name: str, folder: Path) -> MmldlmError:
    return MmldlmError(
        f"{name} read back from {folder} differs from what was written: the disk is failing"
    )
