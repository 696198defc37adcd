"""`mmldlm convert`: a training checkpoint becomes model.safetensors + config.json + tokenizer, in bounded memory.

Nothing is unpickled but descriptions, torch and deepspeed are not imported, and OUT appears only when it is whole.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmldlm import __version__
from mmldlm.checkpoints.commit import fsync_path
from mmldlm.checkpoints.dtypes import DTYPES, cast, nonfinite_count
from mmldlm.checkpoints.manifest import read_manifest
from mmldlm.checkpoints.safetensors_file import SafetensorsWriter
from mmldlm.checkpoints.sources import Opened, open_source
from mmldlm.checkpoints.weights import TensorInfo, WeightSource
from mmldlm.errors import MmldlmError, UserError

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "keep": None}
MODEL = "model.safetensors"
# What a conversion may consist of: only a folder of nothing else is ever deleted by --force.
OUTPUTS = {MODEL, "config.json", "config.yaml", "tokenizer"}
WIDE_FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Summary:
    """What one conversion wrote. `num_parameters` counts stored elements of parameters, not buffers or aliases."""

    num_tensors: int
    num_aliases: int
    num_parameters: int
    num_bytes: int
    seconds: float
    notes: list[str]


def convert(
    source: Path | str,
    out: Path | str,
    dtype: str = "fp32",
    force: bool = False,
    allow_nonfinite: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Converts a checkpoint into the folder `out`.

    Args:
        source: RUN, RUN/latest, a step folder, a DeepSpeed folder or a model.pt.
        dtype: fp32, bf16, fp16 or keep (the dtype of each tensor in the source; masters are fp32). Applies to
            parameters; buffers keep their dtype, integers always do.
        force: replace `out` if it is an earlier conversion.
        on_bytes: called with bytes written so far and in all.

    Raises:
        UserError: the source is damaged or unsafe, `out` exists, there is no space, or values do not fit `dtype`.
        MmldlmError: writing failed. In both cases `out` is as it was before.
    """
    started = time.monotonic()
    out = Path(os.path.abspath(out))
    if dtype not in DTYPE_NAMES:
        raise UserError(f"--dtype one of {', '.join(DTYPE_NAMES)}", dtype, "choose one of them")
    opened = open_source(source, allow_nonfinite)
    with opened.weights as weights:
        _check_target(opened, out, force)
        partial = out.with_name(out.name + ".partial")
        _check_replaceable(partial)
        plan = plan_tensors(weights, dtype)
        _check_space(out.parent, plan)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            num_bytes = _write_model(opened, plan, partial / MODEL, on_bytes)
            notes = [*weights.notes, *_copy_companions(opened, plan, partial)]
            _move_into_place(partial, out)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise MmldlmError(f"writing {out} failed: {error}") from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        stored = [info for info in weights.tensors.values() if info.kind != "alias"]
        return Summary(
            num_tensors=len(stored),
            num_aliases=len(weights.tensors) - len(stored),
            num_parameters=sum(info.numel for info in stored if info.kind != "buffer"),
            num_bytes=num_bytes,
            seconds=time.monotonic() - started,
            notes=notes,
        )


@dataclass(frozen=True)
class Planned:
    """One tensor to write: its name in the source, its name and dtype in the output."""

    info: TensorInfo
    name: str
    dtype: str


def plan_tensors(weights: WeightSource, dtype: str) -> dict[str, Planned]:
    """Source name -> what to write, aliases left out, in the model's order."""
    stored = {name: info for name, info in weights.tensors.items() if info.kind != "alias"}
    if not stored:
        raise UserError(f"weights in {weights.path}", "a checkpoint without a single tensor", "check what was saved")
    # DistributedDataParallel puts "module." before every name; a model may have a child of that name, so all or none.
    prefix = "module." if all(name.startswith("module.") for name in weights.tensors) else ""
    target = DTYPE_NAMES[dtype]
    plan = {}
    for name, info in stored.items():
        is_cast = target is not None and info.kind != "buffer" and info.dtype in WIDE_FLOATS
        plan[name] = Planned(info, name.removeprefix(prefix), target if is_cast and target else info.dtype)
    return plan


def _write_model(opened: Opened, plan: dict[str, Planned], path: Path, on_bytes: Callable[[int, int], None]) -> int:
    weights = opened.weights
    prefix = len("module.") if any(name != planned.name for name, planned in plan.items()) else 0
    aliases = {name[prefix:]: (info.alias_of or "")[prefix:] for name, info in weights.tensors.items() if info.alias_of}
    facts = {
        "format": "pt",
        "mmldlm_version": __version__,
        "source": str(opened.checkpoint or weights.path),
        "source_manifest_sha256": opened.manifest_sha256(),
        "engine": weights.engine,
        "stage": weights.stage,
        "world_size": weights.world_size,
        "step": _step_of(opened),
        "aliases": json.dumps(aliases) if aliases else None,
    }
    metadata = {key: str(value) for key, value in facts.items() if value is not None}
    tensors = [(planned.name, planned.dtype, planned.info.shape) for planned in plan.values()]
    writer = SafetensorsWriter(path, tensors, metadata)
    try:
        done = 0
        for name in weights.reading_order():
            planned = plan[name]
            for chunk in weights.iter_chunks(name):
                converted = cast(chunk, planned.info.dtype, planned.dtype)
                _check_fits(weights, planned, chunk, converted)
                writer.append(planned.name, converted)
                done += converted.nbytes
                on_bytes(done, writer.total_bytes)
        weights.finish()
        writer.finish()
    finally:
        writer.close()
    return writer.total_bytes


def _check_fits(weights: WeightSource, planned: Planned, chunk, converted) -> None:
    if planned.dtype == planned.info.dtype or weights.allow_nonfinite:
        return
    lost = nonfinite_count(converted, planned.dtype)
    if lost:
        raise UserError(
            f"the weights to fit {planned.dtype}",
            f"{lost} elements of {planned.name} that overflow it",
            "use --dtype fp32 or bf16, or --allow-nonfinite",
        )


def _step_of(opened: Opened) -> int | None:
    if opened.checkpoint is not None:
        return read_manifest(opened.checkpoint).get("step")
    return opened.weights.step


def _copy_companions(opened: Opened, plan: dict[str, Planned], folder: Path) -> list[str]:
    """config.json, the run's config.yaml and tokenizer/, as far as the checkpoint has them. Returns notes."""
    if opened.checkpoint is None:
        return ["no mmldlm checkpoint around these weights: no config.json and no tokenizer were written"]
    notes = []
    config_path = opened.checkpoint / "model_config.json"
    if config_path.is_file():
        config = json.loads(config_path.read_text())
        sizes: dict[str, int] = {}
        for planned in plan.values():
            if planned.dtype in WIDE_FLOATS and planned.info.kind != "buffer":
                sizes[planned.dtype] = sizes.get(planned.dtype, 0) + planned.info.numel
        if sizes:
            config["torch_dtype"] = max(sizes, key=lambda name: sizes[name])
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    else:
        notes.append(f"{config_path.name} is not in the checkpoint: no config.json was written")
    if (opened.checkpoint / "config.yaml").is_file():
        shutil.copyfile(opened.checkpoint / "config.yaml", folder / "config.yaml")
    if (opened.checkpoint / "tokenizer").is_dir():
        shutil.copytree(opened.checkpoint / "tokenizer", folder / "tokenizer")
    else:
        notes.append("the checkpoint has no tokenizer/: none was written")
    return notes


# -- the output folder ----------------------------------------------------------------------------------------------


def _check_target(opened: Opened, out: Path, force: bool) -> None:
    origin = (opened.checkpoint or opened.weights.path).resolve()
    real = out.resolve()
    if real == origin or origin in real.parents or real in origin.parents:
        raise UserError(
            "an output folder apart from the checkpoint",
            f"{out}, which holds or lies in {origin}",
            "give another folder",
        )
    if os.path.lexists(out):
        if not force:
            raise UserError(
                f"no file or folder at {out}", "one that exists", "give another folder, or --force to replace it"
            )
        _check_replaceable(out)


def _check_replaceable(path: Path) -> None:
    """Raises UserError unless `path` is absent or a folder in which nothing but a conversion lies."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise UserError(
            f"a folder that mmldlm convert made at {path}", "something else", "move it away or give another folder"
        )
    others = sorted({child.name for child in path.iterdir()} - OUTPUTS)
    if others:
        raise UserError(
            f"only files of an earlier conversion in {path}",
            ", ".join(others[:4]),
            "it will not be deleted: move it away or give another folder",
        )


def _check_space(parent: Path, plan: dict[str, Planned]) -> None:
    needed = sum(planned.info.numel * DTYPES[planned.dtype].itemsize for planned in plan.values())
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(
            f"{needed / 2**20:.0f} MiB of free space on the disk of {parent}",
            f"{free / 2**20:.0f} MiB",
            "free some space, give a folder on another disk, or use --dtype bf16",
        )


def _move_into_place(partial: Path, out: Path) -> None:
    for base, _, names in os.walk(partial, topdown=False):
        for name in names:
            fsync_path(Path(base) / name)
        fsync_path(Path(base))
    if os.path.lexists(out):
        aside = out.with_name(out.name + ".replaced")
        _check_replaceable(aside)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(out, aside)
        os.rename(partial, out)
        shutil.rmtree(aside)
    else:
        os.rename(partial, out)
    fsync_path(out.parent)


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `mmldlm convert`."""
    parser.add_argument(
        "src",
        metavar="SRC",
        help="RUN, RUN/latest, a step folder, a DeepSpeed folder or a model.pt; "
        "or the word `inspect`, to list what the path after it holds",
    )
    parser.add_argument("out", metavar="OUT", nargs="?", help="the folder to write (not needed with --dry-run)")
    parser.add_argument(
        "--dtype",
        choices=list(DTYPE_NAMES),
        default="fp32",
        help="dtype of the written parameters; buffers and integers keep theirs (default fp32)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it is an earlier conversion")
    parser.add_argument("--allow-nonfinite", action="store_true", help="write NaN and infinite weights too")
    parser.add_argument(
        "--dry-run", action="store_true", help="open and check the source, print the plan, write nothing"
    )


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code. Raises MmldlmError for the caller to print."""
    if args.src == "inspect":
        if args.out is None:
            raise UserError("a path after `mmldlm convert inspect`", "none", "give a run, a checkpoint or a model.pt")
        return inspect(args.out)
    if args.dry_run:
        return _dry_run(args.src, args.dtype, args.allow_nonfinite)
    if args.out is None:
        raise UserError("an output folder", "none", "mmldlm convert SRC OUT")
    with _Progress() as progress:
        summary = convert(args.src, args.out, args.dtype, args.force, args.allow_nonfinite, progress)
    mib = summary.num_bytes / 2**20
    aliases = f" + {summary.num_aliases} tied" if summary.num_aliases else ""
    _print_rows([
        ("wrote", str(Path(args.out) / MODEL)),
        ("tensors", f"{summary.num_tensors}{aliases}"),
        ("parameters", f"{summary.num_parameters:,}"),
        ("bytes", f"{summary.num_bytes:,} ({mib:.1f} MiB)"),
        ("seconds", f"{summary.seconds:.2f}"),
        ("MiB/s", f"{mib / max(summary.seconds, 1e-9):.0f}"),
    ])  # fmt: skip
    for note in summary.notes:
        print(f"note: {note}")
    return 0


def _dry_run(source: str, dtype: str, allow_nonfinite: bool) -> int:
    """Reads and checks every weight, as a conversion would."""
    opened = open_source(source, allow_nonfinite)
    with opened.weights as weights:
        plan = plan_tensors(weights, dtype)
        for name in weights.reading_order():
            for chunk in weights.iter_chunks(name):
                _check_fits(weights, plan[name], chunk, cast(chunk, plan[name].info.dtype, plan[name].dtype))
        weights.finish()
        size = sum(planned.info.numel * DTYPES[planned.dtype].itemsize for planned in plan.values())
        _print_rows([*_facts(opened), ("would write", f"{len(plan)} tensors, {size:,} bytes ({size / 2**20:.1f} MiB)")])
    return 0


def inspect(path: Path | str) -> int:
    """Prints what a checkpoint holds, without reading its weights."""
    opened = open_source(path, allow_nonfinite=True)
    with opened.weights as weights:
        _print_rows(_facts(opened))
        width = max((len(name) for name in weights.tensors), default=0)
        print()
        for name, info in weights.tensors.items():
            shape = "x".join(str(size) for size in info.shape) or "scalar"
            tied = f" -> {info.alias_of}" if info.alias_of else ""
            print(f"{name:<{width}}  {info.dtype:<9} {info.kind:<9} {shape}{tied}")
        for note in weights.notes:
            print(f"note: {note}")
    return 0


def _facts(opened: Opened) -> list[tuple[str, str]]:
    weights = opened.weights
    stored = [info for info in weights.tensors.values() if info.kind != "alias"]
    rows = [("source", str(opened.checkpoint or weights.path)), ("engine", weights.engine)]
    rows += [(key, str(value)) for key, value in (
        ("ZeRO stage", weights.stage), ("world size", weights.world_size), ("step", _step_of(opened)),
    ) if value is not None]  # fmt: skip
    rows.append(("tensors", f"{len(stored)} stored, {len(weights.tensors) - len(stored)} tied"))
    for kind in ("trainable", "frozen", "parameter", "buffer"):
        of_kind = [info for info in stored if info.kind == kind]
        if of_kind:
            elements, size = sum(info.numel for info in of_kind), sum(info.nbytes for info in of_kind)
            rows.append((kind, f"{len(of_kind)} tensors, {elements:,} elements, {size:,} bytes"))
    return rows


def _print_rows(rows: list[tuple[str, str]]) -> None:
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")


class _Progress:
    """A bar of bytes on a terminal; nothing where nobody watches."""

    def __enter__(self) -> _Progress:
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("convert", total=None)
        return self

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="mmldlm convert")
    add_arguments(_parser)
    try:
        sys.exit(main(_parser.parse_args()))
    except MmldlmError as _error:
        print(f"error: {_error}", file=sys.stderr)
        sys.exit(_error.exit_code)
