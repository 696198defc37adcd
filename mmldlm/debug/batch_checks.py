"""Sanity checks of a micro-batch: device, value ranges, and agreement with the data."""

from __future__ import annotations

import torch

from mmldlm.data.batch import Batch
from mmldlm.data.run_data import RunData
from mmldlm.debug.findings import Findings, format_names
from mmldlm.tasks.base import Task


def check_pinned(batches: list[Batch], device: torch.device, findings: Findings) -> None:
    """Check that batches for a GPU are in pinned memory; otherwise the copy is synchronous."""
    if device.type == "cuda":
        tensors = [item for batch in batches for item in batch.tensors.items()]
        unpinned = [name for name, tensor in tensors if tensor.numel() and not tensor.is_pinned()]
        if unpinned:
            findings.failed("batches", f"not in pinned memory: {format_names(unpinned)}")


def check_batch(
    task: Task, batch: Batch, data: RunData, device: torch.device, findings: Findings
) -> None:
    """Check a micro-batch on the device against the data it was made from."""
    for bad in batch.bad:
        findings.failed("batches", f"sample {bad['id']} is left out: {bad['reason']}")
    for text in [*_tensor_problems(batch, device), *task.check_batch(data, batch)]:
        findings.failed("batches", text)


def _tensor_problems(batch: Batch, device: torch.device) -> list[str]:
    problems = []
    for name, tensor in batch.tensors.items():
        if tensor.device != device:
            problems.append(f"{name} on {tensor.device}, not on {device}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{int((~torch.isfinite(tensor)).sum())} non-finite values in {name}")
    return problems
