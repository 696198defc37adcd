"""Convert a checkpoint to another checkpoint: `mmldlm convert SRC OUT --to TARGET` with any TARGET
but safetensors.

model.pt holds weights alone, as does dcp if the source has no optimizer; the others are training
checkpoints.

A checkpoint of mmldlm stays one: OUT becomes a run's folder with one committed checkpoint, from
which training.resume continues. For other programs OUT holds the files alone: DeepSpeed's `latest`
and tag folder, or DCP's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mmldlm.checkpoints import commit
from mmldlm.checkpoints.convert import (
    DTYPE_NAMES,
    Summary,
    check_complete,
    plan_tensors,
    source_metadata,
)
from mmldlm.checkpoints.files.torch_file import corrupt_file_error
from mmldlm.checkpoints.files.torch_writer import TensorSpec
from mmldlm.checkpoints.formats import registry
from mmldlm.checkpoints.formats.base import (
    WEIGHT,
    WritePlan,
    WriteRequest,
    check_nothing_left,
    execute,
    read_through,
)
from mmldlm.checkpoints.formats.ema import list_ema_files
from mmldlm.checkpoints.formats.open import open_source, reports_deletion
from mmldlm.checkpoints.formats.optimizer import OptimizerMetadata
from mmldlm.checkpoints.formats.weight_source import OpenedCheckpoint, ReadOptions, WeightSource
from mmldlm.checkpoints.inspect import compare, summarize
from mmldlm.checkpoints.manifest import (
    ENGINE_FOLDER,
    SUB_GROUP_SIZE,
    TARGETS,
    ZERO_TAG,
    describe_file,
    read_manifest,
)
from mmldlm.checkpoints.output_folder import (
    check_links,
    copy_file,
    copy_tokenizer_files,
    write_atomically,
)
from mmldlm.checkpoints.tensor_table import check_tensors, tensor_table
from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils.formatting import count_noun
from mmldlm.utils.moments import MOMENTS
from mmldlm.utils.run_files import LATEST

MAX_WORLD_SIZE = 1 << 17
_RNG = re.compile(r"rng_state_rank(\d+)\.pt")


class _Target(NamedTuple):
    """Target of a conversion; see convert_state."""

    name: str
    world_size: int
    dtype: str | None
    only: Sequence[str]
    sub_group_size: int
    strip_prefix: str = ""


@reports_deletion
def convert_state(
    source: Path | str,
    out: Path | str,
    to: str,
    world_size: int | None = None,
    dtype: str | None = None,
    force: bool = False,
    allow_nonfinite: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    ema: bool = False,
    only: Sequence[str] = (),
    sub_group_size: int = SUB_GROUP_SIZE,
    verify: bool = False,
    fsync: bool = True,
    keep_names: bool = False,
    strip_prefix: str = "",
    key: str | None = None,
) -> Summary:
    """Convert a checkpoint of any engine into another format, with its optimizer.

    The steps are those of convert.

    Args:
        source: Any path that open_source accepts.
        out: New folder.
        to: One of TARGETS.
        world_size: Number of ranks of the new checkpoint; None for the source's (1 if not
            recorded).
        dtype: Dtype fp32, bf16 or fp16 of model.pt's parameters (default fp32), or of ZeRO's
            low-precision copy next to the fp32 masters (default: the source's). keep: the source's
            in both.
        force: Whether to replace an earlier conversion at `out`.
        allow_nonfinite: Whether to write NaN and infinite weights.
        on_bytes: Callback with the bytes written so far and in total.
        ema: For model.pt: whether to write the moving average of the weights.
        only: For model.pt: names to write, as shell patterns.
        sub_group_size: Size of ZeRO-3's sub-groups, as in the DeepSpeed config that will load it.
        verify: Whether to read the output back and compare every element.
        fsync: Whether to flush everything to the disk before `out` appears; a checkpoint of a
            run always is.
        keep_names: Whether to keep what torch's wrappers put before the names of a state_dict.
        strip_prefix: For model.pt: prefix that is removed from the names.
        key: State dict of a file or DCP folder that is the model, if it holds several.

    Raises:
        UserError: the source is damaged or incomplete for the target, `out` exists, or the disk
            has no space.
        MmldlmError: writing failed. In both cases `out` is unchanged.
    """
    started = time.monotonic()
    out = Path(os.path.abspath(out))
    _check_arguments(to, world_size)
    with_moments = to != "model.pt"
    opened = open_source(
        source,
        allow_nonfinite,
        with_ema=ema,
        with_moments=with_moments,
        keep_names=keep_names,
        key=key,
    )
    with opened.weights as weights:
        check_links(opened)
        check_tensors(weights, opened.checkpoint)
        if ema:
            weights.use_ema()
        target = _Target(
            to, _world_size(opened, world_size), dtype, only, sub_group_size, strip_prefix
        )
        optimizer = _optimizer_metadata(opened, to, dtype)
        plan: WritePlan | None = None
        notes = list(optimizer.notes) if optimizer else []

        def write(folder: Path) -> None:
            nonlocal plan
            plan = _write(opened, optimizer, target, folder, on_bytes, verify)
            if to in ("model.pt", "dcp"):
                notes.extend(copy_tokenizer_files(opened, None, folder))
            notes.extend(weights.notes)

        origin = opened.checkpoint or weights.path
        marker = {"to": to, "world_size": target.world_size, "from": source_metadata(opened)}
        write_atomically(origin, out, force, _bytes_needed(weights, to), write, marker, fsync)
        assert plan is not None
        stored = [info for info in weights.tensors.values() if not info.alias_of]
        return Summary(
            num_tensors=len(stored),
            num_aliases=len(weights.tensors) - len(stored),
            num_parameters=sum(info.numel for info in stored if info.kind != "buffer"),
            num_bytes=sum(file.tensor_bytes for file in plan.files),
            num_files=len(plan.files),
            seconds=time.monotonic() - started,
            notes=notes,
        )


def dry_run(
    source: Path | str,
    to: str,
    world_size: int | None = None,
    dtype: str | None = None,
    allow_nonfinite: bool = False,
    only: Sequence[str] = (),
    sub_group_size: int = SUB_GROUP_SIZE,
    keep_names: bool = False,
    strip_prefix: str = "",
    key: str | None = None,
) -> tuple[list[tuple[str, str]], int, int]:
    """Read and check what a conversion would read.

    Returns:
        Rows that describe the source, and the number of files and bytes that a conversion would
        write.

    Raises:
        UserError: as convert_state, except for OUT.
    """
    opened = open_source(
        source, allow_nonfinite, with_moments=to != "model.pt", keep_names=keep_names, key=key
    )
    with opened.weights as weights:
        check_links(opened)
        check_tensors(weights, opened.checkpoint)
        target = _Target(
            to, _world_size(opened, world_size), dtype, only, sub_group_size, strip_prefix
        )
        plan, _ = _plan(opened, _optimizer_metadata(opened, to, dtype), target, Path("OUT"))
        read_through(weights, plan)
        return summarize(opened), len(plan.files), plan.nbytes


def _check_arguments(to: str, world_size: int | None) -> None:
    if to not in TARGETS:
        raise UserError(
            f"--to safetensors or one of {', '.join(TARGETS)}", to, "choose one of them"
        )
    if world_size is not None and not 1 <= world_size <= MAX_WORLD_SIZE:
        raise UserError(
            f"--world from 1 to {MAX_WORLD_SIZE:,}", str(world_size), "give the number of ranks"
        )


def _world_size(opened: OpenedCheckpoint, requested: int | None) -> int:
    """Return the number of ranks of the new checkpoint.

    Raises:
        UserError: the source records one that no checkpoint has.
    """
    world_size = requested or opened.world_size or 1
    if world_size > MAX_WORLD_SIZE:
        found = f"{world_size:,} in {opened.checkpoint or opened.weights.path}"
        raise UserError(
            f"a recorded number of ranks up to {MAX_WORLD_SIZE:,}",
            found,
            "give the number with --world",
        )
    return world_size


def _write(
    opened: OpenedCheckpoint,
    optimizer: OptimizerMetadata | None,
    target: _Target,
    folder: Path,
    on_bytes: Callable[[int, int], None],
    verify: bool,
) -> WritePlan:
    """Write the checkpoint into `folder`, inside a committed checkpoint if the source is one;
    return the plan.
    """
    weights = opened.weights
    is_run = opened.checkpoint is not None and target.name not in ("model.pt", "dcp")
    pending = commit.begin(folder, opened.step or 0) if is_run else None
    engine_folder = folder if pending is None else pending.path / ENGINE_FOLDER
    plan, write_others = _plan(opened, optimizer, target, engine_folder)
    engine_folder.mkdir(parents=True, exist_ok=True)
    execute(weights, plan, on_bytes)
    write_others(engine_folder)
    if not target.only:
        copied = {(name, WEIGHT): weights.tensors[name].numel for name in plan.copied}
        check_nothing_left(weights, plan.covered() | copied, MOMENTS if optimizer else ())
    if verify:
        _verify(weights, engine_folder)
    if pending is not None:
        _copy_run(opened, pending.path, target.world_size)
        engine = target.name.replace("zero", "deepspeed ZeRO-")
        shapes = {name: info.shape for name, info in weights.tensors.items()}
        pending.commit(
            engine=engine,
            world_size=target.world_size,
            converted_from=opened.engine,
            tensors=tensor_table(shapes),
        )
    return plan


def _verify(source: WeightSource, folder: Path) -> None:
    """Read the output like any checkpoint and compare it element by element, moments included.

    Raises:
        MmldlmError: an element differs.
    """
    output = registry.open_path(
        folder, ReadOptions(source.options.allow_nonfinite, with_moments=bool(source.moments))
    )
    assert output is not None, f"nothing readable in {folder}"
    with output:
        difference = compare(source, output)
    if difference.any:
        names = [*difference.values, *difference.shapes, *difference.only_a, *difference.only_b]
        raise MmldlmError(
            f"{names[0]} read back from {folder} differs from what was written: the disk is"
            " failing"
        )


def _optimizer_metadata(
    opened: OpenedCheckpoint, to: str, dtype: str | None
) -> OptimizerMetadata | None:
    kinds = {info.kind for info in opened.weights.tensors.values()}
    if to == "model.pt" or (to == "dcp" and "parameter" in kinds):
        return None
    optimizer = registry.read_optimizer_metadata(opened)
    if dtype is not None and DTYPE_NAMES[dtype] is not None:
        optimizer.compute_dtype = DTYPE_NAMES[dtype]
    if optimizer.steps is None and opened.weights.moments and to not in ("dcp", "fsdp"):
        raise UserError(
            f"the step count of the optimizer in {opened.weights.path}",
            "moments without it",
            "give the checkpoint folder of the run, whose training_state.json has it",
        )
    if to == "universal" and optimizer.steps is None:
        raise UserError(
            f"a checkpoint with the state of an optimizer at {opened.weights.path}",
            f"{opened.engine} without the state of an optimizer that has stepped",
            "give a later checkpoint, or --to zero2, which does not need one",
        )
    if to == "universal" and not all(group.settings for group in optimizer.groups):
        raise UserError(
            f"optimizer settings in {opened.weights.path}, without which DeepSpeed cannot load a"
            " universal checkpoint",
            "none (elastic_checkpoint keeps no param_groups, and older DCP folders none either)",
            "save without elastic_checkpoint; training.resume of mmldlm needs no settings and no"
            " conversion",
        )
    if to == "universal" and (lost := _not_loaded_from_universal(opened.weights)):
        optimizer.notes.append(
            "DeepSpeed's own loader of universal checkpoints loads neither frozen weights nor"
            f" buffers ({lost} here): its model keeps those it was built with. They are in OUT,"
            " and mmldlm loads them; for DeepSpeed take --to zero1, zero2 or zero3, or load them"
            " yourself from --to safetensors"
        )
    if (
        to == "universal"
        and opened.weights.stage == 3
        and any("muon" in group.settings for group in optimizer.groups)
    ):
        optimizer.notes.append(
            "DeepSpeed's own ZeRO-3 loader cannot load this: it expects exp_avg_sq of all weights,"
            " and gives all groups the settings of the first. mmldlm can. For DeepSpeed convert"
            " --to zero2, then --to universal"
        )
    return optimizer


def _not_loaded_from_universal(weights: WeightSource) -> str:
    """Return the counts of what DeepSpeed leaves as it is when it loads a universal checkpoint; ""
    for nothing.
    """
    kinds = [info.kind for info in weights.tensors.values()]
    counts = [(kinds.count("frozen"), "frozen weight"), (kinds.count("buffer"), "buffer")]
    return " and ".join(count_noun(count, noun) for count, noun in counts if count)


def _plan(
    opened: OpenedCheckpoint, optimizer: OptimizerMetadata | None, target: _Target, folder: Path
) -> tuple[WritePlan, Callable[[Path], object]]:
    """Return the plan, and a function that writes all other files into the same folder."""
    weights, to = opened.weights, target.name
    tensors, names = None, None
    if to == "model.pt":
        planned = plan_tensors(weights, target.dtype or "fp32", target.only, target.strip_prefix)
        tensors = {
            name: TensorSpec(item.dtype, item.info.shape) for name, item in planned.tensors.items()
        }
        source_names = {item.name: name for name, item in planned.tensors.items()}
        names = {name: source_names[planned.aliases.get(name, name)] for name in planned.names}
    else:
        check_complete(weights, "take the weights that are there: --to safetensors --only '*'")
    request = WriteRequest(
        weights, to, folder, target.world_size, optimizer, target.sub_group_size, tensors, names
    )
    plan, write_others = registry.writer_of(to).plan_write(request)
    if not to.startswith("zero") or opened.checkpoint is not None:
        return plan, write_others
    return plan, lambda folder: (folder / LATEST).write_text(ZERO_TAG)


def _copy_run(opened: OpenedCheckpoint, folder: Path, world: int) -> None:
    """Copy everything of an mmldlm checkpoint that no engine wrote, and the moving average, which
    fits any engine.

    The copies are compared with the old manifest before the new one lists them.

    Raises:
        UserError: a file has changed since it was saved.
    """
    source = opened.checkpoint
    assert source is not None
    listed = read_manifest(source)["files"]
    averages = {
        path.relative_to(source).as_posix()
        for path in list_ema_files(source / ENGINE_FOLDER).values()
    }
    for name in listed:
        match = _RNG.fullmatch(name)
        if (name.startswith(f"{ENGINE_FOLDER}/") and name not in averages) or (
            match and int(match[1]) >= world
        ):
            continue
        copy_file(source, source / name, folder / name)
        if describe_file(folder / name)["crc32"] != listed[name]["crc32"]:
            raise corrupt_file_error(
                source / name,
                "it has changed since it was saved (its CRC-32 is not the manifest's)",
            )


def _bytes_needed(weights: WeightSource, to: str) -> int:
    """Estimate the bytes that will be written: masters and moments in fp32, and the 16-bit
    copy.
    """
    stored = [info for info in weights.tensors.values() if not info.alias_of]
    size = sum(info.nbytes for info in stored)
    if to == "model.pt":
        return size
    trained = sum(info.numel for info in stored if info.kind == "trainable")
    moments = sum(
        weights.tensors[name].numel for table in weights.moments.values() for name in table
    )
    return size + 4 * moments + (4 * trained if to.startswith("zero") else 0)
