"""Micro-batches of one rank in the order of the batch plan, from any step on."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util  # registers its own end of the children at exit: ours, registered later, runs before it
import queue
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, Dataset

from mmldlm.data.batching.batch_plan import BatchPlan
from mmldlm.utils.stop_signals import STOP_SIGNALS

if TYPE_CHECKING:
    from mmldlm.data.batching.batch import Batch, Collator


class MicroBatches(Dataset):
    """Item i is this rank's micro-batch i % accum of step i // accum; any item can be made at any time."""

    def __init__(self, samples, plan: BatchPlan, collator: Collator, rank: int, world_size: int, accum: int):
        self.samples, self.plan, self.collator = samples, plan, collator
        self.rank, self.world_size, self.accum = rank, world_size, accum

    def __getitem__(self, item: int) -> Batch:
        step, micro = divmod(item, self.accum)
        batch = self.plan.batch(step)
        slots = self.plan.slots(batch, self.world_size, self.accum, self.rank, micro)
        return self.collator.collate(batch, slots, self.samples, self.plan.lengths)


def iterate_steps(
    dataset: MicroBatches, first_step: int, last_step: int, num_workers: int = 0, prefetch_factor: int = 4
) -> Iterator[list[Batch]]:
    """The micro-batches of steps first_step .. last_step - 1, one list of `accum` a step.

    Starting anywhere costs the same: nothing is read to be skipped.
    """
    items = range(first_step * dataset.accum, last_step * dataset.accum)
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=items,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=False,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=ignore_stop_signals,
    )
    # Without workers a GPU would idle while its process builds a batch; on a CPU a thread would only take its core.
    batches = (
        prefetch(loader, prefetch_factor) if num_workers == 0 and torch.cuda.is_available() else start_workers(loader)
    )
    for _ in range(first_step, last_step):
        yield [next(batches) for _ in range(dataset.accum)]


def ignore_stop_signals(worker_id: int) -> None:
    """What each worker does first: ignore the signals that ask the run to save and stop.

    Slurm, systemd and a terminal send them to every process of the job. torch's workers die of SIGTERM, and the death
    of a worker raises in the training loop, which would end without the checkpoint that the signal asked for.
    """
    for name in STOP_SIGNALS:
        signal.signal(name, signal.SIG_IGN)


def start_workers(loader: DataLoader) -> Iterator:
    """iter(loader); its workers begin with the stop signals blocked, so that none dies before it ignores them."""
    others = set(multiprocessing.active_children())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # At exit multiprocessing ends its children with SIGTERM and waits for them: for ever, where they ignore it.
    for worker in set(multiprocessing.active_children()) - others:
        atexit.register(worker.kill)
    return batches


def prefetch(batches: Iterable, depth: int) -> Iterator:
    """The same items in the same order, made by a thread up to ``depth`` ahead; its errors are raised here."""
    made: queue.Queue = queue.Queue(depth)
    stop = threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def put(kind: str, value: object) -> None:
        while not stop.is_set():
            try:
                return made.put((kind, value), timeout=0.1)
            except queue.Full:
                continue

    def make() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a thread begins on device 0, and pinning would open a context there
            for item in batches:
                put("item", item)
                if stop.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=make, name="batches", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = made.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:  # also when the loop above goes back to a checkpoint and drops this iterator
        stop.set()
        thread.join()
