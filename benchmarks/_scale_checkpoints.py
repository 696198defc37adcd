"""Costs of checkpoints of many ranks, for benchmarks/scale.py: what one rank opens to resume, and
what rank 0 does to commit one.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from pathlib import Path

import numpy as np

TARGETS = ("zero2", "zero3", "fsdp")
# Opened on every rank besides the engine's files: manifest.json, config.yaml (four times, of which
# its checksum takes two), training_state.json, and the states of random generators.
OTHER_FILES = 7
_BLOCKS, _WIDTH = 4, 96


def make_source(folder: Path) -> Path:
    """Write a model of 34 tensors and its optimizer, as DDP saves them; return the folder."""
    import torch

    shapes = {"embedding": (512, _WIDTH), "norm": (_WIDTH,)}
    for block in range(_BLOCKS):
        for name, rows in (("qkv", 3), ("out", 1), ("up", 4), ("gate", 2)):
            shapes[f"blocks.{block}.{name}.weight"] = (rows * _WIDTH, _WIDTH // 4)
            shapes[f"blocks.{block}.{name}.bias"] = (rows * _WIDTH,)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state = {
        index: {"step": torch.tensor(3.0), "exp_avg": value * 0.1, "exp_avg_sq": value**2}
        for index, value in enumerate(weights.values())
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = {
        "state": state,
        "param_groups": [{**group, "params": list(state)}],
        "param_names": [list(weights)],
        "buffer_names": [],
        "aliases": {},
    }
    folder.mkdir()
    torch.save(weights, folder / "model.pt")
    torch.save(optimizer, folder / "optimizer.pt")
    return folder


def own_ranges(reader, target: str, rank: int, num_ranks: int):
    """Yield (name, first element, count) of what a rank of an engine holds."""
    offset = 0
    total = sum(int(np.prod(reader.shape(name))) for name in reader.names)
    for name in reader.names:
        shape = reader.shape(name)
        count = int(np.prod(shape))
        unit = count // shape[0] if target == "fsdp" else 1
        if target == "zero2":
            # One flat group is cut into equal slices.
            size = -(-total // (2 * num_ranks)) * 2
            start, end = rank * size - offset, (rank + 1) * size - offset
        else:
            size = -(-count // unit // num_ranks) * unit
            start, end = rank * size, (rank + 1) * size
        offset += count
        start, end = max(start, 0), min(end, count)
        if start < end:
            yield name, start, end - start


def resume_costs(source: Path, target: str, num_ranks: int, out: Path) -> dict[str, float]:
    """Convert a checkpoint to many ranks, and resume from it as one rank does, of as many and of
    half as many.

    Returns:
        Files opened at most, MB that rank 0 shares, CPU seconds of a rank to read its part, and of
        rank 0 to open the files of all.
    """
    from mmldlm.checkpoints.convert import convert_state
    from mmldlm.checkpoints.resume import open_training_state

    convert_state(source, out, target, num_ranks, fsync=False)
    started = time.process_time()
    with open_training_state(out) as reader:
        shared = pickle.dumps(reader)
    main_seconds = time.process_time() - started
    started, opened = time.process_time(), []
    for world in (num_ranks, num_ranks // 2):
        with Opened(out) as files, pickle.loads(shared) as reader:
            for name, start, count in own_ranges(reader, target, world // 5, world):
                for what in ("weight", *reader.moments_of(name)):
                    reader.read(name, what, start, count)
            reader.finish()
        opened.append(files.count + OTHER_FILES)
    return {
        "files": max(opened),
        "shared_mb": len(shared) / 1e6,
        "rank_seconds": (time.process_time() - started) / 2,
        "rank_0_seconds": main_seconds,
    }


class Opened:
    """Counts the files below a folder that this process opens within a block."""

    _active: list[Opened] = []

    def __init__(self, folder: Path):
        self.folder, self.count = str(folder), 0

    def __enter__(self) -> Opened:
        if not Opened._active:
            # A hook stays for the life of a process.
            sys.addaudithook(_count)
        Opened._active.append(self)
        self._is_open = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_open = False


def _count(event: str, args: tuple) -> None:
    if event == "open":
        for files in Opened._active:
            if files._is_open and str(args[0]).startswith(files.folder):
                files.count += 1


def commit_seconds(num_ranks: int, folder: Path) -> float:
    """Return the CPU seconds of rank 0 to commit a checkpoint of many ranks and to delete an older
    one.
    """
    from mmldlm.checkpoints.commit import begin
    from mmldlm.checkpoints.retention import prune
    from mmldlm.distributed.collectives import Ranks

    class Others(Ranks):
        """Rank 0 among ranks that are all well."""

        def __init__(self, rank: int):
            self.rank, self.world_size = rank, num_ranks

        def gather_objects(self, value):
            return [value]

    seconds = 0.0
    for step in (1, 2, 3):
        started = time.process_time()
        pending = begin(folder, step, Others(0), ["engine"])
        seconds = time.process_time() - started
        for rank in reversed(range(num_ranks)):
            names = [f"engine/zero_pp_rank_{rank}_{kind}_states.pt" for kind in ("model", "optim")]
            files = [pending.path / name for name in (*names, f"rng_state_rank{rank}.pt")]
            for path in files:
                path.write_bytes(b"x" * 100)
            pending.ranks = Others(rank)
            if rank == 0:
                state = {"step": step, "applied_steps": step, "global_batch": 1, "num_samples": 1}
                (pending.path / "training_state.json").write_text(json.dumps(state))
                started = time.process_time()
            pending.write_manifest_entry(files)
        pending.commit(has_entry=True)
        prune(folder, keep_last=2)
        seconds += time.process_time() - started
    return seconds
