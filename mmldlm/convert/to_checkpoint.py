"""`mmldlm convert SRC OUT --to TARGET` where TARGET is anything but safetensors.

model.pt holds weights alone, dcp too where nothing is known of an optimizer; the others are training checkpoints.

A checkpoint of mmldlm stays one: OUT is then a run's folder with one committed checkpoint in it, and training.resume
goes on from OUT. Of other programs' OUT holds the files alone: DeepSpeed's `latest` and tag folder, or DCP's.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mmldlm.checkpoints import commit
from mmldlm.checkpoints.formats.dcp.writer import plan_dcp, write_descriptions
from mmldlm.checkpoints.formats.deepspeed.universal_writer import plan_universal, write_rest
from mmldlm.checkpoints.formats.deepspeed.writer import SUB_GROUP_SIZE, ZeroTarget, plan_zero
from mmldlm.checkpoints.formats.ema import list_ema
from mmldlm.checkpoints.formats.model_pt.writer import plan_model_file, plan_plain
from mmldlm.checkpoints.formats.open import MODEL_FILE, OpenedCheckpoint, open_folder, open_source
from mmldlm.checkpoints.formats.optimizer_metadata import OptimizerMetadata, training_facts
from mmldlm.checkpoints.formats.torch_save.pickler import TensorSpec
from mmldlm.checkpoints.formats.torch_save.reader import corrupt_file_error
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.formats.write_plan import WritePlan, execute, verify
from mmldlm.checkpoints.manifest import describe_file, read_manifest
from mmldlm.convert.config_compat import check_config
from mmldlm.convert.inspect import compare, summarize
from mmldlm.convert.output_dir import write_atomically
from mmldlm.convert.to_safetensors import DTYPE_NAMES, Summary, copy_tokenizer_files, plan_tensors, source_metadata
from mmldlm.errors import MmldlmError, UserError

TARGETS = ("model.pt", "dcp", "universal", "zero1", "zero2", "zero3", "fsdp", "ddp")
TAG = "zero"  # the tag folder of DeepSpeed files, as mmldlm's own engine names it

_RNG = re.compile(r"rng_state_rank(\d+)\.pt")
_Writer = Callable[[Path], object]


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
    is_flushed: bool = True,
) -> Summary:
    """Converts a checkpoint of any engine into another layout, with its optimizer.

    Args:
        source: whatever open_source takes. to: see TARGETS.
        world_size: ranks of the new checkpoint; None: as many as the source's (1 where nobody knows).
        dtype: fp32, bf16, fp16: of model.pt's parameters (default fp32), or of the copy beside the fp32 masters that
            ZeRO computes with (default: the source's). keep: the source's in both.
        ema, only: see conversion.convert; for model.pt alone.
        sub_group_size: ZeRO-3's, as in the DeepSpeed config that will load it.
        verify: read the output back and compare every element with the source.
        is_flushed: see conversion.convert. A checkpoint that mmldlm will resume from is flushed in any case.

    Raises:
        UserError: the source is damaged or lacks what the target needs, `out` exists, there is no space.
        MmldlmError: writing failed. In both cases `out` is as it was before.
    """
    started = time.monotonic()
    out = Path(os.path.abspath(out))
    if to not in TARGETS:
        raise UserError(f"--to safetensors or one of {', '.join(TARGETS)}", to, "choose one of them")
    if world_size is not None and world_size < 1:
        raise UserError("--world of at least 1", str(world_size), "give the number of ranks")
    with_moments = to != "model.pt" and (to != "dcp" or _tells_trained(source))
    opened = open_source(source, allow_nonfinite, with_ema=ema, with_moments=with_moments)
    with opened.weights as weights:
        check_config(weights, opened.checkpoint)
        if ema:
            weights.use_ema()
        world = world_size or opened.world_size or 1
        training = _facts(opened, to, dtype)
        total, num_files = 0, 0
        notes = list(training.notes) if training else []

        def write(folder: Path) -> None:
            nonlocal total, num_files
            if to in ("model.pt", "dcp"):
                place, pending = folder, None
            else:
                place, pending = _begin(opened, folder)
            plan, write_more = _plan(opened, training, to, world, dtype, only, place, sub_group_size)
            place.mkdir(parents=True, exist_ok=True)
            total, num_files = execute(weights, plan, on_bytes, is_flushed), len(plan.files)
            write_more(place)
            if verify:
                _verify(weights, place)
            if pending is not None:
                _copy_run(opened, pending.path, world)
                pending.commit(engine=_describe(to), world_size=world, converted_from=opened.engine)
            elif to in ("model.pt", "dcp"):
                notes.extend(copy_tokenizer_files(opened, {}, folder))
            notes.extend(weights.notes)

        origin = opened.checkpoint or weights.path
        marker = {"to": to, "world_size": world, "from": source_metadata(opened)}
        write_atomically(origin, out, force, _bytes_needed(weights, to), write, marker, is_flushed)
        stored = [info for info in weights.tensors.values() if not info.alias_of]
        return Summary(
            num_tensors=len(stored),
            num_aliases=len(weights.tensors) - len(stored),
            num_parameters=sum(info.numel for info in stored if info.kind != "buffer"),
            num_bytes=total,
            num_files=num_files,
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
) -> tuple[list[tuple[str, str]], int, int]:
    """Reads and checks what a conversion would read: (facts of the source, number of files and bytes it would write).

    Raises:
        UserError: as convert_state, OUT aside.
    """
    with_moments = to != "model.pt" and (to != "dcp" or _tells_trained(source))
    opened = open_source(source, allow_nonfinite, with_moments=with_moments)
    with opened.weights as weights:
        check_config(weights, opened.checkpoint)
        training = _facts(opened, to, dtype)
        world = world_size or opened.world_size or 1
        plan, _ = _plan(opened, training, to, world, dtype, only, Path("OUT"), sub_group_size)
        verify(weights, plan)
        return summarize(opened), len(plan.files), plan.nbytes


def _tells_trained(source: Path | str) -> bool:
    """Whether a source says which weights were trained, without which nobody knows whose its moments are."""
    with open_source(source, allow_nonfinite=True).weights as weights:
        return not any(info.kind == "parameter" for info in weights.tensors.values())


def _verify(source: WeightSource, folder: Path) -> None:
    """Reads what was written as any reader would, and compares it element by element, moments included."""
    written = open_folder(folder, source.allow_nonfinite, with_moments=bool(source.moments))
    assert written is not None, f"nothing readable in {folder}"
    with written:
        found = compare(source, written)
    if found.any:
        odd = [*found.values, *found.shapes, *found.only_a, *found.only_b]
        raise MmldlmError(f"{odd[0]} read back from {folder} differs from what was written: the disk is failing")


def _facts(opened: OpenedCheckpoint, to: str, dtype: str | None) -> OptimizerMetadata | None:
    kinds = {info.kind for info in opened.weights.tensors.values()}
    if to == "model.pt" or (to == "dcp" and "parameter" in kinds):
        return None
    optimizer = training_facts(opened)
    if dtype is not None and DTYPE_NAMES[dtype] is not None:
        optimizer.compute_dtype = DTYPE_NAMES[dtype]
    if optimizer.steps is None and opened.weights.moments and to not in ("dcp", "fsdp"):
        raise UserError(
            f"the step count of AdamW in {opened.weights.path}",
            "none beside its moments",
            "give the checkpoint folder of the run, whose training_state.json has it",
        )
    if to == "universal" and optimizer.steps is None:
        raise UserError(
            f"a checkpoint with the state of an optimizer at {opened.weights.path}",
            f"{opened.engine} without the state of an optimizer that has stepped",
            "give a later checkpoint, or --to zero2, which may be without",
        )
    if to == "universal" and not all(group.settings for group in optimizer.groups):
        raise UserError(
            f"AdamW's settings in {opened.weights.path}, without which DeepSpeed cannot load a universal checkpoint",
            "none (elastic_checkpoint keeps no param_groups, and older DCP folders none either)",
            "save without elastic_checkpoint; training.resume of mmldlm needs no settings and no conversion",
        )
    return optimizer


def _plan(
    opened: OpenedCheckpoint,
    optimizer: OptimizerMetadata | None,
    to: str,
    world: int,
    dtype: str | None,
    only: Sequence[str],
    folder: Path,
    sub_group_size: int,
) -> tuple[WritePlan, _Writer]:
    """The plan, and what writes all that is not in it into the same folder."""
    weights = opened.weights
    if to == "model.pt":
        planned = plan_tensors(weights, dtype or "fp32", only)
        tensors = {name: TensorSpec(item.dtype, item.info.shape) for name, item in planned.tensors.items()}
        stored = {item.name: name for name, item in planned.tensors.items()}
        names = {name: stored[planned.aliases.get(name, name)] for name in planned.names}
        return plan_model_file(weights, tensors, names, folder / MODEL_FILE), lambda folder: None
    if to in ("dcp", "fsdp"):
        plan, metadata = plan_dcp(weights, optimizer, world, folder)
        return plan, lambda folder: write_descriptions(weights, optimizer, metadata, folder)
    assert optimizer is not None, f"{to} without the facts of a training"
    if to == "ddp":
        return plan_plain(weights, optimizer, folder), lambda folder: None
    if to == "universal":
        return plan_universal(weights, optimizer, folder), lambda folder: write_rest(weights, optimizer, folder)
    target = ZeroTarget(int(to.removeprefix("zero")), world, sub_group_size)

    def write_latest(folder: Path) -> None:
        if opened.checkpoint is None:
            (folder / "latest").write_text(TAG)

    return plan_zero(weights, optimizer, target, folder / TAG), write_latest


def _begin(opened: OpenedCheckpoint, folder: Path) -> tuple[Path, commit.PendingCheckpoint | None]:
    """Where the engine's files go, and the checkpoint around them where the source had one."""
    if opened.checkpoint is None:
        return folder, None
    pending = commit.begin(folder, opened.step or 0)
    return pending.path / "engine", pending


def _copy_run(opened: OpenedCheckpoint, folder: Path, world: int) -> None:
    """Everything of an mmldlm checkpoint that no engine wrote, and the moving average, whose parts fit any engine.

    The new manifest vouches for it, so it is compared with the old one.
    """
    source = opened.checkpoint
    assert source is not None
    listed = read_manifest(source)["files"]
    averages = {path.relative_to(source).as_posix() for path in list_ema(source / "engine").values()}
    for name in listed:
        found = _RNG.fullmatch(name)
        if (name.startswith("engine/") and name not in averages) or (found and int(found[1]) >= world):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)
        if describe_file(folder / name)["crc32"] != listed[name]["crc32"]:
            raise corrupt_file_error(
                source / name, "it has changed since it was saved (its CRC-32 is not the manifest's)"
            )


def _describe(to: str) -> str:
    return f"deepspeed ZeRO-{to[4:]}" if to.startswith("zero") else to


def _bytes_needed(weights: WeightSource, to: str) -> int:
    """About what will be written: masters and moments in fp32, and the 16-bit copy."""
    stored = [info for info in weights.tensors.values() if not info.alias_of]
    size = sum(info.nbytes for info in stored)
    if to == "model.pt":
        return size
    trained = sum(info.numel for info in stored if info.kind == "trainable")
    return size + 8 * trained * bool(weights.moments) + (4 * trained if to.startswith("zero") else 0)
