"""What is said, and with training.memory_snapshot written, where a GPU runs out of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

# Allocations of a rank, with their Python stacks: a few hundred MB at most.
MAX_ENTRIES = 100_000
_FIX = (
    "  fix:   model.gradient_checkpointing=true, or half of training.train_batch_size with twice"
    " the training.grad_accum_steps,\n"
    "         or --deepspeed_config ds_configs/zero3.json; `mmldlm preflight` says what fits"
    " (MEM001)"
)
_RECORD = "\n         training.memory_snapshot=true writes what the memory held"


@contextlib.contextmanager
def explain_out_of_memory(is_recorded: bool) -> Iterator[None]:
    """Add to an OutOfMemoryError what to do about it; its traceback prints that below.

    Args:
        is_recorded: Whether training.memory_snapshot is set already.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(_FIX if is_recorded else _FIX + _RECORD)
        raise


@contextlib.contextmanager
def memory_snapshot(path: Path | None, device: torch.device) -> Iterator[None]:
    """Record the allocations of a GPU, and write them where it runs out of memory.

    The note that the error gets names the file. That it cannot be written is a note, too: the
    error of interest is the one of the memory.

    Args:
        path: File for https://pytorch.org/memory_viz; None records nothing.
        device: Device of this rank; only CUDA's are recorded.
    """
    if path is None or device.type != "cuda":
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
    try:
        yield
    except torch.OutOfMemoryError as error:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
            error.add_note(f"  memory: {path}, for https://pytorch.org/memory_viz")
        except (OSError, RuntimeError) as failure:
            error.add_note(f"  memory: {path} could not be written: {failure}")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
